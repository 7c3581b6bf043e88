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

Records that are held in the ring are rows of the same window, ahead of the new tokens: their corrections are known, so
their rows of M are zero, their beta is one, and U itself stands where the others have V - S P. Where the row folds, the
state takes up its records in registers, is written back, and is read from there: one read and one write of it in all.
The window then has no records.

Read `kda_scan` and `replay` of `dspark.kernels.kda` first.
"""

from typing import Any

import torch

from dspark.kernels import tl, triton
from dspark.kernels.kda import KDALayer, Rows, Tokens, Window
from dspark.kernels.kda_device import (
    convolved,
    exp_of,
    first_of_row,
    halves,
    halves_dot,
    head_rate,
    held_block,
    held_corrections,
    log_decay,
    prefetch,
    prefetch_window,
    selected_sums,
    sigmoid_of,
    stacked,
    unit_rows,
    unstacked,
    wait_for_previous_kernel,
)
from dspark.kernels.kda_launch import launch_options

MAX_TOKENS = 16  # held records included
FACTOR_LIMIT = 80.0  # e^80 is the largest power of e that still multiplies safely in float32
# A program's value channels, those of them in registers at a time, warps, most registers: with 168 three programs fit
# a multiprocessor. With fewer heads than FULL_GRID twice as many programs, for half a state each, still run at once.
TILE, SPREAD_TILE, FULL_GRID = (128, 64, 4, 168), (64, 64, 4, 168), 198


@triton.jit
def _unit_lower_inverse(m, t, WINDOW: tl.constexpr):
    """(I + m)^{-1} of a strictly lower triangular m [T, T] of which at most WINDOW rows are not zero."""
    inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0) - m
    power = m
    for doubled in tl.static_range(1, 4):
        if 2**doubled < WINDOW:
            power = tl.dot(power, power, input_precision="ieee")
            if 2**doubled == WINDOW - 1:  # all later powers of m are zero, and so is what m^doubled times m adds
                inverse += power
            else:
                inverse = tl.dot(inverse, power, inverse, input_precision="ieee")
    return inverse


@triton.jit
def _pairwise_couplings(query, key, total, t, TOKENS: tl.constexpr):
    """sum_c k_t k_i e^{G_t - G_i} and sum_c q_t k_i e^{G_t - G_i} for i <= t, one i at a time; what lies above the
    diagonal means nothing."""
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
def _kda_chunk_kernel(  # noqa: C901, PLR0912, PLR0915 (most branches are known when compiling)
    query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, out_ptr,
    state_ptr, u_ptr, key_record_ptr, gate_record_ptr, a_log_ptr, bias_ptr,
    slots_ptr, record_slots_ptr, num_rows_ptr, start_ptr, held_ptr, fold_ptr, first_token_ptr,
    lower_bound, num_tokens,
    query_stride, key_stride, value_stride, gate_stride, beta_stride, out_stride, state_stride, u_stride, record_stride,
    weight_ptr, ring_ptr, cursor_ptr, ring_stride, spare_ptr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_RATE: tl.constexpr, FACTORED: tl.constexpr, HOLDS: tl.constexpr, PACKED: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, SPARE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    if OVERLAP == 1:
        wait_for_previous_kernel()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    given = tl.load(num_rows_ptr + row).to(tl.int32)
    count = tl.where(slot >= 0, given, 0)
    place_in_window, columns = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    own = columns < KEY_DIM
    first_value = tl.program_id(0) * BLOCK_V
    # Numbers that are the same for all threads are added to pointers first: what is left are constants to the compiler.
    token = first_of_row(first_token_ptr, row, num_tokens, PACKED)
    out = out_ptr + token * out_stride + (head * VALUE_DIM + first_value)
    filled = tl.where(PACKED, given, num_tokens)
    state_base = state_ptr + tl.maximum(slot, 0) * state_stride + (head * VALUE_DIM + first_value) * KEY_DIM
    # The whole tile is on its way while everything that does not depend on it is worked out.
    SPAN: tl.constexpr = 128 // (state_ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements of a cache line
    line = tl.arange(0, BLOCK_V * BLOCK_K // SPAN) * SPAN
    prefetch(state_base + tl.minimum(line, (VALUE_DIM - first_value) * KEY_DIM - 1))
    record_slot = tl.load(record_slots_ptr + row).to(tl.int64)
    start, held = tl.load(start_ptr + row).to(tl.int32), tl.load(held_ptr + row).to(tl.int32)
    folds = (tl.load(fold_ptr + row) != 0) & (held > 0)
    ROW: tl.constexpr = HEADS * (2 * KEY_DIM + VALUE_DIM)
    if WIDTH:  # queries, keys and values are inputs of a convolution
        cursor, spare = WIDTH - 1, spare_ptr + row.to(tl.int64) * ROW
        if not SPARE:
            cursor = tl.load(cursor_ptr + row).to(tl.int32)
        ring = ring_ptr + tl.maximum(slot, 0) * ring_stride
        at_queries, at_keys = head * KEY_DIM, (HEADS + head) * KEY_DIM
        at_values = 2 * HEADS * KEY_DIM + head * VALUE_DIM + first_value
        prefetch_window(ring + at_queries, weight_ptr + at_queries * WIDTH, cursor, KEY_DIM, BLOCK_K, ROW, RING, WIDTH)
        prefetch_window(ring + at_keys, weight_ptr + at_keys * WIDTH, cursor, KEY_DIM, BLOCK_K, ROW, RING, WIDTH)
        prefetch_window(
            ring + at_values, weight_ptr + at_values * WIDTH, cursor, VALUE_DIM - first_value, BLOCK_V, ROW, RING, WIDTH
        )
    if OVERLAP == 2:
        wait_for_previous_kernel()
    if (count == 0) | (HOLDS == 2):  # with held records the window may end before the row's last place does
        values = tl.arange(0, BLOCK_V)
        empty = (place_in_window >= count) & (place_in_window < filled)
        place = place_in_window[:, None] * out_stride + values[None, :]
        nothing = tl.zeros([TOKENS, BLOCK_V], out_ptr.dtype.element_ty)
        tl.store(out + place, nothing, mask=empty[:, None] & (first_value + values < VALUE_DIM)[None, :])
        if count == 0:
            return
    rate = head_rate(a_log_ptr, head, HAS_RATE)
    # A copy for every row: it then is where the elements of [T, K] tiles are, and moves to no other thread.
    everywhere = (place_in_window >= 0)[:, None] & own[None, :]
    bias = tl.load(
        bias_ptr + head * KEY_DIM + place_in_window[:, None] * 0 + columns[None, :], mask=everywhere, other=0.0
    ).to(tl.float32)
    keys_held = key_record_ptr + record_slot * record_stride + head * CAPACITY * KEY_DIM
    gates_held = gate_record_ptr + record_slot * record_stride + head * CAPACITY * KEY_DIM
    u_held = u_ptr + record_slot * u_stride + head * CAPACITY * VALUE_DIM + first_value
    next_row, folded = start + held, held * 0
    if HOLDS:
        folded = tl.where(folds, held, 0)
        weight, passed = held_block(
            keys_held, gates_held, start, 0, folded, columns, bias, rate, lower_bound,
            tl.zeros_like(columns).to(tl.float32), BOUNDED, CAPACITY, KEY_DIM,
        )  # fmt: skip
        weight_high, weight_low = halves(weight)
        passed = exp_of(passed)
    if HOLDS == 2:
        held -= folded
    else:
        held = held * 0

    # The window is the held records, whose corrections are known, and then the new tokens, t >= 0.
    t = place_in_window - held
    is_new = (t >= 0) & (t < count)
    new_row = (next_row + t + CAPACITY) % CAPACITY
    # What does not depend on the value channel. Rows past the count are zero: they decay, read and add nothing.
    inside = is_new[:, None] & own[None, :]
    lane = columns[None, :]
    raw_gate = tl.load(
        gate_ptr + token * gate_stride + head * KEY_DIM + t[:, None] * gate_stride + lane, mask=inside, other=0.0
    )
    own_keys = key_ptr + token * key_stride + head * KEY_DIM
    own_queries = query_ptr + token * query_stride + head * KEY_DIM
    if WIDTH:
        raw_query = convolved(
            own_queries, query_stride, weight_ptr + at_queries * WIDTH, ring + at_queries,
            spare + at_queries, cursor, count, first_value == 0, t, is_new, columns, KEY_DIM, ROW, RING, WIDTH, SPARE,
        )  # fmt: skip
        raw_key = convolved(
            own_keys, key_stride, weight_ptr + at_keys * WIDTH, ring + at_keys,
            spare + at_keys, cursor, count, first_value == 0, t, is_new, columns, KEY_DIM, ROW, RING, WIDTH, SPARE,
        )  # fmt: skip
    else:
        raw_key = tl.load(own_keys + t[:, None] * key_stride + lane, mask=inside, other=0.0)
        raw_query = tl.load(own_queries + t[:, None] * query_stride + lane, mask=inside, other=0.0)
    beta = tl.load(beta_ptr + token * beta_stride + head + t * beta_stride, mask=is_new, other=0.0).to(tl.float32)
    beta = tl.where(is_new, sigmoid_of(beta), tl.where(t < 0, 1.0, 0.0))
    if first_value == 0:
        record = new_row[:, None] * KEY_DIM + lane
        tl.store(keys_held + record, raw_key.to(key_record_ptr.dtype.element_ty), mask=inside)
        tl.store(gates_held + record, raw_gate.to(gate_record_ptr.dtype.element_ty), mask=inside)
    gate, key = raw_gate.to(tl.float32), raw_key.to(tl.float32)
    held_row = (start + place_in_window) % CAPACITY
    if HOLDS == 2:
        recorded = held_row[:, None] * KEY_DIM + lane
        of_record = (t < 0)[:, None] & own[None, :]
        key += tl.load(keys_held + recorded, mask=of_record, other=0.0).to(tl.float32)
        gate += tl.load(gates_held + recorded, mask=of_record, other=0.0).to(tl.float32)
        inside = (t < count)[:, None] & own[None, :]
    decay = log_decay(gate + bias, rate, lower_bound, BOUNDED)
    decay = tl.where(inside, decay, 0.0)
    query = unit_rows(raw_query.to(tl.float32)) * (1.0 / tl.sqrt(KEY_DIM * 1.0))
    key = unit_rows(key)
    total = selected_sums(place_in_window[None, :] <= place_in_window[:, None], decay)
    grown = exp_of(total)
    key_high, key_low = halves(key * grown)
    query_high, query_low = halves(query * grown)
    at, upto = place_in_window[:, None], place_in_window[None, :]
    if FACTORED:
        back_high, back_low = halves(key * exp_of(-total))
        nothing = tl.zeros([TOKENS, TOKENS], tl.float32)
        keys = halves_dot(key_high, key_low, tl.trans(back_high), tl.trans(back_low), nothing)
        queries = halves_dot(query_high, query_low, tl.trans(back_high), tl.trans(back_low), nothing)
    else:
        keys, queries = _pairwise_couplings(query, key, total, place_in_window, TOKENS)
    # A held record's correction depends on nothing any more: its row of M is zero, and its beta is one.
    keys = tl.where((at > upto) & (t >= 0)[:, None], keys * beta[:, None], 0.0)
    queries = tl.where(at >= upto, queries, 0.0)
    solve = _unit_lower_inverse(keys, place_in_window, WINDOW) * beta[None, :]
    read_high, read_low = halves(tl.dot(queries, solve, input_precision="ieee"))
    solve_high, solve_low = halves(solve)
    both_high, both_low = stacked(key_high, query_high), stacked(key_low, query_low)

    for begin in tl.static_range(0, BLOCK_V, TILE_V):
        values = begin + tl.arange(0, TILE_V)
        known = first_value + values < VALUE_DIM
        taken = is_new[:, None] & known[None, :]
        own_values = value_ptr + token * value_stride + (head * VALUE_DIM + first_value)
        if WIDTH:
            value = convolved(
                own_values, value_stride, weight_ptr + at_values * WIDTH, ring + at_values,
                spare + at_values, cursor, count, first_value >= 0, t, is_new, values, VALUE_DIM - first_value,
                ROW, RING, WIDTH, SPARE,
            )  # fmt: skip
        else:
            value = tl.load(own_values + t[:, None] * value_stride + values[None, :], mask=taken, other=0.0)
        states = state_base + (values[:, None] * KEY_DIM + columns[None, :])
        if KEY_DIM == BLOCK_K and VALUE_DIM % BLOCK_V == 0:
            state = tl.load(states).to(tl.float32)
        else:
            state = tl.load(states, mask=known[:, None] & own[None, :], other=0.0).to(tl.float32)
        if HOLDS:
            of_records = held_corrections(u_held, start, 0, folded, values, known, CAPACITY, VALUE_DIM)
            high, low = halves(tl.trans(of_records))
            state = halves_dot(high, low, weight_high, weight_low, state * passed[None, :])
            kept = state.to(state_ptr.dtype.element_ty)
            if folds:
                tl.store(states, kept, mask=known[:, None] & own[None, :])
            state = kept.to(tl.float32)  # as later steps will find it
        # One product for keys and queries with the state on the tall side, [V, 2 T], is what tensor cores take whole.
        state_high, state_low = halves(state)
        reads = tl.zeros([TILE_V, 2 * TOKENS], tl.float32)
        reads = halves_dot(state_high, state_low, tl.trans(both_high), tl.trans(both_low), reads)
        of_keys, of_queries = unstacked(reads)
        surplus = value.to(tl.float32) - tl.trans(of_keys)
        if HOLDS == 2:
            known_record = (t < 0)[:, None] & known[None, :]
            u = tl.load(u_held + held_row[:, None] * VALUE_DIM + values[None, :], mask=known_record, other=0.0)
            surplus = tl.where((t < 0)[:, None], u.to(tl.float32), surplus)
        surplus_high, surplus_low = halves(surplus)
        correction = halves_dot(solve_high, solve_low, surplus_high, surplus_low, tl.zeros_like(surplus))
        output = halves_dot(read_high, read_low, surplus_high, surplus_low, tl.trans(of_queries).to(tl.float32))
        recorded_u = u_held + new_row[:, None] * VALUE_DIM + values[None, :]
        tl.store(recorded_u, correction.to(u_ptr.dtype.element_ty), mask=taken)
        # Past the count the query was zero, and so is the output.
        written = ((t >= 0) & (t < filled))[:, None] & known[None, :]
        tl.store(out + t[:, None] * out_stride + values[None, :], output.to(out_ptr.dtype.element_ty), mask=written)


def launch_kda_chunk(
    tokens: Tokens,
    layer: KDALayer,
    rows: Rows,
    *,
    deferred: bool = True,
    window: Window | None = None,
    rows_settled: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The window solved at once, wherever Triton runs. Same contract as `kda_verify`; tokens and held records of a row
    that does not fold must be 16 at most together, and so must the records of one that folds, and the tokens and the
    history of their convolution, whose ring must be of their dtype."""
    batch, (heads, value_dim) = len(rows.slots), tokens.value.shape[2:]
    num_tokens = tokens.value.shape[1] if rows.first_token is None else min(MAX_TOKENS, layer.records.capacity)
    assert num_tokens <= MAX_TOKENS, f"{num_tokens} tokens do not fit a window of {MAX_TOKENS}"
    out = outputs_for(tokens, rows) if out is None else out
    block_v, tile_v, num_warps, registers = SPREAD_TILE if batch * heads < FULL_GRID else TILE
    block_v = min(block_v, max(16, triton.next_power_of_2(value_dim)))
    holds = 0 if not deferred else 1 if rows.max_held == 0 else 2
    bound, longest = layer.gate.lower_bound, MAX_TOKENS if holds == 2 else num_tokens
    arguments, sizes = verify_arguments(tokens, layer, rows, out)
    conv: tuple[Any, ...] = (rows.slots, rows.slots, rows.slots, 0, rows.slots)
    ring_rows = 0
    if window is not None:
        weight, ring = window.weight.contiguous(), window.ring
        weight = weight.clone() if weight.data_ptr() % 16 else weight  # a channel's four are read at once
        cursor, spare = (x if x is not None else rows.slots for x in (window.cursor, window.spare))
        conv, rows_settled = (weight, ring, cursor, ring.stride(0), spare), rows_settled and weight is window.weight
        ring_rows = ring.shape[1] + (window.spare is not None)
    _kda_chunk_kernel[(triton.cdiv(value_dim, block_v), heads, batch)](
        *arguments,
        *conv,
        **sizes,
        FACTORED=bound is not None and -bound * longest <= FACTOR_LIMIT,
        WINDOW=next(n for n in (8, 9, 16) if longest <= n),
        TOKENS=16,
        BLOCK_V=block_v,
        TILE_V=min(tile_v, block_v),
        HOLDS=holds,
        WIDTH=0 if window is None else window.weight.shape[1],
        RING=ring_rows,
        SPARE=window is not None and window.spare is not None,
        **launch_options(out, num_warps, registers, rows_settled=rows_settled),
    )
    return out


def verify_arguments(
    tokens: Tokens, layer: KDALayer, rows: Rows, out: torch.Tensor
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
        "PACKED": rows.first_token is not None,
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
