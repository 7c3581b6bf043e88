"""Features and confidence of one request of the Markov chain, and the part of them that no token changes.

The gated and the recurrent head project [h; e] or [state; e; h]. The product with h does not depend on the drafted
tokens, so that one matrix product before the chain computes it for all positions; what is left per step is the product
with e (and the state), rank columns wide.
"""

import torch

from dspark.kernels import tl, triton
from dspark.kernels.markov_device import rounded
from dspark.kernels.noise import INTERPRETED

# Columns of a joint projection per load: 32 columns of 256 rows are 16 registers a thread.
CHUNK = 32

_INTERPRETED = tl.constexpr(INTERPRETED)
_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _partial_product(total, vector_ptr, matrix_ptr, stride, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """total [BLOCK_R] + matrix [RANK, RANK] vector [RANK], from memory."""
    r = tl.arange(0, BLOCK_R)
    for start in range(0, RANK, _CHUNK):
        column = start + tl.arange(0, _CHUNK)
        vector = tl.load(vector_ptr + column, mask=column < RANK, other=0.0).to(tl.float32)
        mask = (r < RANK)[:, None] & (column < RANK)[None, :]
        matrix = tl.load(matrix_ptr + r[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(matrix * vector[None, :], axis=1)
    return total


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def embedded_row(token, w1_ptr, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """W1's row of a token, [BLOCK_R] float32; the features of the vanilla head."""
    r = tl.arange(0, BLOCK_R)
    return tl.load(w1_ptr + token * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)


@triton.jit
def request_features(
    token, w1_ptr, joint_ptr, products_ptr, state_ptr, joint_stride, joint_column,
    KIND: tl.constexpr, FEATURES: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Features [BLOCK_R] float32 of one request, rounded to FEATURES; the recurrent state in memory moves on.

    `products_ptr` holds the hidden state's share of the projection and the bias, 3 x RANK (gated: the first RANK).
    `joint_column` is the first column of `joint_ptr` that is multiplied with e (gated) or the state (rnn).
    """
    r = tl.arange(0, BLOCK_R)
    own = r < RANK
    row = w1_ptr + token * RANK
    embedded = embedded_row(token, w1_ptr, RANK, BLOCK_R)
    if KIND == "gated":
        gate = tl.load(products_ptr + r, mask=own, other=0.0)
        gate = _partial_product(gate, row, joint_ptr + joint_column, joint_stride, RANK, BLOCK_R)
        return rounded(tl.sigmoid(gate) * embedded, FEATURES)
    elif KIND == "rnn":
        gate = tl.load(products_ptr + r, mask=own, other=0.0)
        candidate = tl.load(products_ptr + RANK + r, mask=own, other=0.0)
        out = tl.load(products_ptr + 2 * RANK + r, mask=own, other=0.0)
        third = RANK * joint_stride
        gate = _partial_product(gate, state_ptr, joint_ptr, joint_stride, RANK, BLOCK_R)
        gate = _partial_product(gate, row, joint_ptr + RANK, joint_stride, RANK, BLOCK_R)
        candidate = _partial_product(candidate, state_ptr, joint_ptr + third, joint_stride, RANK, BLOCK_R)
        candidate = _partial_product(candidate, row, joint_ptr + third + RANK, joint_stride, RANK, BLOCK_R)
        out = _partial_product(out, state_ptr, joint_ptr + 2 * third, joint_stride, RANK, BLOCK_R)
        out = _partial_product(out, row, joint_ptr + 2 * third + RANK, joint_stride, RANK, BLOCK_R)
        kept = tl.sigmoid(gate)
        state = tl.load(state_ptr + r, mask=own, other=0.0)
        tl.debug_barrier()  # the state was also read column by column, by other threads
        tl.store(state_ptr + r, kept * state + (1.0 - kept) * _tanh(candidate), mask=own)
        tl.debug_barrier()
        return rounded(_tanh(out), FEATURES)
    else:
        return embedded


@triton.jit
def hidden_confidence(hidden_ptr, hidden_size, weight_ptr, bias_ptr, BLOCK_H: tl.constexpr):
    """The hidden state's share of a confidence logit, with the bias."""
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        hidden = tl.load(hidden_ptr + column, mask=column < hidden_size, other=0.0).to(tl.float32)
        total += hidden * tl.load(weight_ptr + column, mask=column < hidden_size, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0) + tl.load(bias_ptr).to(tl.float32)


@triton.jit
def token_confidence(token, w1_ptr, hidden_size, weight_ptr, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The previous token's share of a confidence logit."""
    r = tl.arange(0, BLOCK_R)
    embedded = embedded_row(token, w1_ptr, RANK, BLOCK_R)
    weight = tl.load(weight_ptr + hidden_size + r, mask=r < RANK, other=0.0).to(tl.float32)
    return tl.sum(embedded * weight, axis=0)


@triton.jit(do_not_specialize=["step"])
def _features_kernel(
    tokens_ptr, confidence_ptr, anchors_ptr, cache_rows_ptr, w1_ptr, joint_ptr, products_ptr, hidden_ptr,
    confidence_weight_ptr, confidence_bias_ptr, features_ptr, state_ptr,
    step, num_steps, hidden_stride, hidden_step, hidden_size, joint_stride, joint_column,
    HAS_ROWS: tl.constexpr, KIND: tl.constexpr, CONFIDENCE: tl.constexpr, FEATURES: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Before a step of a gated or recurrent head, one program a request: features [B, RANK] and the confidence."""
    request = tl.program_id(0)
    live = True
    if HAS_ROWS:
        live = tl.load(cache_rows_ptr + request) >= 0
    if live:
        token = tl.load(anchors_ptr + request)
        if step > 0:
            token = tl.load(tokens_ptr + request * num_steps + step - 1)
        features = request_features(
            token, w1_ptr, joint_ptr, products_ptr + (request * num_steps + step) * (3 * RANK),
            state_ptr + request * RANK, joint_stride, joint_column, KIND, FEATURES, RANK, BLOCK_R,
        )  # fmt: skip
        r = tl.arange(0, BLOCK_R)
        tl.store(features_ptr + request * RANK + r, features, mask=r < RANK)
        if CONFIDENCE != "none":
            hidden_row = hidden_ptr + request.to(tl.int64) * hidden_stride + step * hidden_step
            logit = hidden_confidence(hidden_row, hidden_size, confidence_weight_ptr, confidence_bias_ptr, BLOCK_H)
            if CONFIDENCE == "hidden+markov":
                logit += token_confidence(token, w1_ptr, hidden_size, confidence_weight_ptr, RANK, BLOCK_R)
            tl.store(confidence_ptr + request * num_steps + step, logit)


@triton.jit
def _hidden_products_kernel(
    hidden_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, hidden_size, steps,
    hidden_stride, hidden_step, weight_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (m // steps).to(tl.int64) * hidden_stride + (m % steps) * hidden_step
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = h < hidden_size
        hidden = tl.load(
            hidden_ptr + row[:, None] + h[None, :], mask=(m < num_rows)[:, None] & inside[None, :], other=0.0
        )
        weight = tl.load(
            weight_ptr + n[None, :] * weight_stride + h[:, None],
            mask=(n < num_outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        if _INTERPRETED:
            total += tl.dot(hidden.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
        else:
            total = tl.dot(hidden, weight, total, input_precision="ieee")
    total += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    mask = (m < num_rows)[:, None] & (n < num_outputs)[None, :]
    tl.store(out_ptr + m[:, None] * out_stride + n[None, :], total, mask=mask)


def hidden_products(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """out [B, K, n] float32 = hidden [B, K, H] times weight [n, H] transposed, plus bias [n].

    The sums stay float32: rounded to bfloat16 here they would be rounded once more than in the undivided projection.
    """
    batch, steps, hidden_size = hidden.shape
    outputs = len(weight)
    block_m, block_n, block_h = 16, 32, 64
    grid = (triton.cdiv(batch * steps, block_m), triton.cdiv(outputs, block_n))
    _hidden_products_kernel[grid](
        hidden, weight, bias, out, batch * steps, outputs, hidden_size, steps,
        hidden.stride(0), hidden.stride(1), weight.stride(0), out.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_H=block_h,
    )  # fmt: skip
