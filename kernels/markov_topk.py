"""The Markov chain over the k largest base logits of each position.

The candidates of a position do not depend on the drafted tokens, so they are selected once, for all positions at a
time; then one program per request walks the K steps and gathers only k rows of W2 at each. q is zero outside the
candidates, and what is written, ids and logits, is exactly what the tokens were drawn from.

Selection is exact, with the lower column among equal values, in two launches:
  1. the maximum of every group of GROUP consecutive columns; the only pass over the whole vocabulary;
  2. per position, the k groups of largest maxima (the lower group among equals) hold the k largest logits: a logit of
     any other group has k better ones, the maxima. The k largest of those k GROUP values are taken.
Both k-th largest values are found bit by bit from above: a bit stays if at least k values reach the number so far.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_device import (
    joined_log2_mass,
    noise_of_id,
    prefetch_rows,
    race_winner,
    race_word,
    read_weight,
    rounded,
    row_scales,
)
from dspark.kernels.markov_features import request_features, token_confidence


@triton.jit
def _ordered(value):
    """uint32 in the order of float32 values; the two zeros are one value."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _places(value, count, BITS: tl.constexpr):
    """Which of the values [N] are the `count` largest, the lower index among equals, and their places [N] in order of
    index. At most 65535 values; BITS leading bits of `_ordered` tell values apart.
    """
    number = _ordered(value) >> (32 - BITS)
    threshold = tl.zeros([], tl.uint32)
    for i in tl.static_range(BITS):
        higher = threshold | tl.full([], 1 << (BITS - 1 - i), tl.uint32)
        enough = tl.sum((number >= higher).to(tl.int32), axis=0) >= count
        threshold = tl.where(enough, higher, threshold)
    above, level = number > threshold, number == threshold
    seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), axis=0)
    wanted = count - tl.sum(above.to(tl.int32), axis=0)
    place = (seen & 0xFFFF) + tl.minimum(seen >> 16, wanted) - 1
    return above | (level & ((seen >> 16) <= wanted)), place


@triton.jit
def _group_maxima_kernel(
    base_ptr, maxima_ptr, steps, num_columns, num_groups, base_stride, base_step,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Maxima [B * K, num_groups] float32."""
    position = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = base_ptr + (position // steps) * base_stride + (position % steps) * base_step
    value = tl.load(row + column, mask=column < num_columns, other=float("-inf"))
    largest = tl.max(value.to(tl.float32), axis=1)
    tl.store(maxima_ptr + position * num_groups + group, largest, mask=group < num_groups)


@triton.jit
def _select_kernel(
    base_ptr, maxima_ptr, chosen_ptr, columns_ptr, values_ptr, w1_ptr, w2_ptr, ids_ptr,
    steps, num_columns, num_groups, base_stride, base_step,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, REDUCED: tl.constexpr,
    W1_BYTES: tl.constexpr, W2_BYTES: tl.constexpr,
):  # fmt: skip
    """Columns [B * K, k] int32, ascending, and their values float32; `chosen` [B * K, k] is scratch."""
    position = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    maxima = tl.load(maxima_ptr + position * num_groups + n, mask=n < num_groups, other=float("-inf"))
    taken, place = _places(maxima, K, BITS)
    chosen = chosen_ptr + position * K
    tl.store(chosen + place, n, mask=taken)
    tl.debug_barrier()
    group = tl.load(chosen + tl.arange(0, K))
    column = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [K * GROUP])
    row = base_ptr + (position // steps) * base_stride + (position % steps) * base_step
    value = tl.load(row + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    taken, place = _places(value, K, BITS)
    tl.store(columns_ptr + position * K + place, column, mask=taken)
    tl.store(values_ptr + position * K + place, value, mask=taken)
    if W1_BYTES > 0:
        tl.debug_barrier()
        column = tl.load(columns_ptr + position * K + tl.arange(0, K)).to(tl.int64)
        prefetch_rows(w2_ptr, column, W2_BYTES)
        if REDUCED:
            column = tl.load(ids_ptr + column)
        prefetch_rows(w1_ptr, column, W1_BYTES)


@triton.jit
def _candidate_rows(column, w2_ptr, FP8: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """W2 rows of columns [n]: [n, BLOCK_R] as stored."""
    r = tl.arange(0, BLOCK_R)
    return read_weight(w2_ptr + column.to(tl.int64)[:, None] * RANK + r[None, :], (r < RANK)[None, :], FP8)


@triton.jit
def _bias_in_parts(
    column_ptr, features, w2_ptr, scratch_ptr,
    FP8: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """W2 rows of the candidates times the features, [K]; BLOCK_K rows at a time, put together through memory."""
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weight = _candidate_rows(tl.load(column_ptr + k), w2_ptr, FP8, RANK, BLOCK_R)
        tl.store(scratch_ptr + k, tl.sum(weight.to(tl.float32) * features[None, :], axis=1))
    tl.debug_barrier()
    bias = tl.load(scratch_ptr + tl.arange(0, K))
    tl.debug_barrier()
    return bias


@triton.jit
def _hidden_confidences(
    hidden_ptr, hidden_step, hidden_size, weight_ptr, bias_ptr, out_ptr,
    STEPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The hidden states' share of a request's confidences, all steps at once: no token depends on it."""
    step = tl.arange(0, BLOCK_S)
    total = tl.zeros([BLOCK_S, BLOCK_H], tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        inside = column < hidden_size
        at = hidden_ptr + step[:, None] * hidden_step + column[None, :]
        hidden = tl.load(at, mask=(step < STEPS)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += hidden * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    logit = tl.sum(total, axis=1) + tl.load(bias_ptr).to(tl.float32)
    tl.store(out_ptr + step, logit, mask=step < STEPS)
    tl.debug_barrier()  # other threads add the share of the tokens


@triton.jit
def _kept(x, token, top_k, top_p, min_p, scratch_ptr, K: tl.constexpr, BLOCK_J: tl.constexpr):
    """Mask [K] of the candidates that min-p, top-k and top-p leave, in this order; x in base-2 logarithms.

    As in `dspark.sampling.to_distribution`: ties with the k-th stay, and of ties at the nucleus' edge the lower ids.
    """
    k, j = tl.arange(0, K), tl.arange(0, BLOCK_J)
    ahead = tl.zeros([K], tl.int32)
    kept = tl.exp2(x - tl.max(x, axis=0)) >= min_p.to(tl.float32)
    tl.store(scratch_ptr + k, x)
    tl.store(scratch_ptr + K + k, token.to(tl.float32))  # ids are below 2^24, exact
    tl.debug_barrier()
    for start in range(0, K, BLOCK_J):
        other = tl.load(scratch_ptr + start + j)
        ahead += tl.sum((other[None, :] > x[:, None]).to(tl.int32), axis=1)
    kept = kept & (ahead < top_k)
    mass = tl.where(kept, tl.exp2(x - tl.max(x, axis=0)), 0.0)
    tl.store(scratch_ptr + 2 * K + k, mass)
    tl.debug_barrier()
    before = tl.zeros([K], tl.float32)
    for start in range(0, K, BLOCK_J):
        other = tl.load(scratch_ptr + start + j)[None, :]
        lower = tl.load(scratch_ptr + K + start + j)[None, :] < token.to(tl.float32)[:, None]
        first = (other > x[:, None]) | ((other == x[:, None]) & lower)
        before += tl.sum(tl.where(first, tl.load(scratch_ptr + 2 * K + start + j)[None, :], 0.0), axis=1)
    return kept & (before < top_p.to(tl.float32) * tl.sum(mass, axis=0))


@triton.jit
def _candidates_chain_kernel(  # noqa: C901, PLR0912, PLR0915 - branches of the compiler, and one walk
    columns_ptr, values_ptr, w1_ptr, w2_ptr, w2_scale_ptr, ids_ptr, joint_ptr, products_ptr, state_ptr, scratch_ptr,
    anchors_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, tokens_ptr, out_ids_ptr, out_logits_ptr, lse_ptr,
    confidence_ptr, hidden_stride, hidden_step, hidden_size, joint_stride, joint_column, logit_scale,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, KIND: tl.constexpr, CONFIDENCE: tl.constexpr,
    FEATURES: tl.constexpr, OUT: tl.constexpr, FP8: tl.constexpr, REDUCED: tl.constexpr, TRUNCATED: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_S: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """All steps of one request."""
    request = tl.program_id(0).to(tl.int64)
    live = True
    if HAS_ROWS:
        live = tl.load(cache_rows_ptr + request) >= 0
    if live:
        k = tl.arange(0, K)
        scale, noisy = row_scales(tl.load(temperature_ptr + request))
        seed = tl.load(seeds_ptr + request)
        key_low = tl.zeros([1, 1], tl.uint32) + seed.to(tl.uint32)
        key_high = tl.zeros([1, 1], tl.uint32) + (seed >> 32).to(tl.uint32)
        first = tl.load(positions_ptr + request)
        token = tl.load(anchors_ptr + request)
        scratch = scratch_ptr + request * (4 * K)
        if CONFIDENCE != "none":
            _hidden_confidences(
                hidden_ptr + request * hidden_stride, hidden_step, hidden_size, confidence_weight_ptr,
                confidence_bias_ptr, confidence_ptr + request * STEPS, STEPS, BLOCK_S, BLOCK_H,
            )  # fmt: skip
        # Candidates don't depend on tokens: those of the next step load while this one is computed, and where they
        # fit, their rows of W2.
        column = tl.load(columns_ptr + request * STEPS * K + k)
        value = tl.load(values_ptr + request * STEPS * K + k)
        rows = 0
        if KIND != "none":  # noqa: SIM102 - the interpreter's chained comparisons are not constexpr
            if AHEAD:
                rows = _candidate_rows(column, w2_ptr, FP8, RANK, BLOCK_R)
        after = request * STEPS + (1 if STEPS > 1 else 0)
        next_column, next_value = tl.load(columns_ptr + after * K + k), tl.load(values_ptr + after * K + k)
        for step in range(STEPS):
            at = request * STEPS + step
            logits = value
            next_rows, these = rows, rows
            if KIND != "none":
                if BLOCK_K == K and not AHEAD:
                    these = _candidate_rows(column, w2_ptr, FP8, RANK, BLOCK_R)
                if AHEAD:
                    next_rows = _candidate_rows(next_column, w2_ptr, FP8, RANK, BLOCK_R)
            after = request * STEPS + tl.minimum(step + 2, STEPS - 1)
            second_column = tl.load(columns_ptr + after * K + k)
            second_value = tl.load(values_ptr + after * K + k)
            if KIND != "none":
                features = request_features(
                    token, w1_ptr, joint_ptr, products_ptr + at * (3 * RANK), state_ptr + request * RANK,
                    joint_stride, joint_column, KIND, FEATURES, RANK, BLOCK_R,
                )  # fmt: skip
                if BLOCK_K == K:
                    bias = tl.sum(these.to(tl.float32) * features[None, :], axis=1)
                else:
                    bias = _bias_in_parts(
                        columns_ptr + at * K, features, w2_ptr, scratch + 3 * K, FP8, RANK, BLOCK_R, K, BLOCK_K
                    )
                if FP8:
                    bias = bias * tl.load(w2_scale_ptr + column)
                logits += bias
            if CONFIDENCE == "hidden+markov":
                share = token_confidence(token, w1_ptr, hidden_size, confidence_weight_ptr, RANK, BLOCK_R)
                tl.store(confidence_ptr + at, tl.load(confidence_ptr + at) + share)
            logits = rounded(logits * logit_scale, OUT)
            candidate = column
            if REDUCED:
                candidate = tl.load(ids_ptr + column).to(tl.int32)
            x = logits * scale
            if TRUNCATED:  # noqa: SIM102 - one is a compile-time branch
                if noisy > 0.0:
                    top_k, top_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request)
                    top_k = tl.where(top_k > 0, top_k, K)
                    kept = _kept(x, candidate, top_k, top_p, tl.load(min_p_ptr + request), scratch, K, BLOCK_J)
                    logits = tl.where(kept, logits, float("-inf"))
                    x = tl.where(kept, x, float("-inf"))
                    tl.debug_barrier()  # the scratch is free again
            tl.store(out_ids_ptr + at * K + k, candidate.to(tl.int64))
            tl.store(out_logits_ptr + at * K + k, logits)
            tl.store(lse_ptr + at, joined_log2_mass(x, noisy, 0))
            key = x
            if noisy > 0.0:
                position = tl.zeros([1, 1], tl.uint32) + (first + step).to(tl.uint32)
                noise = noise_of_id(candidate[None, :], position, key_low, key_high, 0)
                key = x - tl.reshape(noise, [K])
            token = race_winner(tl.max(race_word(key, candidate), axis=0)).to(tl.int64)
            tl.store(tokens_ptr + at, token)
            if AHEAD:
                rows = next_rows
            column, value = next_column, next_value
            next_column, next_value = second_column, second_value
