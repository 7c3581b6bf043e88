"""The dense chain in one cooperative launch: the loop over steps and tiles. What a program computes at a step is
`dspark.kernels.markov_dense`'s, how programs agree `dspark.kernels.markov_exchange`'s.

Every other step goes through the tiles backwards, so that it begins with those that the step before has left in the L2
cache: in one direction, a W2 larger than the cache would be gone each time it is needed.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov import GROUP
from dspark.kernels.markov_dense import (
    corrected,
    draw_numbers,
    draw_within,
    race_groups,
    read_masses,
    request_rows,
    tile_masses,
    total_mass,
)
from dspark.kernels.markov_device import (
    after_barrier,
    bias_of,
    feature_rows,
    race_winner,
    read_columns,
    renumbered,
    weight_tile,
)
from dspark.kernels.markov_exchange import hidden_shares, join_masses, receive, send, send_mass

_GROUP = tl.constexpr(GROUP)


@triton.jit
def _race(
    masses, numbers, groups_ptr, part, num_parts, count, cache_ptr, cache_row, live, scale, noisy, ids_ptr, num_columns,
    SCATTERED: tl.constexpr, HELD: tl.constexpr, BLOCK_B: tl.constexpr, SPAN_FOURS: tl.constexpr, FOURS: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """This program's race words and columns [BLOCK_B] of a step, with its `draw_numbers`; and the log2 masses of its
    groups. HELD: those of one tile, `masses`; otherwise they are in memory, as are all logits.
    """
    if HELD:
        even, odd = tl.split(tl.reshape(masses, [BLOCK_B, FOURS, 2, 2]))
        m0, m2 = tl.split(even)
        m1, m3 = tl.split(odd)
        own = (m0, m1, m2, m3)
    else:
        groups_ptr = after_barrier(groups_ptr)  # masses were written by other threads
        own = read_masses(groups_ptr, count, noisy, BLOCK_B, FOURS, HALVES)
    word = race_groups(own, numbers, part, num_parts, noisy, BLOCK_B, SPAN_FOURS, FOURS)
    if HELD:
        cache_ptr = after_barrier(cache_ptr)  # and so were logits
    column = draw_within(
        race_winner(word), numbers[4], cache_ptr, cache_row, live, ids_ptr, num_columns, scale, noisy, SCATTERED
    )
    return renumbered(word, column), column, own


@triton.jit
def _tile(i, part, num_parts, SPAN: tl.constexpr):
    """A program's i-th tile: it has every num_parts-th span of SPAN tiles, so that programs side by side read
    neighbouring columns."""
    return (part + i // SPAN * num_parts) * SPAN + i % SPAN


@triton.jit
def _streamed_tile(
    tile, features, w2_ptr, w2_scale_ptr, base_ptr, base_row, cache_ptr, cache_row, live, scale, noisy, ids_ptr,
    num_columns, logit_scale, WHOLE: tl.constexpr, SCALED: tl.constexpr, SCATTERED: tl.constexpr, PACKED: tl.constexpr,
    CACHE: tl.constexpr, HAS_HEAD: tl.constexpr, FP8: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """`tile_masses` of a tile whose rows of W2 and base logits are loaded for it."""
    product = 0
    if HAS_HEAD:
        weight = weight_tile(w2_ptr, tile, num_columns, WHOLE, RANK, BLOCK_R, TILE, WARPS, FP8)
        product = bias_of(features, weight)
    four = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    base = read_columns(base_ptr, base_row, four, live, num_columns, WHOLE, PACKED)
    logits = corrected(
        base, product, tile, w2_scale_ptr, num_columns, logit_scale, SCALED, HAS_HEAD, FP8, BLOCK_B, TILE, WARPS
    )
    return tile_masses(
        logits, tile, cache_row, live, scale, noisy, cache_ptr, ids_ptr, num_columns,
        WHOLE, SCATTERED, PACKED, CACHE, BLOCK_B, TILE, SUMMED,
    )  # fmt: skip


@triton.jit
def _chain_kernel(  # noqa: C901, PLR0912, PLR0915 - the loop over steps in its three forms
    base_ptr, cache_ptr, w2_ptr, w2_scale_ptr, ids_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr,
    w1_ptr, features_ptr, anchors_ptr, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr,
    tokens_ptr, lse_ptr, confidence_ptr, words_ptr, winners_ptr, masses_ptr, groups_ptr, epochs_ptr,
    batch, first_step, num_steps, num_columns, num_spans, num_parts, sums_each, logit_scale,
    base_stride, base_step, cache_stride, cache_step, hidden_stride, hidden_step, hidden_size,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, CONFIDENCE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, JOIN_V: tl.constexpr, POLLED: tl.constexpr, OWN: tl.constexpr,
    COPIES: tl.constexpr, W1_BYTES: tl.constexpr, REDUCED: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr,
    SCATTERED: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr, STORED: tl.constexpr, HAS_HEAD: tl.constexpr,
    GIVEN: tl.constexpr, FP8: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, SPAN: tl.constexpr, FOURS: tl.constexpr, HALVES: tl.constexpr,
    STAGES: tl.constexpr, HELD: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """STEPS steps of num_steps, from first_step on. W2 is streamed through at each, or HELD, one tile a program.

    Memory for num_blocks * num_parts programs: words [2, num_blocks, POLLED, num_parts], winners [2, num_blocks,
    BLOCK_B], masses [num_blocks, STEPS, BLOCK_B, num_parts], groups [programs, sums_each, BLOCK_B].
    GIVEN: the features of row b are row b of `features_ptr`, and there is one step.
    """
    SUMMED: tl.constexpr = _GROUP // 2 if HALVES else _GROUP
    PER_TILE: tl.constexpr = TILE // SUMMED
    PER_STEP: tl.constexpr = PER_TILE * BLOCK_B
    SPAN_FOURS: tl.constexpr = SPAN * TILE // (4 * _GROUP)
    program, local = tl.program_id(0), tl.arange(0, BLOCK_B)
    part, first_row = program % num_parts, program // num_parts * BLOCK_B
    row, rows = first_row + local, tl.minimum(batch - first_row, BLOCK_B)
    slot_row, live, scale, noisy, position, key_low, key_high = request_rows(
        row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
    )
    epoch = tl.load(epochs_ptr + program)
    token = tl.load(anchors_ptr + row, mask=live, other=0).to(tl.int32)
    if CONFIDENCE != "none":
        hidden_shares(
            part, first_row, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, confidence_ptr, cache_rows_ptr,
            rows, num_parts, hidden_stride, hidden_step, hidden_size, HAS_ROWS, STEPS, BLOCK_H,
        )  # fmt: skip
    masses_ptr += first_row * STEPS * num_parts
    groups_ptr += (tl.zeros([], tl.int64) + program) * sums_each * BLOCK_B
    base_ptr += first_step * base_step
    cache_ptr += first_step * cache_step
    base_row = row.to(tl.int64) * base_stride
    cache_row = (slot_row if STORED else row.to(tl.int64)) * cache_stride
    request = (position + first_step, key_low, key_high)
    memory = (words_ptr, winners_ptr, masses_ptr, tokens_ptr)
    confidence = (confidence_ptr, confidence_weight_ptr, hidden_size)
    rounds = tl.cdiv(num_spans - part, num_parts) * SPAN
    count = rounds * TILE // (4 * _GROUP)
    group_at = groups_ptr + local[:, None] + tl.arange(0, PER_TILE)[None, :] * BLOCK_B
    fours = tl.arange(0, TILE // 4)
    if HELD:
        held = weight_tile(w2_ptr, part, num_columns, WHOLE, RANK, BLOCK_R, TILE, WARPS, FP8)
    if FLAT:
        features = 0
        if HAS_HEAD:
            features = feature_rows(token, live, features_ptr, RANK, BLOCK_R)
        numbers = draw_numbers(request, part, num_parts, 0, SPAN_FOURS, FOURS)
        # One loop over the tiles of all steps, so that the next step's first tiles load while its tokens are found.
        for turn in tl.range(STEPS * rounds, num_stages=STAGES):
            step = turn // rounds
            i = turn - step * rounds
            place = tl.where(step % 2 == 1, rounds - 1 - i, i)
            masses = _streamed_tile(
                _tile(place, part, num_parts, SPAN), features, w2_ptr, w2_scale_ptr, base_ptr + step * base_step,
                base_row, cache_ptr + step * cache_step, cache_row, live, scale, noisy, ids_ptr, num_columns,
                logit_scale, WHOLE, SCALED, SCATTERED, PACKED, CACHE, HAS_HEAD, FP8, RANK, BLOCK_R, BLOCK_B,
                TILE, WARPS, SUMMED,
            )  # fmt: skip
            tl.store(group_at + place * PER_STEP, masses)
            if i == rounds - 1:
                word, column, own = _race(
                    0, numbers, groups_ptr, part, num_parts, count, cache_ptr + step * cache_step, cache_row, live,
                    scale, noisy, ids_ptr, num_columns, SCATTERED, False, BLOCK_B, SPAN_FOURS, FOURS, HALVES,
                )  # fmt: skip
                send(
                    word, column, token, part, first_row, step, epoch, live, memory, confidence, w1_ptr, ids_ptr,
                    cache_rows_ptr, rows, num_parts, STEPS, HAS_ROWS, REDUCED, CONFIDENCE,
                    RANK, BLOCK_R, BLOCK_B, POLLED, W1_BYTES,
                )  # fmt: skip
                send_mass(total_mass(own, noisy), part, first_row, step, epoch, memory, num_parts, BLOCK_B, POLLED)
                numbers = draw_numbers(request, part, num_parts, step + 1, SPAN_FOURS, FOURS)
                token = receive(
                    part, first_row, step, epoch, live, memory, ids_ptr, rows, num_parts, first_step, num_steps,
                    REDUCED, BLOCK_V, BLOCK_B, POLLED, OWN, COPIES,
                )  # fmt: skip
                if HAS_HEAD:
                    features = feature_rows(token, live, features_ptr, RANK, BLOCK_R)
    else:
        if HELD:
            numbers = draw_numbers(request, part, num_parts, 0, SPAN_FOURS, FOURS)
            base = read_columns(base_ptr, base_row, part * (TILE // 4) + fours, live, num_columns, WHOLE, PACKED)
        for step in range(STEPS):
            features = 0
            if HAS_HEAD:
                features = feature_rows(row if GIVEN else token, live, features_ptr, RANK, BLOCK_R)
            if HELD:
                logits = corrected(
                    base, bias_of(features, held), part, w2_scale_ptr, num_columns, logit_scale,
                    SCALED, HAS_HEAD, FP8, BLOCK_B, TILE, WARPS,
                )  # fmt: skip
                masses = tile_masses(
                    logits, part, cache_row, live, scale, noisy, cache_ptr + step * cache_step, ids_ptr, num_columns,
                    WHOLE, SCATTERED, PACKED, CACHE, BLOCK_B, TILE, SUMMED,
                )  # fmt: skip
            else:
                for i in tl.range(rounds, num_stages=STAGES):
                    place = tl.where(step % 2 == 1, rounds - 1 - i, i)
                    masses = _streamed_tile(
                        _tile(place, part, num_parts, SPAN), features, w2_ptr, w2_scale_ptr,
                        base_ptr + step * base_step, base_row, cache_ptr + step * cache_step, cache_row, live, scale,
                        noisy, ids_ptr, num_columns, logit_scale, WHOLE, SCALED, SCATTERED, PACKED, CACHE, HAS_HEAD,
                        FP8, RANK, BLOCK_R, BLOCK_B, TILE, WARPS, SUMMED,
                    )  # fmt: skip
                    tl.store(group_at + place * PER_STEP, masses)
            if not HELD:  # read anew, so that the loop over tiles has the registers
                _, _, _, _, position, key_low, key_high = request_rows(
                    row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
                )
                again = (position, key_low, key_high)
                numbers = draw_numbers(again, part, num_parts, first_step + step, SPAN_FOURS, FOURS)
            word, column, own = _race(
                masses if HELD else 0, numbers, groups_ptr, part, num_parts, count, cache_ptr + step * cache_step,
                cache_row, live, scale, noisy, ids_ptr, num_columns,
                SCATTERED, HELD, BLOCK_B, SPAN_FOURS, FOURS, HALVES,
            )  # fmt: skip
            send(
                word, column, token, part, first_row, step, epoch, live, memory, confidence, w1_ptr, ids_ptr,
                cache_rows_ptr, rows, num_parts, STEPS, HAS_ROWS, REDUCED, CONFIDENCE,
                RANK, BLOCK_R, BLOCK_B, POLLED, W1_BYTES,
            )  # fmt: skip
            send_mass(total_mass(own, noisy), part, first_row, step, epoch, memory, num_parts, BLOCK_B, POLLED)
            if HELD:  # the next base logits travel too
                following = tl.minimum(step + 1, STEPS - 1)
                numbers = draw_numbers(request, part, num_parts, following, SPAN_FOURS, FOURS)
                base = read_columns(
                    base_ptr + following * base_step, base_row, part * (TILE // 4) + fours, live, num_columns,
                    WHOLE, PACKED,
                )  # fmt: skip
            token = receive(
                part, first_row, step, epoch, live, memory, ids_ptr, rows, num_parts, first_step, num_steps,
                REDUCED, BLOCK_V, BLOCK_B, POLLED, OWN, COPIES,
            )  # fmt: skip
    join_masses(
        masses_ptr, first_row, epoch, part, lse_ptr + first_step, temperature_ptr, cache_rows_ptr, rows, num_parts,
        num_steps, HAS_ROWS, STEPS, BLOCK_S, JOIN_V, BLOCK_B,
    )  # fmt: skip
    tl.store(epochs_ptr + program, epoch + STEPS)
