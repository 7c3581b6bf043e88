"""Device functions that the KDA kernels share: gates, normalised rows, records of a ring, products of split precision.

A product of two float32 tiles runs on tensor cores as three bfloat16 products of their high and low halves,

    a b = a_hi b_hi + a_hi b_lo + a_lo b_hi + O(2^-16 |a| |b|)

which loses about 1e-6, where one TF32 product loses 1e-4. Triton's interpreter can't multiply bfloat16 tiles and takes
the float32 product instead.
"""

import os

from dspark.kernels import tl, triton

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def split_dot(a, b):
    """a [M, K] b [K, N] of float32 tiles, error about 1e-6 of the operands."""
    if _INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
    product = tl.dot(a_high, b_high)
    product = tl.dot(a_high, b_low, product)
    return tl.dot(a_low, b_high, product)


@triton.jit
def log_decay(shifted, rate, lower_bound, BOUNDED: tl.constexpr):
    """g of a raw gate plus its bias; see `Gate`."""
    if BOUNDED:
        return lower_bound * tl.sigmoid(tl.maximum(rate * shifted, -80.0))  # below, e^x of the other sign overflows
    else:
        soft = tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0)))
        return -rate * tl.where(shifted > 20.0, shifted, soft)


@triton.jit
def unit_rows(rows):
    """Each row of [T, K] over its length."""
    return rows * (1.0 / tl.sqrt(tl.sum(rows * rows, axis=1) + 1e-6))[:, None]


@triton.jit
def head_rate(a_log_ptr, head, HAS_RATE: tl.constexpr):
    """e^a_log of a head, or 1."""
    if HAS_RATE:
        return tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    else:
        return 1.0


@triton.jit
def first_of_row(first_token_ptr, row, num_tokens, PACKED: tl.constexpr):
    """Index of a row's first token on the line of all tokens."""
    if PACKED:
        return tl.load(first_token_ptr + row).to(tl.int64)
    else:
        return row.to(tl.int64) * num_tokens


@triton.jit
def held_records(
    key_ptr,
    gate_ptr,
    start,
    count,
    columns,
    bias,
    rate,
    lower_bound,
    BOUNDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Weights k^_j e^{G_n - G_j} [ROWS, K] of the first `count` records from ring row `start`, and the decay e^{G_n}
    [K] of what was there before.

    G_n - G_j is summed over the records behind j, not subtracted: |G| reaches 45, and its rounding would show.
    """
    j = tl.arange(0, ROWS)
    inside = (j < count)[:, None] & (columns < KEY_DIM)[None, :]
    behind = (j + 1 < count)[:, None] & (columns < KEY_DIM)[None, :]
    row = ((start + j) % CAPACITY) * KEY_DIM
    row_behind = ((start + j + 1) % CAPACITY) * KEY_DIM
    key = tl.load(key_ptr + row[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    own = columns < tl.where(count > 0, KEY_DIM, 0)
    first = tl.load(gate_ptr + (start % CAPACITY) * KEY_DIM + columns, mask=own, other=0.0)
    raw = tl.load(gate_ptr + row_behind[:, None] + columns[None, :], mask=behind, other=0.0).to(tl.float32)
    decay = tl.where(behind, log_decay(raw + bias[None, :], rate, lower_bound, BOUNDED), 0.0)
    after = tl.cumsum(decay, axis=0, reverse=True)
    first_decay = tl.where(own, log_decay(first.to(tl.float32) + bias, rate, lower_bound, BOUNDED), 0.0)
    return unit_rows(key) * tl.exp(after), tl.exp(first_decay + tl.sum(decay, axis=0))


@triton.jit
def replayed(
    state,
    correction_ptr,
    start,
    count,
    values,
    weight,
    decay,
    CAPACITY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A state tile [V, K] after `count` records, with the weights and the decay that `held_records` gave for them."""
    j = tl.arange(0, ROWS)
    known = (values < VALUE_DIM)[:, None] & (j < count)[None, :]
    place = ((start + j) % CAPACITY)[None, :] * VALUE_DIM + values[:, None]
    correction = tl.load(correction_ptr + place, mask=known, other=0.0).to(tl.float32)
    return state * decay[None, :] + split_dot(correction, weight)
