"""Verify up to 16 tokens at once on tensor cores: the same contract as `dspark.kernels.kda_verify`.

Solving the recurrence for all corrections of the window, with rows P_t = e^{G_t} k^_t and Q_t = e^{G_t} q^_t,

    M_ti = beta_t sum_c k^_tc k^_ic e^{G_tc - G_ic}, i < t       A  = (I + M)^{-1} Diag(beta)      [T, T]
    D_ti = sum_c q^_tc k^_ic e^{G_tc - G_ic},        i <= t      DA = D A                          [T, T]
    R = V^T - S P^T        U = R A^T        O = S Q^T + R DA^T                                     [V, T]

The state is read once, by two [V, K] [K, 16] products, and there is no loop over tokens. The inverse of a unit lower
triangle of 16 is (I - M)(I + M^2)(I + M^4)(I + M^8). Only decays e^{G_t} and e^{G_t - G_i} are formed, never e^{-G},
unless the gate is bounded and T |bound| <= 80: then couplings factor into e^{G_t} and e^{-G_i} and take one product
each in place of a loop over i. A token's output is made of zeros from all later tokens, so it does not change with
them by a single bit.
Source: Kimi Linear, arXiv:2510.26692, section 3.2; the inverse by doubling is that of a nilpotent matrix.

One program serves one head and all its value tiles, so that what does not depend on V is done once a head. With few
heads in the batch the tiles are spread over programs instead, which repeat it.
Read `kda_scan` and `replay` of `dspark.kernels.kda` first.
"""

from typing import Any

import torch

from dspark.kernels import tl, triton
from dspark.kernels.kda import KDALayer, Rows, Tokens
from dspark.kernels.kda_device import first_of_row, head_rate, held_records, log_decay, replayed, split_dot, unit_rows

MAX_TOKENS = 16
FACTOR_LIMIT = 80.0  # e^80 is the largest power of e that still multiplies safely in float32
FULL_GRID = 264  # programs that fill a Hopper GPU twice; with fewer heads the value tiles are spread over programs

# (value channels of a tile, warps), chosen by the registers and spills of the code that Triton 3.9 makes for sm_90
# with K = V = 128. Not timed on a device yet; the other entry is the first thing to try there. Held records take 32
# registers a thread more, which eight warps halve.
TILES = {"spread": (64, 4), "whole": (64, 4), "whole-deferred": (128, 8)}


@triton.jit
def _unit_lower_inverse(m, t, TOKENS: tl.constexpr):
    """(I + m)^{-1} of a strictly lower triangular m [T, T], T a power of two up to 16."""
    inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0) - m
    power = m
    for doubled in tl.static_range(1, 4):
        if 2**doubled < TOKENS:
            power = tl.dot(power, power, input_precision="ieee")
            inverse += tl.dot(inverse, power, input_precision="ieee")
    return inverse


@triton.jit
def _couplings(query, key, total, t, FACTORED: tl.constexpr, TOKENS: tl.constexpr):
    """sum_c k_t k_i e^{G_t - G_i} and sum_c q_t k_i e^{G_t - G_i} for i <= t; what lies above the diagonal is
    undefined."""
    if FACTORED:
        back = tl.trans(key * tl.exp(-total))
        return split_dot(key * tl.exp(total), back), split_dot(query * tl.exp(total), back)
    else:
        keys, queries = tl.zeros([TOKENS, TOKENS], tl.float32), tl.zeros([TOKENS, TOKENS], tl.float32)
        for i in tl.static_range(TOKENS):
            mine = (t == i)[:, None]
            total_i = tl.sum(tl.where(mine, total, 0.0), axis=0)
            key_i = tl.sum(tl.where(mine, key, 0.0), axis=0)
            weight = key_i[None, :] * tl.exp(tl.minimum(total - total_i[None, :], 0.0))
            column = t[None, :] == i
            keys += tl.where(column, tl.sum(key * weight, axis=1)[:, None], 0.0)
            queries += tl.where(column, tl.sum(query * weight, axis=1)[:, None], 0.0)
        return keys, queries


@triton.jit
def _solved_window(query, key, decay, beta, t, FACTORED: tl.constexpr, TOKENS: tl.constexpr):
    """P^T and Q^T [K, T], A^T and (DA)^T [T, T] of a window of prepared tokens."""
    total = tl.cumsum(decay, axis=0)
    keys, queries = _couplings(query, key, total, t, FACTORED, TOKENS)
    keys = tl.where(t[:, None] > t[None, :], keys * beta[:, None], 0.0)
    queries = tl.where(t[:, None] >= t[None, :], queries, 0.0)
    solve = _unit_lower_inverse(keys, t, TOKENS) * beta[None, :]
    read = tl.dot(queries, solve, input_precision="ieee")
    grown = tl.exp(total)
    return tl.trans(key * grown), tl.trans(query * grown), tl.trans(solve), tl.trans(read)


@triton.jit
def _kda_chunk_kernel(  # noqa: PLR0915 (a device function; half of it is loads and stores)
    query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, out_ptr,
    state_ptr, u_ptr, key_record_ptr, gate_record_ptr, a_log_ptr, bias_ptr,
    slots_ptr, record_slots_ptr, num_rows_ptr, start_ptr, held_ptr, fold_ptr, first_token_ptr,
    lower_bound, num_tokens,
    query_stride, key_stride, value_stride, gate_stride, beta_stride, out_stride, state_stride, u_stride, record_stride,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_RATE: tl.constexpr, FACTORED: tl.constexpr, DEFERRED: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    count = tl.where(slot >= 0, tl.load(num_rows_ptr + row), 0)
    t, columns = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    token = first_of_row(first_token_ptr, row, num_tokens, PACKED) + t
    out = out_ptr + token[:, None] * out_stride + head * VALUE_DIM
    first_value = tl.program_id(0) * (BLOCK_V * TILES)
    if count == 0:
        for tile in range(0 if PACKED else TILES):
            values = first_value + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            written = (t < num_tokens)[:, None] & (values < VALUE_DIM)[None, :]
            tl.store(out + values[None, :], tl.zeros([TOKENS, BLOCK_V], out_ptr.dtype.element_ty), mask=written)
        return
    record_slot = tl.load(record_slots_ptr + row).to(tl.int64)
    start, held = tl.load(start_ptr + row), tl.load(held_ptr + row)
    rate = head_rate(a_log_ptr, head, HAS_RATE)
    own = columns < KEY_DIM
    bias = tl.load(bias_ptr + head * KEY_DIM + columns, mask=own, other=0.0).to(tl.float32)

    # What does not depend on the value channel. Rows past the count are zero: they decay, read and add nothing.
    inside = (t < count)[:, None] & own[None, :]
    lane = head * KEY_DIM + columns[None, :]
    raw_key = tl.load(key_ptr + token[:, None] * key_stride + lane, mask=inside, other=0.0)
    raw_gate = tl.load(gate_ptr + token[:, None] * gate_stride + lane, mask=inside, other=0.0)
    raw_query = tl.load(query_ptr + token[:, None] * query_stride + lane, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + token * beta_stride + head, mask=t < count, other=0.0).to(tl.float32)
    beta = tl.where(t < count, 1.0 / (1.0 + tl.exp(-tl.maximum(beta, -80.0))), 0.0)
    decay = log_decay(raw_gate.to(tl.float32) + bias[None, :], rate, lower_bound, BOUNDED)
    decay = tl.where(inside, decay, 0.0)
    query = unit_rows(raw_query.to(tl.float32)) * (1.0 / tl.sqrt(KEY_DIM * 1.0))
    key_t, query_t, solve_t, read_t = _solved_window(
        query, unit_rows(raw_key.to(tl.float32)), decay, beta, t, FACTORED, TOKENS
    )

    base = record_slot * record_stride + head * CAPACITY * KEY_DIM
    new_row = (start + held + t) % CAPACITY
    if tl.program_id(0) == 0:
        place = base + new_row[:, None] * KEY_DIM + columns[None, :]
        tl.store(key_record_ptr + place, raw_key.to(key_record_ptr.dtype.element_ty), mask=inside)
        tl.store(gate_record_ptr + place, raw_gate.to(gate_record_ptr.dtype.element_ty), mask=inside)
    if DEFERRED:
        weight, before = held_records(
            key_record_ptr + base, gate_record_ptr + base, start, held, columns, bias, rate, lower_bound,
            BOUNDED, CAPACITY, KEY_DIM, ROWS,
        )  # fmt: skip
        fold = (tl.load(fold_ptr + row) != 0) & (held > 0)

    u_base = u_ptr + record_slot * u_stride + head * CAPACITY * VALUE_DIM
    for tile in range(TILES):
        values = first_value + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        known = values < VALUE_DIM
        place = slot * state_stride + (head * VALUE_DIM + values)[:, None] * KEY_DIM + columns[None, :]
        whole = known[:, None] & own[None, :]
        state = tl.load(state_ptr + place, mask=whole, other=0.0).to(tl.float32)
        if DEFERRED:
            state = replayed(state, u_base, start, held, values, weight, before, CAPACITY, VALUE_DIM, ROWS)
            if fold:
                tl.store(state_ptr + place, state.to(state_ptr.dtype.element_ty), mask=whole)
        taken = known[:, None] & (t < count)[None, :]
        value = tl.load(
            value_ptr + token[None, :] * value_stride + (head * VALUE_DIM + values)[:, None], mask=taken, other=0.0
        )
        surplus = value.to(tl.float32) - split_dot(state, key_t)
        correction = tl.dot(surplus, solve_t, input_precision="ieee")
        output = split_dot(state, query_t) + tl.dot(surplus, read_t, input_precision="ieee")
        tl.store(
            u_base + new_row[None, :] * VALUE_DIM + values[:, None], correction.to(u_ptr.dtype.element_ty), mask=taken
        )
        filled = count if PACKED else num_tokens
        written = known[:, None] & (t < filled)[None, :]  # past the count the query was zero, and so is the output
        tl.store(tl.trans(out) + values[:, None], output.to(out_ptr.dtype.element_ty), mask=written)


def launch_kda_chunk(
    tokens: Tokens, layer: KDALayer, rows: Rows, *, deferred: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The window solved at once, T <= 16, wherever Triton runs. Same contract as `kda_verify`."""
    batch, (heads, value_dim) = len(rows.slots), tokens.value.shape[2:]
    num_tokens = tokens.value.shape[1] if rows.first_token is None else min(MAX_TOKENS, layer.records.capacity)
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens do not fit a window of {MAX_TOKENS}"
    out = outputs_for(tokens, rows) if out is None else out
    kind = "spread" if batch * heads < FULL_GRID else "whole-deferred" if deferred else "whole"
    tile_v, num_warps = TILES[kind]
    block_v = min(tile_v, max(16, triton.next_power_of_2(value_dim)))
    tiles = triton.cdiv(value_dim, block_v)
    spread = tiles if kind == "spread" else 1
    bound = layer.gate.lower_bound
    arguments, sizes = verify_arguments(tokens, layer, rows, out, deferred)
    _kda_chunk_kernel[(spread, heads, batch)](
        *arguments,
        **sizes,
        FACTORED=bound is not None and -bound * num_tokens <= FACTOR_LIMIT,
        TOKENS=16,
        BLOCK_V=block_v,
        TILES=triton.cdiv(tiles, spread),
        num_warps=num_warps,
    )
    return out


def verify_arguments(
    tokens: Tokens, layer: KDALayer, rows: Rows, out: torch.Tensor, deferred: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both verify kernels take: pointers, numbers and strides in order, and the compile-time sizes by name."""
    records, gate = layer.records, layer.gate
    num_tokens, heads, key_dim = tokens.key.shape[1:]
    inputs = [flat(x) for x in (tokens.query, tokens.key, tokens.value, tokens.gate, tokens.beta)]
    arguments = (
        *inputs, out,
        layer.checkpoint, records.correction, records.key, records.gate,
        gate.dt_bias if gate.a_log is None else gate.a_log, gate.dt_bias,
        rows.slots, rows.record_slots, rows.num_rows, rows.start, rows.held, rows.fold,
        rows.slots if rows.first_token is None else rows.first_token,
        gate.lower_bound or 0.0, num_tokens,
        *(x.stride(0) for x in (*inputs, flat(out))),
        layer.checkpoint.stride(0), records.correction.stride(0), records.key.stride(0),
    )  # fmt: skip
    sizes = {
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": tokens.value.shape[-1],
        "CAPACITY": records.capacity,
        "BOUNDED": gate.lower_bound is not None,
        "HAS_RATE": gate.a_log is not None,
        "DEFERRED": deferred,
        "PACKED": rows.first_token is not None,
        "ROWS": max(16, triton.next_power_of_2(records.capacity)),
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
    }
    return arguments, sizes


def outputs_for(tokens: Tokens, rows: Rows) -> torch.Tensor:
    """A contiguous tensor for the outputs; packed ones are zero, since tokens of no row are not written."""
    allocate = torch.empty if rows.first_token is None else torch.zeros
    return allocate(tokens.value.shape, dtype=tokens.value.dtype, device=tokens.value.device)


def flat(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] or [B, T, H] as [B T, H D] rows; copies only if a head's channels or the tokens are not evenly
    spaced."""
    return x.flatten(2).flatten(0, 1)
