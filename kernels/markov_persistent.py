"""The dense chain in one cooperative launch; see `dspark.kernels.markov_dense`.

Programs form groups that draft the same block of requests; only a group has to agree on tokens. A program publishes a
race word per request, then polls everyone's words until all carry this step's number. Nothing else is passed between
programs, so that no fence is needed: a word is one 8-byte store. The words are double buffered. A program can't
overwrite its word of step i at step i + 2 before everyone has read it, because it needs everyone's word of step i + 1
first, which they publish after reading those of step i.

Steps are numbered on through the launches by a counter per program, which all programs of a workspace move alike.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_dense import empty_carry, finished_carry, load_tile, race_tile, request_rows
from dspark.kernels.markov_device import joined_log2_mass, race_winner, row_scales
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
def _published(word, mass, tag, part, words_ptr, masses_ptr, BLOCK_B: tl.constexpr):
    """This program's words and masses [BLOCK_B], with the step's tag."""
    at = part * BLOCK_B + tl.arange(0, BLOCK_B)
    tl.atomic_xchg(words_ptr + at, word | tag, sem="relaxed")
    tl.atomic_xchg(masses_ptr + at, (mass.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag, sem="relaxed")


@triton.jit
def _joined(
    tag, part, first_row, step, words_ptr, masses_ptr, scratch_ptr, tokens_ptr, lse_ptr, temperature_ptr,
    cache_rows_ptr, batch, num_parts, HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Wait for everyone's words, and return the tokens [BLOCK_B]. Each row's outputs are written by one program."""
    other = tl.arange(0, BLOCK_V)
    for start in tl.static_range(0, BLOCK_B, ROWS):
        r = start + tl.arange(0, ROWS)
        row = first_row + r
        inside = row < batch
        at = other[:, None] * BLOCK_B + r[None, :]
        there = (other < num_parts)[:, None] & inside[None, :]
        winner = race_winner(tl.max(_polled(words_ptr + at, there, tag), axis=0))
        tl.store(scratch_ptr + r, winner)
        mine = inside & (r % num_parts == part)
        masses = _polled(masses_ptr + at, there & mine[None, :], tag)
        parts = tl.where(there & mine[None, :], (masses >> 32).to(tl.int32).to(tl.float32, bitcast=True), _LOWEST)
        _, noisy = row_scales(tl.load(temperature_ptr + row, mask=mine, other=0.0))
        lse = joined_log2_mass(parts, noisy, 0)
        if HAS_ROWS:
            mine = mine & (tl.load(cache_rows_ptr + row, mask=mine, other=-1) >= 0)
        tl.store(lse_ptr + row * STEPS + step, lse, mask=mine)
        tl.store(tokens_ptr + row * STEPS + step, winner.to(tl.int64), mask=mine)
    tl.debug_barrier()  # the winners were written by other threads of this program
    return tl.load(scratch_ptr + tl.arange(0, BLOCK_B))


@triton.jit
def _own_confidences(
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
            hidden_row = hidden_ptr + row.to(tl.int64) * hidden_stride + step * hidden_step
            logit = hidden_confidence(hidden_row, hidden_size, weight_ptr, bias_ptr, BLOCK_H)
            tl.store(confidence_ptr + row * STEPS + step, logit)


@triton.jit
def _chain_kernel(
    base_ptr, cache_ptr, w2_ptr, w2_scale_ptr, ids_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr,
    w1_ptr, anchors_ptr, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, tokens_ptr, lse_ptr, confidence_ptr,
    words_ptr, masses_ptr, epochs_ptr, scratch_ptr,
    batch, num_columns, num_tiles, num_parts, base_stride, base_step, cache_stride, cache_step, logit_scale,
    hidden_stride, hidden_step, hidden_size,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, CONFIDENCE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr, POLLED_ROWS: tl.constexpr, HELD: tl.constexpr,
    REDUCED: tl.constexpr, SCATTERED: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr,
    HAS_HEAD: tl.constexpr, FP8: tl.constexpr, FMA: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """All steps. Programs [num_blocks * num_parts]; words and masses [2, num_blocks, num_parts, BLOCK_B]."""
    program = tl.program_id(0)
    part, block = program % num_parts, program // num_parts
    blocks = tl.num_programs(0) // num_parts
    first_row = block * BLOCK_B
    row = first_row + tl.arange(0, BLOCK_B)
    cache_row, live, scale, noisy, position, key_low, key_high = request_rows(
        row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
    )
    any_noise = tl.max(noisy) > 0.0
    epoch = tl.load(epochs_ptr + program)
    token = tl.load(anchors_ptr + row, mask=live, other=0).to(tl.int32)
    weight = load_tile(w2_ptr, part, num_columns, HAS_HEAD, RANK, BLOCK_R, BLOCK_G, FP8)
    held = (weight,)
    for i in tl.static_range(1, HELD):
        held = held + (  # noqa: RUF005 - Triton has no unpacking in a tuple
            load_tile(w2_ptr, part + i * num_parts, num_columns, HAS_HEAD, RANK, BLOCK_R, BLOCK_G, FP8),
        )  # fmt: skip
    if CONFIDENCE != "none":
        _own_confidences(
            part, first_row, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, confidence_ptr, cache_rows_ptr,
            batch, num_parts, hidden_stride, hidden_step, hidden_size, HAS_ROWS, STEPS, BLOCK_B, BLOCK_H,
        )  # fmt: skip
        tl.debug_barrier()
    r = tl.arange(0, BLOCK_R)
    for step in range(STEPS):
        features = tl.zeros([BLOCK_B, BLOCK_R], tl.float32)
        if HAS_HEAD:
            features = tl.load(
                w1_ptr + token.to(tl.int64)[:, None] * RANK + r[None, :],
                mask=live[:, None] & (r < RANK)[None, :],
                other=0.0,
            )
        if CONFIDENCE == "hidden+markov":
            weights = tl.load(confidence_weight_ptr + hidden_size + r, mask=r < RANK, other=0.0).to(tl.float32)
            share = tl.sum(features.to(tl.float32) * weights[None, :], axis=1)
            mine = live & (((row - first_row) * STEPS + step) % num_parts == part)
            at = confidence_ptr + row * STEPS + step
            tl.store(at, tl.load(at, mask=mine, other=0.0) + share, mask=mine)
        base_row = row.to(tl.int64) * base_stride + step * base_step
        out_row = cache_row * cache_stride + step * cache_step
        rows = (base_row, out_row, live, scale, noisy, (position + step).to(tl.uint32), key_low, key_high)
        carry = empty_carry(BLOCK_B, BLOCK_G)
        if HELD > 0:
            for i in tl.static_range(0, HELD):
                carry = race_tile(
                    carry, held[i], features, part + i * num_parts, rows, base_ptr, cache_ptr, w2_scale_ptr, ids_ptr,
                    num_columns, logit_scale, any_noise,
                    REDUCED, SCATTERED, PACKED, CACHE, HAS_HEAD, FP8, FMA, BLOCK_G,
                )  # fmt: skip
        else:
            for tile in range(part, num_tiles, num_parts):
                following = tl.where(tile + num_parts < num_tiles, tile + num_parts, part)
                ahead = load_tile(w2_ptr, following, num_columns, HAS_HEAD, RANK, BLOCK_R, BLOCK_G, FP8)
                carry = race_tile(
                    carry, weight, features, tile, rows, base_ptr, cache_ptr, w2_scale_ptr, ids_ptr,
                    num_columns, logit_scale, any_noise,
                    REDUCED, SCATTERED, PACKED, CACHE, HAS_HEAD, FP8, FMA, BLOCK_G,
                )  # fmt: skip
                weight = ahead
        word, mass = finished_carry(carry, noisy)
        tag = ((epoch + step) & 255).to(tl.int64)
        half = (((epoch + step) & 1) * blocks + block) * num_parts * BLOCK_B
        _published(word, mass, tag, part, words_ptr + half, masses_ptr + half, BLOCK_B)
        token = _joined(
            tag, part, first_row, step, words_ptr + half, masses_ptr + half, scratch_ptr + program * BLOCK_B,
            tokens_ptr, lse_ptr, temperature_ptr, cache_rows_ptr, batch, num_parts,
            HAS_ROWS, STEPS, BLOCK_V, BLOCK_B, POLLED_ROWS,
        )  # fmt: skip
    tl.store(epochs_ptr + program, epoch + STEPS)
