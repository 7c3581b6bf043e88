"""The dense chain in one cooperative launch; what a program computes at a step is `dspark.kernels.markov_dense`'s.

Programs form blocks that draft the same requests; only a block has to agree on tokens. Each program publishes a race
word per request, and polls until the words carry this step's number. Nothing else is passed between programs, so that
no fence is needed: a word is one 8-byte store. There are two ways to the winners:

  few requests     every program polls everyone's words
  more             each request is decided by one program, which polls everyone's words of it and publishes the winner;
                   all poll only those. Words of 64 requests from 264 programs are 135 KB, which would be 36 MB a step
                   if everyone read them.

Words are double buffered. A program can't overwrite its word of step i at step i + 2 before it has been read: it needs
the winners of step i + 1 first, which are decided from the words that everyone published after those of step i were
decided. Steps are numbered on through the launches by a counter per program, which all programs move alike.

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
    joined_log2_mass,
    prefetch_rows,
    race_winner,
    read_columns,
    renumbered,
    row_scales,
    weight_tile,
)
from dspark.kernels.markov_features import hidden_confidence, token_confidence

_GROUP = tl.constexpr(GROUP)
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number
_WORST_WORD = tl.constexpr(-(2**63))
_MAX_POLLS = tl.constexpr(2**23)


@triton.jit
def _polled(pointers, mask, tag):
    """Words once all of them carry the tag, at least one for every thread of the program. Of fewer words threads would
    hold copies, each with a load of its own, and one copy may be older than the one that is looked at.

    A program that waits for seconds stops the kernel with an error: some program is not running, and silence would be
    a hang.
    """
    words = tl.load(pointers, mask=mask, other=_WORST_WORD, volatile=True)
    polls = 0
    while (tl.max(tl.where(mask & ((words & 255) != tag), 1, 0)) > 0) & (polls < _MAX_POLLS):
        words = tl.load(pointers, mask=mask, other=_WORST_WORD, volatile=True)
        polls += 1
    if polls == _MAX_POLLS:
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1)
    return words


@triton.jit
def _slot(step, epoch, first_row, num_parts, BLOCK_B: tl.constexpr):
    """Tag of a step, int64, and the place of a block of requests in the double buffers."""
    blocks = tl.num_programs(0) // num_parts
    return (tl.zeros([], tl.int64) + epoch + step) & 255, ((epoch + step) & 1) * blocks + first_row // BLOCK_B


@triton.jit
def _winners(
    words_ptr, winners_ptr, part, rows, tag, num_parts,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, POLLED: tl.constexpr, OWN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Columns [BLOCK_B] of a step, once everyone's words of it are there; `rows` of the block are requests."""
    other = tl.arange(0, BLOCK_V)
    if OWN == 0:
        r = tl.arange(0, POLLED)
        there = (r < rows)[:, None] & (other < num_parts)[None, :]
        words = _polled(words_ptr + r[:, None] * num_parts + other[None, :], there, tag)
        column = race_winner(tl.max(words, axis=1))
        return tl.reshape(tl.broadcast_to(column[None, :], [BLOCK_B // POLLED, POLLED]), [BLOCK_B])
    else:
        r = part + num_parts * tl.arange(0, OWN)
        there = (r < rows)[:, None] & (other < num_parts)[None, :]
        words = _polled(words_ptr + r[:, None] * num_parts + other[None, :], there, tag)
        column = race_winner(tl.max(words, axis=1))
        tl.atomic_xchg(winners_ptr + r, (column.to(tl.int64) << 8) | tag, mask=r < rows, sem="relaxed")
        first, local = tl.arange(0, COPIES) == 0, tl.arange(0, BLOCK_B)
        at = winners_ptr + local[None, :] + tl.zeros([COPIES, BLOCK_B], tl.int32)
        words = _polled(at, first[:, None] & (local < rows)[None, :], tag)
        return (tl.max(words, axis=0) >> 8).to(tl.int32)


@triton.jit
def join_masses(
    masses_ptr, first_row, epoch, part, lse_ptr, temperature_ptr, cache_rows_ptr, rows, num_parts, num_steps,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Normalisers of all steps, from everyone's masses [STEPS, BLOCK_B, num_parts], once the last step is over; a row
    is one program's.
    """
    other, step = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    there = (other < num_parts)[:, None] & (step < STEPS)[None, :]
    tags = (tl.zeros([BLOCK_S], tl.int64) + epoch + step) & 255
    for r in range(part, rows, num_parts):
        row = first_row + r
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + row) >= 0
        if live:
            at = (step[None, :] * BLOCK_B + r) * num_parts + other[:, None]
            masses = _polled(masses_ptr + at, there, tags[None, :])
            parts = tl.where(there, (masses >> 32).to(tl.int32).to(tl.float32, bitcast=True), _LOWEST)
            _, noisy = row_scales(tl.load(temperature_ptr + row))
            tl.store(lse_ptr + row * num_steps + step, joined_log2_mass(parts, noisy, 0), mask=step < STEPS)


@triton.jit
def hidden_shares(
    part, first_row, hidden_ptr, weight_ptr, bias_ptr, confidence_ptr, cache_rows_ptr, rows,
    num_parts, hidden_stride, hidden_step, hidden_size,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The hidden states' share of the confidences; pairs of a step and a request are dealt out to the programs."""
    for pair in range(part, rows * STEPS, num_parts):
        step, row = pair // rows, first_row + pair % rows
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + row) >= 0
        if live:
            wide = tl.zeros([], tl.int64) + row  # a row's offset may pass 32 bits
            hidden_row = hidden_ptr + wide * hidden_stride + step * hidden_step
            logit = hidden_confidence(hidden_row, hidden_size, weight_ptr, bias_ptr, BLOCK_H)
            tl.store(confidence_ptr + row * STEPS + step, logit)
    tl.debug_barrier()  # other threads add the tokens' share


@triton.jit
def _add_token_shares(
    previous, part, first_row, step, w1_ptr, weight_ptr, confidence_ptr, cache_rows_ptr, rows, num_parts, hidden_size,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The share of the previous tokens [BLOCK_B] in the confidences of a step, dealt out as in `hidden_shares`."""
    r = part - step * rows % num_parts
    r += tl.where(r < 0, num_parts, 0)
    while r < rows:  # a `for` would keep the loop around it from being pipelined
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + first_row + r) >= 0
        if live:
            token = tl.sum(tl.where(tl.arange(0, BLOCK_B) == r, previous, 0), axis=0).to(tl.int64)
            share = token_confidence(token, w1_ptr, hidden_size, weight_ptr, RANK, BLOCK_R)
            at = confidence_ptr + (first_row + r) * STEPS + step
            tl.store(at, tl.load(at) + share)
        r += num_parts


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
def _token_of(column, ids_ptr, REDUCED: tl.constexpr):
    """Target ids of columns."""
    if REDUCED:
        return tl.load(ids_ptr + column).to(tl.int32)
    else:
        return column


@triton.jit
def send(
    word, column, previous, part, first_row, step, epoch, live, memory, confidence, w1_ptr, ids_ptr,
    cache_rows_ptr, rows, num_parts, STEPS: tl.constexpr, HAS_ROWS: tl.constexpr,
    REDUCED: tl.constexpr, CONFIDENCE: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr, POLLED: tl.constexpr, W1_BYTES: tl.constexpr,
):  # fmt: skip
    """Publish this program's race words [BLOCK_B] of a step, and do what no token depends on while they travel: the row
    of W1 that would be needed next is brought near, and the share of the previous tokens in the confidence is added.
    """
    words_ptr, _, _, _ = memory
    confidence_ptr, confidence_weight_ptr, hidden_size = confidence
    local = tl.arange(0, BLOCK_B)
    tag, slot = _slot(step, epoch, first_row, num_parts, BLOCK_B)
    at = words_ptr + (slot * POLLED + local) * num_parts + part
    tl.atomic_xchg(at, word | tag, mask=local < POLLED, sem="relaxed")
    if W1_BYTES > 0:
        candidate = _token_of(column, ids_ptr, REDUCED)
        prefetch_rows(w1_ptr, tl.where(live, candidate, 0).to(tl.int64), W1_BYTES)
    if CONFIDENCE == "hidden+markov":
        _add_token_shares(
            previous, part, first_row, step, w1_ptr, confidence_weight_ptr, confidence_ptr, cache_rows_ptr, rows,
            num_parts, hidden_size, HAS_ROWS, STEPS, RANK, BLOCK_R, BLOCK_B,
        )  # fmt: skip


@triton.jit
def send_mass(mass, part, first_row, step, epoch, memory, num_parts, BLOCK_B: tl.constexpr, POLLED: tl.constexpr):
    """Publish this program's log2 masses [BLOCK_B] of a step, which are read when the last step is over."""
    local = tl.arange(0, BLOCK_B)
    tag, _ = _slot(step, epoch, first_row, num_parts, BLOCK_B)
    packed = (mass.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag
    at = memory[2] + (step * BLOCK_B + local) * num_parts + part
    tl.atomic_xchg(at, packed, mask=local < POLLED, sem="relaxed")


@triton.jit
def receive(
    part, first_row, step, epoch, live, memory, ids_ptr, rows, num_parts, first_step, num_steps,
    REDUCED: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, POLLED: tl.constexpr, OWN: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Everyone's tokens [BLOCK_B] of a step, 0 where a row is not live."""
    words_ptr, winners_ptr, _, tokens_ptr = memory
    local = tl.arange(0, BLOCK_B)
    tag, slot = _slot(step, epoch, first_row, num_parts, BLOCK_B)
    won = _winners(
        words_ptr + slot * POLLED * num_parts, winners_ptr + slot * BLOCK_B, part, rows, tag, num_parts,
        BLOCK_V, BLOCK_B, POLLED, OWN, COPIES,
    )  # fmt: skip
    token = tl.where(live, _token_of(tl.where(live, won, 0), ids_ptr, REDUCED), 0)
    at = tokens_ptr + (first_row + local) * num_steps + first_step + step
    tl.store(at, token.to(tl.int64), mask=live & (local % num_parts == part))
    return token


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
