"""Second launch of `dspark.kernels.rejection`: the exponential race for the one token that a request adds.

How it works together with the first: `dspark.kernels.rejection_device`.
"""

from dspark.kernels import tl, triton
from dspark.kernels.rejection_device import (
    BAD_TARGET,
    FOREIGN,
    NO_REJECTION,
    RECOVERY,
    TARGET,
    UNDRAWN,
    columns_of,
    exponent_scale,
    finite_or_zero,
    keyed,
    largest,
    load_logits,
    lowest,
    offered_run,
    powers,
    race,
    token_noise,
)
from dspark.kernels.together import wait_for_previous

_RECOVERY, _TARGET = tl.constexpr(RECOVERY), tl.constexpr(TARGET)
_BAD_TARGET, _UNDRAWN, _FOREIGN = tl.constexpr(BAD_TARGET), tl.constexpr(UNDRAWN), tl.constexpr(FOREIGN)
_NO_REJECTION = tl.constexpr(NO_REJECTION)


@triton.jit
def less_listed(weight, column, ids_ptr, values_ptr, low, scale, peak, inverse, num_ids,
                PROBS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """weight of the BLOCK tokens from `low` on, less q of the listed ids among them, one id after the other."""
    lane = tl.arange(0, WIDTH)
    ids = tl.load(ids_ptr + lane, mask=lane < num_ids, other=-1)
    # Place in the block and in the list in one number; the smallest that is left comes next.
    key = tl.where((ids >= low) & (ids < low + BLOCK), (ids - low).to(tl.int32) * WIDTH + lane, _NO_REJECTION)
    current = tl.min(key, axis=0)
    while current < _NO_REJECTION:
        value = tl.load(values_ptr + current % WIDTH).to(tl.float32)
        if not PROBS:
            value = powers(value, peak, scale) * inverse
        weight = tl.where(column == low + current // WIDTH, weight - value, weight)
        current = tl.min(tl.where(key > current, key, _NO_REJECTION), axis=0)
    return weight


@triton.jit
def less_dense(weight, value, scale, peak, inverse, PROBS: tl.constexpr):
    """weight less q over the vocabulary."""
    if PROBS:
        return weight - value
    return weight - powers(value, peak, scale) * inverse


@triton.jit
def race_again(logits_row, peak, scale, vocab_size, num_parts, seed, position, purpose, winner, BLOCK: tl.constexpr):
    """The race over p of a whole row by one block."""
    best = float("inf")
    for i in range(num_parts):
        column = columns_of(i, BLOCK)
        weight = powers(load_logits(logits_row, column, column < vocab_size), peak, scale)
        time, found = race(weight, token_noise(i, seed, position, purpose, BLOCK), column)
        winner = tl.where(time < best, found, winner)
        best = tl.minimum(time, best)
    return winner


@triton.jit
def earliest(parts, winners_ptr, num_parts, scale, greedy, PARTS: tl.constexpr):
    """Maximum, earliest time and winner of a row from those of its parts."""
    part = tl.arange(0, PARTS)
    known = part < num_parts
    peaks = tl.load(parts + part, mask=known, other=float("-inf"), cache_modifier=".cg")
    times = tl.load(parts + num_parts + part, mask=known, other=float("inf"), cache_modifier=".cg")
    winners = tl.load(winners_ptr + part, mask=known, other=_NO_REJECTION, cache_modifier=".cg")
    peak = tl.max(peaks, axis=0)
    # Times of parts with another maximum are in another unit.
    if greedy:
        times = tl.where(peaks == peak, times, float("inf"))
    else:
        times = times * powers(finite_or_zero(peak), peaks, scale)
        times = tl.where(peaks > float("-inf"), times, float("inf"))
    best = tl.min(times, axis=0)
    winner = tl.min(tl.where(times == best, winners, _NO_REJECTION), axis=0)
    return peak, best, winner


@triton.jit
def write_results(
    draft, winner, peak, num_accepted, run, request, batch, num_drafts, vocab_size, flags_ptr,
    tokens_ptr, emitted_ptr, accepted_ptr, status_ptr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The row of every output that belongs to a request."""
    lane = tl.arange(0, WIDTH)
    emitted = tl.where(lane < num_accepted, draft, tl.where(lane == num_accepted, winner.to(tl.int64), -1))
    tl.store(tokens_ptr + request.to(tl.int64) * (num_drafts + 1) + lane, emitted, mask=lane <= num_drafts)
    tl.store(emitted_ptr + request, num_accepted + 1)
    tl.store(accepted_ptr + request, num_accepted)
    judged = (lane < run) & (lane <= num_accepted)
    flags = tl.load(flags_ptr + lane * batch + request, mask=judged, other=0)
    status = tl.max(flags & _BAD_TARGET, axis=0) | tl.max(flags & _UNDRAWN, axis=0)
    status |= tl.where((peak > float("-inf")) & (peak < float("inf")), 0, _BAD_TARGET)
    status |= tl.max(tl.where((lane == run) & (draft >= vocab_size), _FOREIGN, 0), axis=0)
    tl.store(status_ptr + request, status)


@triton.jit(do_not_specialize=["batch", "num_drafts", "num_ids", "num_parts", "tiles"])
def emit_kernel(  # noqa: PLR0915 (one launch)
    logits_ptr, drafts_ptr, starts_ptr, positions_ptr, states_ptr, temperature_ptr, seeds_ptr,
    slots_ptr, values_ptr, ids_ptr, draft_temperature_ptr,
    first_ptr, judge_arrived_ptr, arrived_ptr, parts_ptr, winners_ptr, rows_ptr, flags_ptr,
    tokens_ptr, emitted_ptr, accepted_ptr, status_ptr,
    batch, num_drafts, vocab_size, num_ids, num_parts, tiles,
    logits_stride, slot_stride, position_stride, ids_stride, ids_position_stride,
    STATES: tl.constexpr, SLOTS: tl.constexpr, HAS_Q: tl.constexpr, DENSE: tl.constexpr, PROBS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IDS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Grid B * blocks of `tiles` parts of the vocabulary."""
    num_blocks = tl.cdiv(num_parts, tiles)
    block, request = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    start = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1) - start - 1
    state, place = keyed(states_ptr, request, STATES), keyed(slots_ptr, request, SLOTS)
    temperature, seed = tl.load(temperature_ptr + state).to(tl.float32), tl.load(seeds_ptr + state)
    draft_scale = exponent_scale(tl.load(draft_temperature_ptr + state).to(tl.float32))
    draft, run = offered_run(drafts_ptr, start, count, vocab_size, num_drafts, WIDTH)
    wait_for_previous(TOGETHER)
    first = tl.load(first_ptr + request)
    num_accepted, rejected = tl.minimum(first, run), first < run
    scale, greedy = exponent_scale(temperature), temperature == 0.0
    position = tl.load(positions_ptr + start + num_accepted)
    purpose = tl.where(rejected, _RECOVERY, _TARGET)
    logits_row = logits_ptr + (start + num_accepted) * logits_stride
    residual = rejected & (not greedy) & HAS_Q
    row = rows_ptr + (tl.minimum(num_accepted, num_drafts - 1) * batch + request) * 4
    row_peak, row_inverse = tl.load(row), tl.where(residual, tl.load(row + 1), 1.0)
    # Elsewhere, what is subtracted from p must be zero, whatever the workspace holds.
    draft_peak = tl.where(residual, tl.load(row + 2), 0.0)
    draft_inverse = tl.where(residual, tl.load(row + 3), 0.0)
    at = values_ptr + place * slot_stride + num_accepted * position_stride
    ids = ids_ptr + place * ids_stride + num_accepted * ids_position_stride
    parts = parts_ptr + request.to(tl.int64) * 2 * num_parts
    winners = winners_ptr + request.to(tl.int64) * num_parts
    token = tl.load(drafts_ptr + start + 1 + num_accepted, mask=rejected, other=-1)
    for part in range(block * tiles, tl.minimum(block * tiles + tiles, num_parts)):
        low, column = part * BLOCK, columns_of(part, BLOCK)
        inside = column < vocab_size
        logits = load_logits(logits_row, column, inside)
        if DENSE:  # loads of both rows wait together
            nothing = 0.0 if PROBS else float("-inf")
            reach = tl.where(residual, vocab_size, 0)
            value = tl.load(at + column, mask=column < reach, other=nothing).to(tl.float32)
        if greedy:
            peak, time = largest(logits), 1.0
            winner = lowest(tl.where(logits == peak, column, _NO_REJECTION))
        else:
            peak = row_peak
            if not residual:
                peak = largest(logits)
            weight = powers(logits, peak, scale) * row_inverse
            if DENSE:
                weight = less_dense(weight, value, draft_scale, draft_peak, draft_inverse, PROBS)
            elif HAS_Q:
                if residual:
                    weight = less_listed(
                        weight, column, ids, at, low, draft_scale, draft_peak, draft_inverse, num_ids, PROBS, BLOCK, IDS
                    )
            else:  # a rejected one-hot draft leaves the rest of p
                weight = tl.where(column == token, 0.0, weight)
            time, winner = race(weight, token_noise(part, seed, position, purpose, BLOCK), column)
        tl.store(parts + part, peak)
        tl.store(parts + num_parts + part, time)
        tl.store(winners + part, winner)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + request, 1)
    if arrived < num_blocks - 1:
        return
    tl.store(arrived_ptr + request, 0)
    tl.store(first_ptr + request, _NO_REJECTION)
    lane = tl.arange(0, WIDTH)
    tl.store(judge_arrived_ptr + lane * batch + request, tl.zeros([WIDTH], tl.int32), mask=lane < num_drafts)
    peak, best, winner = earliest(parts, winners, num_parts, scale, greedy, PARTS)
    if residual & (best == float("inf")):
        # Rounding left nothing of p above q: such a draft is as good as accepted, and p replaces it.
        winner = race_again(logits_row, peak, scale, vocab_size, num_parts, seed, position, purpose, winner, BLOCK)
    winner = tl.minimum(winner, vocab_size - 1)  # a row of NaN must not give an id outside the vocabulary
    write_results(
        draft, winner, peak, num_accepted, run, request, batch, num_drafts, vocab_size, flags_ptr,
        tokens_ptr, emitted_ptr, accepted_ptr, status_ptr, WIDTH,
    )  # fmt: skip
