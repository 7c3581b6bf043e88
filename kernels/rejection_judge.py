"""First launch of `dspark.kernels.rejection`: sums of target and draft rows, and a decision about every draft.

How it works together with the second: `dspark.kernels.rejection_device`.
"""

from dspark.kernels import tl, triton
from dspark.kernels.rejection_device import (
    BAD_TARGET,
    NO_REJECTION,
    UNDRAWN,
    acceptance_number,
    columns_of,
    exponent_scale,
    keyed,
    lowest,
    offered_run,
    powers,
    sparse_prob,
    sum_part,
    sum_two_parts,
    sum_whole,
)
from dspark.kernels.together import start_next

_BAD_TARGET, _UNDRAWN = tl.constexpr(BAD_TARGET), tl.constexpr(UNDRAWN)
_NO_REJECTION = tl.constexpr(NO_REJECTION)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dense_prob(at, token, logsumexp_ptr, parts, num_parts, part, known, scale, PROBS: tl.constexpr,
               STORED: tl.constexpr):  # fmt: skip
    """q of a token in a row over the vocabulary; maximum and inverse sum that its logits are normalised with."""
    q, peak, inverse = tl.load(at + token).to(tl.float32), 0.0, 1.0
    if not PROBS:
        if STORED:
            peak = tl.load(logsumexp_ptr) * (_LOG2E / scale)
        else:
            peak, mass = sum_whole(parts + 2 * num_parts, parts + 3 * num_parts, part, known, scale)
            inverse = 1.0 / mass
        q = powers(q, peak, scale) * inverse
    return q, peak, inverse


@triton.jit
def decide(token, token_logit, q, parts, num_parts, part, known, scale, seed, position, greedy):
    """Whether a draft is kept: at temperature 0 the lowest id of the largest logit, otherwise u q < p.

    Also the row's maximum and its inverse sum; at temperature 0, instead of that, p of the draft.
    """
    peak, mass = sum_whole(parts, parts + num_parts, part, known, scale)
    inverse = 1.0 / mass
    if greedy:
        peaks = tl.load(parts + part, mask=known, other=float("-inf"), cache_modifier=".cg")
        least = tl.load(parts + num_parts + part, mask=known, other=0.0, cache_modifier=".cg")
        kept = tl.min(tl.where(known & (peaks == peak), least, float("inf")), axis=0) == token.to(tl.float32)
        inverse = tl.where(kept, 1.0, 0.0)
    else:
        p = powers(token_logit, peak, scale) * inverse
        kept = acceptance_number(seed, position) * q < p.to(tl.float64)
    return kept, peak, inverse


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_drafts",
        "num_ids",
        "num_parts",
        "tiles",
        "logsumexp_stride",
        "early_exit",
    ]
)
def judge_kernel(  # noqa: PLR0915 (one launch)
    logits_ptr, drafts_ptr, starts_ptr, positions_ptr, states_ptr, temperature_ptr, seeds_ptr,
    slots_ptr, values_ptr, ids_ptr, draft_temperature_ptr, logsumexp_ptr,
    first_ptr, arrived_ptr, parts_ptr, rows_ptr, flags_ptr,
    batch, num_drafts, vocab_size, num_ids, num_parts, tiles,
    logits_stride, slot_stride, position_stride, ids_stride, ids_position_stride, logsumexp_stride,
    early_exit,
    STATES: tl.constexpr, SLOTS: tl.constexpr, HAS_Q: tl.constexpr, DENSE: tl.constexpr, PROBS: tl.constexpr,
    STORED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IDS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Grid K * B * blocks of `tiles` parts of the vocabulary: the blocks of a row run together, slot after slot."""
    start_next(TOGETHER)
    num_blocks = tl.cdiv(num_parts, tiles)
    block, line = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    slot, request = line // batch, line % batch
    start = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1) - start - 1
    first = tl.load(first_ptr + request, volatile=True)
    state, place = keyed(states_ptr, request, STATES), keyed(slots_ptr, request, SLOTS)
    temperature = tl.load(temperature_ptr + state).to(tl.float32)
    draft_scale = exponent_scale(tl.load(draft_temperature_ptr + state).to(tl.float32))
    run = offered_run(drafts_ptr, start, count, vocab_size, num_drafts, WIDTH)[1]
    # The row of a slot after a rejection is not needed. It may be complete or not; nobody looks.
    skipped = (slot >= run) | ((first < slot) & (early_exit != 0))
    # Never true; makes the compiler load these before the branch, so that all small loads wait for memory together.
    never = (temperature < 0.0) | (draft_scale < 0.0) | (place < 0)
    if skipped | never:
        return
    scale, greedy = exponent_scale(temperature), temperature == 0.0
    logits_row = logits_ptr + (start + slot) * logits_stride
    at = values_ptr + place * slot_stride + slot * position_stride
    parts = parts_ptr + line.to(tl.int64) * 4 * num_parts
    for part in range(block * tiles, tl.minimum(block * tiles + tiles, num_parts)):
        column = columns_of(part, BLOCK)
        inside = column < vocab_size
        logits = tl.load(logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        if DENSE and not (PROBS or STORED):
            draft_logits = tl.load(at + column, mask=inside, other=float("-inf")).to(tl.float32)
            peak, mass, draft_peak, draft_mass = sum_two_parts(logits, draft_logits, scale, draft_scale)
            tl.store(parts + 2 * num_parts + part, draft_peak)
            tl.store(parts + 3 * num_parts + part, draft_mass)
        else:
            peak, mass = sum_part(logits, scale)
        peak = tl.where(mass == mass, peak, float("inf"))  # a NaN anywhere is in the sum, not in the maximum
        if greedy:  # no sum is needed; a float32 holds ids up to 2**24
            mass = lowest(tl.where(logits == peak, column, _NO_REJECTION)).to(tl.float32)
        tl.store(parts + part, peak)
        tl.store(parts + num_parts + part, mass)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + line, 1)
    if arrived < num_blocks - 1:
        return
    token = tl.load(drafts_ptr + start + 1 + slot).to(tl.int64)
    token_logit = tl.load(logits_row + token).to(tl.float32)
    part = tl.arange(0, PARTS)
    known = part < num_parts
    q, draft_peak, draft_inverse, undrawn = 1.0, 0.0, 1.0, 0
    if HAS_Q:
        if DENSE:
            stored_ptr = logsumexp_ptr + place * logsumexp_stride + slot
            q, draft_peak, draft_inverse = dense_prob(
                at, token, stored_ptr, parts, num_parts, part, known, draft_scale, PROBS, STORED
            )
        else:
            ids = ids_ptr + place * ids_stride + slot * ids_position_stride
            q, draft_peak, draft_inverse = sparse_prob(ids, at, token, draft_scale, num_ids, PROBS, IDS)
        undrawn = tl.where((q > 0.0) | greedy, 0, _UNDRAWN)
    seed, position = tl.load(seeds_ptr + state), tl.load(positions_ptr + start + slot)
    kept, peak, inverse = decide(token, token_logit, q, parts, num_parts, part, known, scale, seed, position, greedy)
    if not kept:
        tl.atomic_min(first_ptr + request, slot)
    row = rows_ptr + line * 4
    tl.store(row, peak)
    tl.store(row + 1, inverse)
    tl.store(row + 2, draft_peak)
    tl.store(row + 3, draft_inverse)
    tl.store(flags_ptr + line, undrawn | tl.where((peak > float("-inf")) & (peak < float("inf")), 0, _BAD_TARGET))


@triton.jit(do_not_specialize=["batch", "num_drafts", "num_ids", "num_parts"])
def overlap_kernel(
    logits_ptr, drafts_ptr, starts_ptr, states_ptr, temperature_ptr,
    slots_ptr, values_ptr, ids_ptr, draft_temperature_ptr, rows_ptr, parts_ptr,
    batch, num_drafts, vocab_size, num_ids, num_parts,
    logits_stride, slot_stride, position_stride, ids_stride, ids_position_stride,
    STATES: tl.constexpr, SLOTS: tl.constexpr, HAS_Q: tl.constexpr, DENSE: tl.constexpr, PROBS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """sum(min(p, q)) of a part of every offered row, after `judge_kernel` without early exit; NaN where not offered.

    Grid as there. A listed q, and a draft's own q of 1, are summed by the first block.
    """
    block, line = tl.program_id(0) % num_parts, tl.program_id(0) // num_parts
    slot, request = line // batch, line % batch
    start = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1) - start - 1
    run = offered_run(drafts_ptr, start, count, vocab_size, num_drafts, WIDTH)[1]
    out = parts_ptr + (request * num_drafts + slot).to(tl.int64) * num_parts + block
    if slot >= run:
        tl.store(out, float("nan"))
        return
    state = keyed(states_ptr, request, STATES)
    temperature = tl.load(temperature_ptr + state).to(tl.float32)
    scale = exponent_scale(temperature)
    draft_scale = exponent_scale(tl.load(draft_temperature_ptr + state).to(tl.float32))
    row = rows_ptr + line * 4
    peak, inverse = tl.load(row), tl.load(row + 1)
    if temperature == 0.0:
        tl.store(out, tl.where(block == 0, inverse, 0.0))
        return
    draft_peak, draft_inverse = tl.load(row + 2), tl.load(row + 3)
    if HAS_Q:
        place = keyed(slots_ptr, request, SLOTS)
        at = values_ptr + place * slot_stride + slot * position_stride
        if DENSE:
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab_size
            q = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
        else:
            lane = tl.arange(0, IDS)
            inside = lane < tl.where(block == 0, num_ids, 0)
            ids = ids_ptr + place * ids_stride + slot * ids_position_stride
            column = tl.load(ids + lane, mask=inside, other=0)
            q = tl.load(at + lane, mask=inside, other=0.0).to(tl.float32)
        if not PROBS:
            q = powers(q, draft_peak, draft_scale) * draft_inverse
    else:
        lane = tl.arange(0, WIDTH)
        inside = lane < tl.where(block == 0, 1, 0)
        column = tl.load(drafts_ptr + start + 1 + slot + lane, mask=inside, other=0)
        q = tl.full((WIDTH,), 1.0, tl.float32)
    logits = tl.load(logits_ptr + (start + slot) * logits_stride + column, mask=inside, other=float("-inf"))
    p = powers(logits.to(tl.float32), peak, scale) * inverse
    tl.store(out, tl.sum(tl.where(inside, tl.minimum(p, q), 0.0), axis=0))
