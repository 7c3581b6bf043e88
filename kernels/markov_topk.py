"""The Markov chain over k candidates of each position.

Candidates are the largest base logits and, for the vanilla head, as many tokens of largest bias after the previous
token, half and half. The first do not depend on the drafted tokens: they are selected once, for all positions at a
time. The second are lists by token, made when the head is loaded (`dspark.kernels.markov_candidates.bias_lists`). One
program per request walks the K steps, and gathers only k/2 rows of W2 and k/2 base logits at each. q is zero outside
the candidates, and what is written, ids and logits, is exactly what the tokens were drawn from. A listed token that is
among the largest base logits already gets -inf in its second place.

Selection is exact, with the lower column among equal values, in two launches:
  1. the maximum of every group of GROUP consecutive columns; the only pass over the whole vocabulary;
  2. per position, the k groups of largest maxima (the lower group among equals) hold the k largest logits: a logit of
     any other group has k better ones, the maxima. The k largest of those k GROUP values are taken.
Both k-th largest values are found by bisection, counting the values above: the first between the smallest and the
largest maximum, the second between the first and the largest, which are few steps apart in bfloat16.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_device import (
    noise_of_id,
    prefetch_rows,
    race_winner,
    race_word,
    read_weight,
    rounded,
    row_scales,
)
from dspark.kernels.markov_features import embedded_row, request_features, token_confidence
from dspark.kernels.noise import fast_exp2, fast_log2
from dspark.kernels.together import start_next, wait_for_previous

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _ordered(value):
    """uint32 in the order of float32 values; the two zeros are one value."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _places(number, count, low, high):
    """Which of the numbers [N] uint32 are the `count` largest, the lower index among equals, their places [N] in order
    of index, and the smallest of them. It lies in low..high; at most 65535 numbers.
    """
    while low < high:
        middle = high - (high - low) // 2
        enough = tl.sum((number >= middle).to(tl.int32), axis=0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    above, level = number > low, number == low
    seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), axis=0)
    wanted = count - tl.sum(above.to(tl.int32), axis=0)
    place = (seen & 0xFFFF) + tl.minimum(seen >> 16, wanted) - 1
    return above | (level & ((seen >> 16) <= wanted)), place, low


@triton.jit
def _group_maxima_kernel(
    base_ptr, maxima_ptr, steps, num_columns, num_groups, base_stride, base_step,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Maxima [B * K, num_groups] float32."""
    start_next(TOGETHER)
    position = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = base_ptr + (position // steps) * base_stride + (position % steps) * base_step
    value = tl.load(row + column, mask=column < num_columns, other=float("-inf"))
    largest = tl.max(value.to(tl.float32), axis=1)
    tl.store(maxima_ptr + position * num_groups + group, largest, mask=group < num_groups)


@triton.jit
def _select_kernel(
    base_ptr, maxima_ptr, chosen_ptr, columns_ptr, values_ptr, edges_ptr, w1_ptr, w2_ptr, ids_ptr, lists_ptr,
    steps, num_columns, num_groups, base_stride, base_step,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, REDUCED: tl.constexpr,
    W1_BYTES: tl.constexpr, W2_BYTES: tl.constexpr, LIST_BYTES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Columns [B * K, k] int32, ascending, and their values float32; `chosen` [B * K, k] is scratch. `edges`
    [B * K, 2] float32 tells whether a column is among them: the smallest value, and the last column that has it.
    """
    start_next(TOGETHER)
    position = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    wait_for_previous(TOGETHER)
    maxima = tl.load(maxima_ptr + position * num_groups + n, mask=n < num_groups, other=float("-inf"))
    number = _ordered(maxima) >> (32 - BITS)
    high = tl.max(number, axis=0)
    low = tl.min(tl.where((n < num_groups) | (num_groups < K), number, high), axis=0)
    taken, place, low = _places(number, K, low, high)
    chosen = chosen_ptr + position * K
    tl.store(chosen + place, n, mask=taken)
    tl.debug_barrier()
    group = tl.load(chosen + tl.arange(0, K))
    column = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [K * GROUP])
    row = base_ptr + (position // steps) * base_stride + (position % steps) * base_step
    value = tl.load(row + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    taken, place, _ = _places(_ordered(value) >> (32 - BITS), K, low, high)
    tl.store(columns_ptr + position * K + place, column, mask=taken)
    tl.store(values_ptr + position * K + place, value, mask=taken)
    least = tl.min(tl.where(taken, value, float("inf")), axis=0)
    tl.store(edges_ptr + position * 2, least)
    last = tl.max(tl.where(taken & (value == least), column, -1), axis=0)
    tl.store(edges_ptr + position * 2 + 1, last.to(tl.float32))
    if W1_BYTES > 0:
        tl.debug_barrier()
        column = tl.load(columns_ptr + position * K + tl.arange(0, K)).to(tl.int64)
        prefetch_rows(w2_ptr, column, W2_BYTES)
        if REDUCED:
            column = tl.load(ids_ptr + column)
        prefetch_rows(w1_ptr, column, W1_BYTES)
        prefetch_rows(lists_ptr, column, LIST_BYTES)


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
def _listed(word, base_row, edge_ptr):
    """Columns [n] of a list's words (bias above, column below), and their corrected logits; -inf for those that are
    among the largest base logits.
    """
    column = word.to(tl.int32)
    base = tl.load(base_row + column).to(tl.float32)
    least, last = tl.load(edge_ptr), tl.load(edge_ptr + 1).to(tl.int32)
    twice = (base > least) | ((base == least) & (column <= last))
    bias = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return column, tl.where(twice, float("-inf"), base + bias)


@triton.jit
def _candidates_chain_kernel(  # noqa: C901, PLR0912, PLR0915 - branches of the compiler, and one walk
    base_ptr, columns_ptr, values_ptr, edges_ptr, lists_ptr, w1_ptr, w2_ptr, w2_scale_ptr, ids_ptr, joint_ptr,
    products_ptr, state_ptr, scratch_ptr,
    anchors_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, tokens_ptr, out_ids_ptr, out_logits_ptr, lse_ptr,
    confidence_ptr, base_stride, base_step, hidden_stride, hidden_step, hidden_size, joint_stride, joint_column,
    logit_scale,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, KIND: tl.constexpr, CONFIDENCE: tl.constexpr,
    FEATURES: tl.constexpr, OUT: tl.constexpr, FP8: tl.constexpr, REDUCED: tl.constexpr, TRUNCATED: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, K: tl.constexpr, LISTED: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_S: tl.constexpr, AHEAD: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """All steps of one request: LARGEST base logits, and K - LARGEST listed tokens if LISTED."""
    request = tl.program_id(0).to(tl.int64)
    live = True
    if HAS_ROWS:
        live = tl.load(cache_rows_ptr + request) >= 0
    if live:
        # Candidates are kept as [LARGEST, 1 or 2], a listed one beside each of the largest: none moves to another
        # thread.
        SIDES: tl.constexpr = K // LARGEST
        n = tl.arange(0, LARGEST)
        k = n[:, None] * SIDES + tl.arange(0, SIDES)[None, :]
        scale, noisy = row_scales(tl.load(temperature_ptr + request))
        seed = tl.load(seeds_ptr + request)
        key_low = tl.zeros([1, 1], tl.uint32) + seed.to(tl.uint32)
        key_high = tl.zeros([1, 1], tl.uint32) + (seed >> 32).to(tl.uint32)
        first = tl.load(positions_ptr + request)
        token = tl.load(anchors_ptr + request)
        scratch = scratch_ptr + request * (4 * K)
        word, embedded = 0, 0.0
        if LISTED:
            word = tl.load(lists_ptr + token * LARGEST + n)
        if KIND == "vanilla":
            embedded = embedded_row(token, w1_ptr, RANK, BLOCK_R)
        wait_for_previous(TOGETHER)
        if CONFIDENCE != "none":
            _hidden_confidences(
                hidden_ptr + request * hidden_stride, hidden_step, hidden_size, confidence_weight_ptr,
                confidence_bias_ptr, confidence_ptr + request * STEPS, STEPS, BLOCK_S, BLOCK_H,
            )  # fmt: skip
        # The largest base logits don't depend on tokens: those of the next step load while this one is computed, and
        # where they fit, their rows of W2.
        column = tl.load(columns_ptr + request * STEPS * LARGEST + n)
        value = tl.load(values_ptr + request * STEPS * LARGEST + n)
        rows = 0
        if KIND != "none":  # noqa: SIM102 - the interpreter's chained comparisons are not constexpr
            if AHEAD:
                rows = _candidate_rows(column, w2_ptr, FP8, RANK, BLOCK_R)
        after = request * STEPS + (1 if STEPS > 1 else 0)
        next_column, next_value = tl.load(columns_ptr + after * LARGEST + n), tl.load(values_ptr + after * LARGEST + n)
        for step in range(STEPS):
            at = request * STEPS + step
            logits = value
            if LISTED:
                base_row = base_ptr + request * base_stride + step * base_step
                listed, listed_logits = _listed(word, base_row, edges_ptr + at * 2)
                candidate = tl.join(column, listed)
            else:
                candidate = tl.expand_dims(column, 1)
            if REDUCED:
                candidate = tl.load(ids_ptr + candidate).to(tl.int32)
            noise = tl.zeros([LARGEST, SIDES], tl.float32)  # computed before the logits, which wait for memory
            if noisy > 0.0:
                position = tl.zeros([1, 1], tl.uint32) + (first + step).to(tl.uint32)
                noise = noise_of_id(candidate, position, key_low, key_high, 0)
            next_rows, these = rows, rows
            if KIND != "none":
                if BLOCK_K == LARGEST and not AHEAD:
                    these = _candidate_rows(column, w2_ptr, FP8, RANK, BLOCK_R)
                if AHEAD:
                    next_rows = _candidate_rows(next_column, w2_ptr, FP8, RANK, BLOCK_R)
            after = request * STEPS + tl.minimum(step + 2, STEPS - 1)
            second_column = tl.load(columns_ptr + after * LARGEST + n)
            second_value = tl.load(values_ptr + after * LARGEST + n)
            if KIND != "none":
                if KIND == "vanilla":
                    features = embedded
                else:
                    features = request_features(
                        token, w1_ptr, joint_ptr, products_ptr + at * (3 * RANK), state_ptr + request * RANK,
                        joint_stride, joint_column, KIND, FEATURES, RANK, BLOCK_R,
                    )  # fmt: skip
                if BLOCK_K == LARGEST:
                    bias = tl.sum(these.to(tl.float32) * features[None, :], axis=1)
                else:
                    bias = _bias_in_parts(
                        columns_ptr + at * LARGEST, features, w2_ptr, scratch + 3 * K, FP8, RANK, BLOCK_R, LARGEST,
                        BLOCK_K,
                    )  # fmt: skip
                if FP8:
                    bias = bias * tl.load(w2_scale_ptr + column)
                logits += bias
            if CONFIDENCE == "hidden+markov":
                share = token_confidence(token, w1_ptr, hidden_size, confidence_weight_ptr, RANK, BLOCK_R)
                tl.store(confidence_ptr + at, tl.load(confidence_ptr + at) + share)
            logits = tl.join(logits, listed_logits) if LISTED else tl.expand_dims(logits, 1)
            logits = rounded(logits * logit_scale, OUT)
            x = logits * scale
            if TRUNCATED:  # noqa: SIM102 - one is a compile-time branch
                if noisy > 0.0:
                    top_k, top_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request)
                    top_k = tl.where(top_k > 0, top_k, K)
                    flat, ids = tl.reshape(x, [K]), tl.reshape(candidate, [K])
                    kept = _kept(flat, ids, top_k, top_p, tl.load(min_p_ptr + request), scratch, K, BLOCK_J)
                    kept = tl.reshape(kept.to(tl.int32), [LARGEST, SIDES]) > 0
                    logits = tl.where(kept, logits, float("-inf"))
                    x = tl.where(kept, x, float("-inf"))
                    tl.debug_barrier()  # the scratch is free again
            token = race_winner(tl.max(tl.max(race_word(x - noise, candidate), axis=1), axis=0)).to(tl.int64)
            # What the token decides is on its way while the results of this step are written.
            if LISTED:
                word = tl.load(lists_ptr + token * LARGEST + n)
            if KIND == "vanilla":
                embedded = embedded_row(token, w1_ptr, RANK, BLOCK_R)
            tl.store(out_ids_ptr + at * K + k, candidate.to(tl.int64))
            tl.store(out_logits_ptr + at * K + k, logits)
            peak = tl.max(tl.max(x, axis=1), axis=0)
            mass = tl.sum(tl.sum(fast_exp2(x - peak), axis=1), axis=0)
            tl.store(lse_ptr + at, tl.where(noisy > 0.0, (peak + fast_log2(mass)) * _LN2, peak))
            tl.store(tokens_ptr + at, token)
            if AHEAD:
                rows = next_rows
            column, value = next_column, next_value
            next_column, next_value = second_column, second_value
