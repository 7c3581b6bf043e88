"""The dense chain in one cooperative launch; see `dspark.kernels.markov_dense`.

Programs form groups that draft the same block of requests; only a group has to agree on tokens. A program publishes a
race word per request, then polls everyone's words until all carry this step's number. Nothing else is passed between
programs, so that no fence is needed: a word is one 8-byte store. The words are double buffered. A program can't
overwrite its word of step i at step i + 2 before everyone has read it, because it needs everyone's word of step i + 1
first, which they publish after reading those of step i.

Every other step goes through the tiles backwards, so that it begins with those that the step before has left in the L2
cache: in one direction, a W2 larger than the cache would be gone each time it is needed.

Steps are numbered on through the launches by a counter per program, which all programs of a workspace move alike.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_dense import carried_mass, carried_word, empty_carry, race_tile, request_rows
from dspark.kernels.markov_device import feature_rows, joined_log2_mass, race_winner, row_scales, weight_tile
from dspark.kernels.markov_features import hidden_confidence

_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number
_WORST_WORD = tl.constexpr(-(2**63))
_MAX_POLLS = tl.constexpr(2**23)


@triton.jit
def _polled(pointers, mask, tag):
    """Words once all of them carry the tag. A program that waits for seconds stops the kernel with an error: some
    program is not running, and silence would be a hang.
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
def _winners(
    words_ptr, first_row, tag, scratch_ptr, batch, num_parts,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Wait for everyone's words [num_parts, BLOCK_B], and return the tokens [BLOCK_B]; ROWS of them at a time."""
    other = tl.arange(0, BLOCK_V)
    if ROWS == BLOCK_B:
        r = tl.arange(0, ROWS)
        there = (other < num_parts)[:, None] & (first_row + r < batch)[None, :]
        return race_winner(tl.max(_polled(words_ptr + other[:, None] * BLOCK_B + r[None, :], there, tag), axis=0))
    else:
        for start in tl.static_range(0, BLOCK_B, ROWS):
            r = start + tl.arange(0, ROWS)
            there = (other < num_parts)[:, None] & (first_row + r < batch)[None, :]
            words = _polled(words_ptr + other[:, None] * BLOCK_B + r[None, :], there, tag)
            tl.store(scratch_ptr + r, race_winner(tl.max(words, axis=0)))
        tl.debug_barrier()  # the winners were written by other threads of this program
        token = tl.load(scratch_ptr + tl.arange(0, BLOCK_B))
        tl.debug_barrier()
        return token


@triton.jit
def join_masses(
    masses_ptr, first_row, epoch, part, lse_ptr, temperature_ptr, cache_rows_ptr, batch, num_parts,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Normalisers of all steps, from everyone's masses [STEPS, num_parts, BLOCK_B], once the last step is over; a row
    is one program's.
    """
    other, step = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    there = (other < num_parts)[:, None] & (step < STEPS)[None, :]
    tags = (tl.zeros([BLOCK_S], tl.int64) + epoch + step) & 255
    for r in range(part, BLOCK_B, num_parts):
        row = first_row + r
        live = row < batch
        if HAS_ROWS:
            live = live & (tl.load(cache_rows_ptr + row, mask=live, other=-1) >= 0)
        if live:
            at = (step[None, :] * num_parts + other[:, None]) * BLOCK_B + r
            masses = _polled(masses_ptr + at, there, tags[None, :])
            parts = tl.where(there, (masses >> 32).to(tl.int32).to(tl.float32, bitcast=True), _LOWEST)
            _, noisy = row_scales(tl.load(temperature_ptr + row))
            tl.store(lse_ptr + row * STEPS + step, joined_log2_mass(parts, noisy, 0), mask=step < STEPS)


@triton.jit
def own_confidences(
    part, first_row, hidden_ptr, weight_ptr, bias_ptr, confidence_ptr, cache_rows_ptr, batch,
    num_parts, hidden_stride, hidden_step, hidden_size,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The hidden states' share of the confidences, (request, step) pairs dealt out to the programs."""
    rows = tl.minimum(batch - first_row, BLOCK_B)
    for pair in range(part, rows * STEPS, num_parts):
        row, step = first_row + pair // STEPS, pair % STEPS
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + row) >= 0
        if live:
            wide = tl.zeros([], tl.int64) + row  # a row's offset may pass 32 bits
            hidden_row = hidden_ptr + wide * hidden_stride + step * hidden_step
            logit = hidden_confidence(hidden_row, hidden_size, weight_ptr, bias_ptr, BLOCK_H)
            tl.store(confidence_ptr + row * STEPS + step, logit)


@triton.jit
def slot_of(step, epoch, first_row, num_parts, blocks, BLOCK_B: tl.constexpr):
    """Tag of a step, int64, and where its words begin for a block of rows."""
    tag = (tl.zeros([], tl.int64) + epoch + step) & 255
    return tag, (((epoch + step) & 1) * blocks + first_row // BLOCK_B) * num_parts * BLOCK_B


@triton.jit
def publish(word, words_ptr, part, tag, BLOCK_B: tl.constexpr):
    """This program's race words [BLOCK_B] of a step: the first thing to do once they are known."""
    tl.atomic_xchg(words_ptr + part * BLOCK_B + tl.arange(0, BLOCK_B), word | tag, sem="relaxed")


@triton.jit
def joined(
    mass, previous, part, first_row, step, tag, live, w1_ptr, words_ptr, masses_ptr, scratch_ptr,
    tokens_ptr, confidence_ptr, confidence_weight_ptr, batch, num_parts, hidden_size,
    STEPS: tl.constexpr, CONFIDENCE: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Everyone's tokens [BLOCK_B] of a step, after this program's words of it are published.

    What no token depends on is done while the words travel: this program's log2 masses [BLOCK_B] go out, and the share
    of the previous tokens in the confidence is added.
    """
    local, r = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_R)
    row = first_row + local
    slot = num_parts * BLOCK_B  # of one step and block
    packed = (mass.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag
    tl.atomic_xchg(masses_ptr + step * slot + part * BLOCK_B + local, packed, sem="relaxed")
    if CONFIDENCE == "hidden+markov":
        mine = live & ((local * STEPS + step) % num_parts == part)
        if tl.max(mine.to(tl.int32)) > 0:
            weights = tl.load(confidence_weight_ptr + hidden_size + r, mask=r < RANK, other=0.0).to(tl.float32)
            at = w1_ptr + previous.to(tl.int64)[:, None] * RANK + r[None, :]
            embedded = tl.load(at, mask=mine[:, None] & (r < RANK)[None, :], other=0.0).to(tl.float32)
            at = confidence_ptr + row * STEPS + step
            logit = tl.load(at, mask=mine, other=0.0) + tl.sum(embedded * weights[None, :], axis=1)
            tl.store(at, logit, mask=mine)
    token = _winners(words_ptr, first_row, tag, scratch_ptr, batch, num_parts, BLOCK_V, BLOCK_B, ROWS)
    tl.store(tokens_ptr + row * STEPS + step, token.to(tl.int64), mask=live & (local % num_parts == part))
    return token


@triton.jit
def _raced(
    carry, weight, features, tile, backward, rows, pointers, base_step, cache_step, num_columns, logit_scale,
    any_noise, step, nothing,
    REDUCED: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, SCATTERED: tl.constexpr, PACKED: tl.constexpr,
    CACHE: tl.constexpr, STORED: tl.constexpr, HAS_HEAD: tl.constexpr, FP8: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """`race_tile` of a step whose logits begin `step` times base_step and cache_step further on."""
    base_ptr, cache_ptr, w2_scale_ptr, ids_ptr = pointers
    return race_tile(
        carry, weight, features, tile, backward, rows, base_ptr + step * base_step, cache_ptr + step * cache_step,
        w2_scale_ptr, ids_ptr, num_columns, logit_scale, any_noise, (tl.zeros([], tl.int32) + step).to(tl.uint32),
        nothing.to(tl.uint32),
        REDUCED, WHOLE, SCALED, SCATTERED, PACKED, CACHE, STORED, HAS_HEAD, FP8, BLOCK_B, BLOCK_G, STRIDE,
    )  # fmt: skip


@triton.jit
def _exchanged(
    carry, noisy, token, part, first_row, step, epoch, live, w1_ptr, confidence_weight_ptr, exchange,
    batch, num_parts, hidden_size, STEPS: tl.constexpr, CONFIDENCE: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Everyone's tokens [BLOCK_B] of a step, from this program's carry and the previous tokens."""
    words_ptr, masses_ptr, scratch_ptr, tokens_ptr, confidence_ptr = exchange
    tag, start = slot_of(step, epoch, first_row, num_parts, tl.num_programs(0) // num_parts, BLOCK_B)
    publish(carried_word(carry), words_ptr + start, part, tag, BLOCK_B)
    return joined(
        carried_mass(carry, noisy), token, part, first_row, step, tag, live, w1_ptr, words_ptr + start, masses_ptr,
        scratch_ptr, tokens_ptr, confidence_ptr, confidence_weight_ptr, batch, num_parts, hidden_size,
        STEPS, CONFIDENCE, RANK, BLOCK_R, BLOCK_V, BLOCK_B, ROWS,
    )  # fmt: skip


@triton.jit
def _chain_kernel(  # noqa: C901, PLR0912, PLR0915 - branches of the compiler
    base_ptr, cache_ptr, w2_ptr, w2_scale_ptr, ids_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr,
    w1_ptr, anchors_ptr, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, tokens_ptr, lse_ptr, confidence_ptr,
    words_ptr, masses_ptr, epochs_ptr, scratch_ptr,
    batch, num_columns, num_tiles, num_parts, base_stride, base_step, cache_stride, cache_step, logit_scale,
    hidden_stride, hidden_step, hidden_size,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, CONFIDENCE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr, POLLED_ROWS: tl.constexpr, STAGES: tl.constexpr, REDUCED: tl.constexpr,
    WHOLE: tl.constexpr, SCALED: tl.constexpr, SCATTERED: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr,
    STORED: tl.constexpr, HAS_HEAD: tl.constexpr, FP8: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, STRIDE: tl.constexpr, HELD: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """All steps, with W2 streamed through at each; or HELD, one tile a program, through all of them. Programs
    [num_blocks * num_parts]; words [2, num_blocks, num_parts, BLOCK_B], masses [num_blocks, STEPS, num_parts, BLOCK_B].
    """
    program = tl.program_id(0)
    part, first_row = program % num_parts, program // num_parts * BLOCK_B
    row = first_row + tl.arange(0, BLOCK_B)
    cache_row, live, scale, noisy, position, key_low, key_high = request_rows(
        row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
    )
    any_noise = tl.max(noisy) > 0.0
    epoch = tl.load(epochs_ptr + program)
    token = tl.load(anchors_ptr + row, mask=live, other=0).to(tl.int32)
    if CONFIDENCE != "none":
        own_confidences(
            part, first_row, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, confidence_ptr, cache_rows_ptr,
            batch, num_parts, hidden_stride, hidden_step, hidden_size, HAS_ROWS, STEPS, BLOCK_B, BLOCK_H,
        )  # fmt: skip
        tl.debug_barrier()
    masses_ptr += first_row * STEPS * num_parts
    rounds = tl.cdiv(num_tiles - part, num_parts)
    base_row, out_row = row.to(tl.int64) * base_stride, cache_row * cache_stride
    rows = (base_row, out_row, live, scale, noisy, position.to(tl.uint32), key_low, key_high)
    carry = empty_carry(BLOCK_B, BLOCK_G)
    features, held = 0, 0
    if HAS_HEAD:
        features = feature_rows(token, live, w1_ptr, RANK, BLOCK_R, BLOCK_B)
    if HELD:
        held = weight_tile(w2_ptr, part, num_columns, WHOLE, RANK, BLOCK_R, BLOCK_G, STRIDE, FP8)
    pointers = (base_ptr, cache_ptr, w2_scale_ptr, ids_ptr)
    exchange = (words_ptr, masses_ptr, scratch_ptr + program * BLOCK_B, tokens_ptr, confidence_ptr)
    if FLAT:
        # One loop over the tiles of all steps, so that the next step's first tiles load while its tokens are found.
        for turn in tl.range(STEPS * rounds, num_stages=STAGES):
            step = turn // rounds
            i = turn - step * rounds
            backward = step % 2 == 1
            tile = part + tl.where(backward, rounds - 1 - i, i) * num_parts
            weight = 0
            if HAS_HEAD:
                weight = weight_tile(w2_ptr, tile, num_columns, WHOLE, RANK, BLOCK_R, BLOCK_G, STRIDE, FP8)
            carry = _raced(
                carry, weight, features, tile, backward, rows, pointers, base_step, cache_step, num_columns,
                logit_scale, any_noise, step, tile >> 30,
                REDUCED, WHOLE, SCALED, SCATTERED, PACKED, CACHE, STORED, HAS_HEAD, FP8, BLOCK_B, BLOCK_G, STRIDE,
            )  # fmt: skip
            if i == rounds - 1:
                token = _exchanged(
                    carry, noisy, token, part, first_row, step, epoch, live, w1_ptr, confidence_weight_ptr, exchange,
                    batch, num_parts, hidden_size, STEPS, CONFIDENCE, RANK, BLOCK_R, BLOCK_V, BLOCK_B, POLLED_ROWS,
                )  # fmt: skip
                carry = empty_carry(BLOCK_B, BLOCK_G)
                if HAS_HEAD:
                    features = feature_rows(token, live, w1_ptr, RANK, BLOCK_R, BLOCK_B)
    else:
        for step in range(STEPS):
            carry = empty_carry(BLOCK_B, BLOCK_G)
            if HAS_HEAD:
                features = feature_rows(token, live, w1_ptr, RANK, BLOCK_R, BLOCK_B)
            if HELD:
                carry = _raced(
                    carry, held, features, part, False, rows, pointers, base_step, cache_step, num_columns,
                    logit_scale, any_noise, step, tl.load(epochs_ptr + program) - epoch,
                    REDUCED, WHOLE, SCALED, SCATTERED, PACKED, CACHE, STORED, HAS_HEAD, FP8, BLOCK_B, BLOCK_G, STRIDE,
                )  # fmt: skip
            else:
                backward = step % 2 == 1
                for i in tl.range(rounds, num_stages=STAGES):
                    tile = part + tl.where(backward, rounds - 1 - i, i) * num_parts
                    weight = 0
                    if HAS_HEAD:
                        weight = weight_tile(w2_ptr, tile, num_columns, WHOLE, RANK, BLOCK_R, BLOCK_G, STRIDE, FP8)
                    carry = _raced(
                        carry, weight, features, tile, backward, rows, pointers, base_step, cache_step, num_columns,
                        logit_scale, any_noise, step, tile >> 30,
                        REDUCED, WHOLE, SCALED, SCATTERED, PACKED, CACHE, STORED, HAS_HEAD, FP8, BLOCK_B, BLOCK_G,
                        STRIDE,
                    )  # fmt: skip
            token = _exchanged(
                carry, noisy, token, part, first_row, step, epoch, live, w1_ptr, confidence_weight_ptr, exchange,
                batch, num_parts, hidden_size, STEPS, CONFIDENCE, RANK, BLOCK_R, BLOCK_V, BLOCK_B, POLLED_ROWS,
            )  # fmt: skip
    join_masses(
        masses_ptr, first_row, epoch, part, lse_ptr, temperature_ptr, cache_rows_ptr, batch, num_parts,
        HAS_ROWS, STEPS, BLOCK_S, BLOCK_V, BLOCK_B,
    )  # fmt: skip
    tl.store(epochs_ptr + program, epoch + STEPS)
