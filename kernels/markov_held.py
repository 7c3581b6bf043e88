"""The dense chain of one request when W2 fits on chip: each program keeps its rows of W2 in registers for all steps.

W2 of 49152 tokens and rank 64 is 6.3 MB, 48 KB for each of 132 multiprocessors. What is left of a step is one row of
W1, the products, the race and the exchange of `dspark.kernels.markov_persistent`, none of which is limited by memory,
so that latency decides.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_dense import race_columns, request_rows
from dspark.kernels.markov_device import fast_exp2, fast_log2, read_weight
from dspark.kernels.markov_persistent import join_masses, joined, own_confidences, publish, slot_of

_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number


@triton.jit
def _held_chain_kernel(
    base_ptr, cache_ptr, w2_ptr, w2_scale_ptr, ids_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr,
    w1_ptr, anchors_ptr, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, tokens_ptr, lse_ptr, confidence_ptr,
    words_ptr, masses_ptr, epochs_ptr, scratch_ptr,
    batch, num_columns, num_parts, base_stride, base_step, cache_stride, cache_step, logit_scale,
    hidden_stride, hidden_step, hidden_size,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, CONFIDENCE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr, HELD: tl.constexpr, REDUCED: tl.constexpr, SCALED: tl.constexpr,
    SCATTERED: tl.constexpr, CACHE: tl.constexpr, STORED: tl.constexpr, FP8: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """All steps of at most BLOCK_B requests. Programs [num_parts]; words [2, num_parts, BLOCK_B], masses [STEPS,
    num_parts, BLOCK_B].
    """
    part = tl.program_id(0)
    row = tl.arange(0, BLOCK_B)
    cache_row, live, scale, noisy, position, key_low, key_high = request_rows(
        row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
    )
    any_noise = tl.max(noisy) > 0.0
    epoch = tl.load(epochs_ptr + part)
    token = tl.load(anchors_ptr + row, mask=live, other=0).to(tl.int32)
    share = tl.cdiv(num_columns, num_parts)
    n, r = tl.arange(0, HELD), tl.arange(0, BLOCK_R)
    column = part * share + n
    own = (n < share) & (column < num_columns)
    held = read_weight(
        w2_ptr + column.to(tl.int64)[:, None] * RANK + r[None, :], own[:, None] & (r < RANK)[None, :], FP8
    )
    row_scale = tl.full([HELD], 1.0, tl.float32)
    if FP8:
        row_scale = tl.load(w2_scale_ptr + column, mask=own, other=0.0)
    base_at = base_ptr + row.to(tl.int64)[:, None] * base_stride + column[None, :]
    base = tl.load(base_at, mask=live[:, None] & own[None, :], other=0.0)
    if CONFIDENCE != "none":
        own_confidences(
            part, 0, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, confidence_ptr, cache_rows_ptr,
            batch, num_parts, hidden_stride, hidden_step, hidden_size, HAS_ROWS, STEPS, BLOCK_B, BLOCK_H,
        )  # fmt: skip
        tl.debug_barrier()
    for step in range(STEPS):
        row_of_w1 = w1_ptr + tl.sum(token, axis=0).to(tl.int64) * RANK
        features = tl.load(row_of_w1 + r, mask=r < RANK, other=0.0).to(tl.float32)
        bias = tl.sum(held.to(tl.float32) * features[None, :], axis=1)[None, :]
        if FP8:
            bias = bias * row_scale[None, :]
        out_row = cache_row * cache_stride + step * cache_step
        rows = (row, out_row, live, scale, noisy, (position + step).to(tl.uint32), key_low, key_high)
        x, word = race_columns(
            base.to(tl.float32), bias, column, own, rows, cache_ptr, ids_ptr, logit_scale, any_noise,
            REDUCED, SCALED, SCATTERED, CACHE, STORED,
        )  # fmt: skip
        tag, start = slot_of(step, epoch, 0, num_parts, 1, BLOCK_B)
        publish(word, words_ptr + start, part, tag, BLOCK_B)
        following = tl.minimum(step + 1, STEPS - 1)
        base = tl.load(base_at + following * base_step, mask=live[:, None] & own[None, :], other=0.0)
        peak = tl.maximum(tl.max(x, axis=1), _LOWEST)
        mass = peak + fast_log2(tl.maximum(tl.sum(fast_exp2(x - peak[:, None]), axis=1), 1e-37))
        token = joined(
            tl.where(noisy > 0.0, mass, peak), token, part, 0, step, tag, live, w1_ptr, words_ptr + start,
            masses_ptr, scratch_ptr, tokens_ptr, confidence_ptr, confidence_weight_ptr, batch, num_parts, hidden_size,
            STEPS, CONFIDENCE, RANK, BLOCK_R, BLOCK_V, BLOCK_B, BLOCK_B,
        )  # fmt: skip
    join_masses(
        masses_ptr, 0, epoch, part, lse_ptr, temperature_ptr, cache_rows_ptr, batch, num_parts,
        HAS_ROWS, STEPS, BLOCK_S, BLOCK_V, BLOCK_B,
    )  # fmt: skip
    tl.store(epochs_ptr + part, epoch + STEPS)
