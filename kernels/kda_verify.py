"""Verify: the outputs of T new tokens from the checkpoint, recording their inputs and leaving the checkpoint as it is.

With held records (a deferred fold) the state S_h after them is rebuilt on the way; where `Rows.fold` says so it is
also written to the checkpoint, which is the only write to a checkpoint here. The T tokens then run from S_h by the
recurrence of `dspark.kernels.kda`, and (u, k, gate) of each is recorded behind the held ones. The rows that are read
(held records) and written (new ones) never overlap, so that thread blocks need no order.

Read `kda_verify_ref` first.
"""

import dataclasses
from collections.abc import Callable

import torch

from dspark.kernels import tl, triton
from dspark.kernels.conv_window import check_ring, conv_window, conv_window_ref
from dspark.kernels.kda import KDALayer, Rows, Tokens, Window, kda_scan, ring_rows, runs, runs_kernel
from dspark.kernels.kda_chunk import MAX_TOKENS, launch_kda_chunk, outputs_for, verify_arguments
from dspark.kernels.kda_commit import kda_fold_ref
from dspark.kernels.kda_device import exp_of, first_of_row, folded, head_rate, log_decay, sigmoid_of

# Windows up to this take the serial kernel: the chunk's inverse and couplings cost the same for one token as for
# sixteen.
SERIAL_TOKENS = 4
SERIAL_TILE_V, SERIAL_WARPS = 32, 4
# Requests times heads from which on the convolution stays a launch of its own (0: always). Few requests gain by one
# launch less; with many it is work that counts, and each value tile of a head convolves that head's keys again.
FUSE_BELOW = 193


def kda_verify_ref(tokens: Tokens, layer: KDALayer, rows: Rows, window: Window | None = None) -> torch.Tensor:
    """The definition, in PyTorch. Same contract as `kda_verify`; packed outputs are new."""
    if window is not None:
        tokens = convolved_tokens(tokens, rows, window, conv_window_ref)
    if rows.first_token is not None:
        return _packed_verify_ref(tokens, layer, rows)
    num_tokens, records = tokens.key.shape[1], layer.records
    state = kda_fold_ref(layer, rows, rows.held)
    active = (rows.slots >= 0) & (rows.num_rows > 0)
    inside = (torch.arange(num_tokens, device=active.device) < rows.num_rows[:, None]) & active[:, None]
    folded = (active & rows.fold & (rows.held > 0)).nonzero()[:, 0]
    layer.checkpoint[rows.slots[folded]] = state[folded].to(layer.checkpoint.dtype)
    state[folded] = layer.checkpoint[rows.slots[folded]].to(state.dtype)  # as later steps will find it
    outputs, corrections, _ = kda_scan(tokens, layer.gate, state)
    row, t = inside.nonzero(as_tuple=True)
    index = ring_rows(rows.start + rows.held, num_tokens, records.capacity)[row, t]
    for store, new in ((records.correction, corrections), (records.key, tokens.key), (records.gate, tokens.gate)):
        store[rows.record_slots[row], :, index] = new[row, t].to(store.dtype)
    return torch.where(inside[:, :, None, None], outputs, 0).to(tokens.value.dtype)


def _packed_verify_ref(tokens: Tokens, layer: KDALayer, rows: Rows) -> torch.Tensor:
    """The same rows, each cut from the line and put back."""
    assert rows.first_token is not None
    counts = torch.where(rows.slots >= 0, rows.num_rows, 0)
    index, inside = runs(rows.first_token, counts, tokens.key.shape[1])
    apart = Tokens(*(x[0, index] for x in vars(tokens).values()))
    outputs = kda_verify_ref(apart, layer, dataclasses.replace(rows, num_rows=counts, first_token=None))
    line = torch.zeros_like(tokens.value)
    line[0, index[inside]] = outputs[inside]
    return line


@triton.jit
def _kda_verify_kernel(
    query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, out_ptr,
    state_ptr, u_ptr, key_record_ptr, gate_record_ptr, a_log_ptr, bias_ptr,
    slots_ptr, record_slots_ptr, num_rows_ptr, start_ptr, held_ptr, fold_ptr, first_token_ptr,
    lower_bound, num_tokens,
    query_stride, key_stride, value_stride, gate_stride, beta_stride, out_stride, state_stride, u_stride, record_stride,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    BOUNDED: tl.constexpr, HAS_RATE: tl.constexpr, DEFERRED: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    given = tl.load(num_rows_ptr + row).to(tl.int32)
    count = tl.where(slot >= 0, given, 0)
    columns = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    own, known = columns < KEY_DIM, values < VALUE_DIM
    token = first_of_row(first_token_ptr, row, num_tokens, PACKED)
    out = out_ptr + token * out_stride + head * VALUE_DIM + values
    for t in range(count, given if PACKED else num_tokens):
        tl.store(out + t * out_stride, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=known)
    if count == 0:
        return
    record_slot = tl.load(record_slots_ptr + row).to(tl.int64)
    start, held = tl.load(start_ptr + row).to(tl.int32), tl.load(held_ptr + row).to(tl.int32)
    rate = head_rate(a_log_ptr, head, HAS_RATE)
    bias = tl.load(bias_ptr + head * KEY_DIM + columns, mask=own, other=0.0).to(tl.float32)
    place = slot * state_stride + (head * VALUE_DIM + values)[:, None] * KEY_DIM + columns[None, :]
    whole = known[:, None] & own[None, :]
    base = record_slot * record_stride + head * CAPACITY * KEY_DIM
    u_base = u_ptr + record_slot * u_stride + head * CAPACITY * VALUE_DIM
    state = tl.load(state_ptr + place, mask=whole, other=0.0).to(tl.float32)
    if DEFERRED:
        state = folded(
            state, key_record_ptr + base, gate_record_ptr + base, u_base, start, held, columns, values, known,
            bias[None, :], rate, lower_bound, BOUNDED, CAPACITY, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        if (tl.load(fold_ptr + row) != 0) & (held > 0):
            tl.store(state_ptr + place, state.to(state_ptr.dtype.element_ty), mask=whole)
            state = state.to(state_ptr.dtype.element_ty).to(tl.float32)  # as later steps will find it

    scale = 1.0 / tl.sqrt(KEY_DIM * 1.0)
    for t in range(count):
        lane = head * KEY_DIM + columns
        raw_key = tl.load(key_ptr + (token + t) * key_stride + lane, mask=own, other=0.0)
        raw_gate = tl.load(gate_ptr + (token + t) * gate_stride + lane, mask=own, other=0.0)
        query = tl.load(query_ptr + (token + t) * query_stride + lane, mask=own, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + (token + t) * value_stride + head * VALUE_DIM + values, mask=known, other=0.0)
        beta = tl.load(beta_ptr + (token + t) * beta_stride + head).to(tl.float32)
        beta = sigmoid_of(beta)
        key = raw_key.to(tl.float32)
        key = key * (1.0 / tl.sqrt(tl.sum(key * key, axis=0) + 1e-6))
        query = query * (scale / tl.sqrt(tl.sum(query * query, axis=0) + 1e-6))
        decay = log_decay(raw_gate.to(tl.float32) + bias, rate, lower_bound, BOUNDED)
        state = state * exp_of(tl.where(own, decay, 0.0))[None, :]
        correction = beta * (value.to(tl.float32) - tl.sum(state * key[None, :], axis=1))
        state += correction[:, None] * key[None, :]
        output = tl.sum(state * query[None, :], axis=1)
        tl.store(out + t * out_stride, output.to(out_ptr.dtype.element_ty), mask=known)
        new_row = (start + held + t) % CAPACITY
        tl.store(u_base + new_row * VALUE_DIM + values, correction.to(u_ptr.dtype.element_ty), mask=known)
        if tl.program_id(0) == 0:
            tl.store(
                key_record_ptr + base + new_row * KEY_DIM + columns,
                raw_key.to(key_record_ptr.dtype.element_ty),
                mask=own,
            )
            tl.store(
                gate_record_ptr + base + new_row * KEY_DIM + columns,
                raw_gate.to(gate_record_ptr.dtype.element_ty),
                mask=own,
            )


def launch_kda_serial(
    tokens: Tokens, layer: KDALayer, rows: Rows, *, deferred: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The recurrence token by token in one launch, any T. Same contract as `kda_verify`."""
    heads, value_dim = tokens.value.shape[2:]
    out = outputs_for(tokens, rows) if out is None else out
    block_v = min(SERIAL_TILE_V, max(16, triton.next_power_of_2(value_dim)))
    arguments, sizes = verify_arguments(tokens, layer, rows, out)
    _kda_verify_kernel[(triton.cdiv(value_dim, block_v), heads, len(rows.slots))](
        *arguments,
        **sizes,
        DEFERRED=deferred,
        BLOCK_V=block_v,
        num_warps=SERIAL_WARPS,
    )
    return out


def kda_verify(
    tokens: Tokens,
    layer: KDALayer,
    rows: Rows,
    *,
    deferred: bool = True,
    window: Window | None = None,
    max_tokens: int | None = None,
    rows_settled: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of T new tokens a row, with their inputs recorded.

    Args:
        tokens: [B, T, ...] of the layer, or packed [1, N, ...] with `rows.first_token`. Tokens past a row's `num_rows`,
            and packed ones of no row, may hold anything, NaN too.
        layer: checkpoint and records; only the records change, and the checkpoint of rows that fold.
        rows: where each row's state lies. held + T must not exceed the records' capacity.
        deferred: False promises that no row holds records, as after `Rows.current`; kernels then skip looking for them.
        window: the convolution in front, if it is to be done here: `tokens.query`, `key` and `value` are then its
            inputs. Outputs, records and ring are those of `conv_window` and then this without `window`; convolved keys
            and the ring to the bit, the rest but for the order in which a kernel sums squares.
        max_tokens: the most tokens that a row has, where tokens are packed; default the records' capacity. At most 16
            lets the chunk kernel run. A longer row is an error that nothing here can see.
        rows_settled: True promises that the kernel launched right before this call did not write any tensor of `rows`
            (it was the convolution, say), nor the weight and cursor of `window`: reading them may then start before
            that kernel ends.
        out: [B, T, H, V] or [1, N, H, V] to write into, its last two axes contiguous.

    Returns:
        `out`, or new outputs in the dtype of `tokens.value`. Past `num_rows` and for padding rows [B, T, H, V] is zero.
        Packed tokens of no row, and those of padding rows, are left as they are in a given `out` and zero in a new one.

    Raises:
        ValueError: the window does not fit into the records, the ring of `window` is too short, or `out` has another
            shape.

    Source: `kda_verify_ref`.
    """
    capacity = layer.records.capacity
    if rows.first_token is None:
        max_tokens = tokens.key.shape[1]
    elif max_tokens is None:
        max_tokens = capacity
    if max_tokens > capacity:
        raise ValueError(
            f"{max_tokens} tokens do not fit into records of {capacity} rows: later tokens would "
            "overwrite earlier ones of the same step; allocate at least as many rows as a step has tokens, twice as "
            "many to defer folding"
        )
    if out is not None and (out.shape != tokens.value.shape or out.stride()[2:] != (out.shape[3], 1)):
        raise ValueError(
            f"out must be {tuple(tokens.value.shape)} like the values, heads and channels contiguous, got "
            f"{tuple(out.shape)} with strides {out.stride()}: outputs would be written elsewhere"
        )
    if window is not None:
        ring_size = window.ring.shape[1] + (window.spare is not None)
        check_ring(ring_size, window.weight, 1 if rows.first_token is not None else max_tokens)
    if not runs_kernel(layer.checkpoint):
        return _into(out, kda_verify_ref(tokens, layer, rows, window), rows)
    held = 0 if not deferred else capacity - max_tokens if rows.max_held is None else rows.max_held
    in_chunk = max_tokens > SERIAL_TOKENS and max_tokens + held <= MAX_TOKENS
    if window is not None and not (in_chunk and fits_inside(tokens, window, rows, max_tokens)):
        tokens, window, rows_settled = convolved_tokens(tokens, rows, window, conv_window), None, False
    if in_chunk:
        return launch_kda_chunk(
            tokens, layer, rows, deferred=deferred, window=window, rows_settled=rows_settled, out=out
        )
    return launch_kda_serial(tokens, layer, rows, deferred=deferred, out=out)


def fits_inside(tokens: Tokens, window: Window, rows: Rows, max_tokens: int) -> bool:
    """Whether the chunk kernel convolves too. It can if history and tokens are one line of its window, of one dtype,
    and the ring's channels are contiguous; it does where that is no slower, see `FUSE_BELOW`."""
    ring, parts = window.ring, (tokens.query, tokens.key, tokens.value)
    can = SERIAL_TOKENS < max_tokens <= MAX_TOKENS + 1 - window.weight.shape[1]
    can = can and ring.stride()[1:] == (ring.shape[2], 1) and all(x.dtype == ring.dtype for x in parts)
    return can and len(rows.slots) * tokens.value.shape[2] < FUSE_BELOW


def convolved_tokens(tokens: Tokens, rows: Rows, window: Window, convolve: Callable[..., torch.Tensor]) -> Tokens:
    """What `tokens` are after their convolution, by `conv_window` or its reference. Spare rows make it wait for the
    device."""
    parts, slots, ring = [tokens.query, tokens.key, tokens.value], rows.slots, window.ring
    line = torch.cat([x.flatten(2) for x in parts], dim=2)
    if window.spare is None:
        mixed = convolve(line, window.weight, ring, slots, window.cursor, rows.num_rows, rows.first_token)
    else:  # rings of the batch's rows, with their last row
        own, spare = (slots >= 0).nonzero()[:, 0], window.spare[: len(slots)]
        whole = torch.cat([ring[slots.clamp_min(0)], spare[:, None]], dim=1)
        rings, cursor = torch.full_like(slots, -1), torch.full_like(slots, window.weight.shape[1] - 1)
        rings[own] = own
        mixed = convolve(line, window.weight, whole, rings, cursor, rows.num_rows, rows.first_token)
        ring[slots[own]], spare[own] = whole[own, :-1], whole[own, -1]
    sizes = [x.shape[2] * x.shape[3] for x in parts]
    mixed_parts = [m.unflatten(2, x.shape[2:]) for m, x in zip(mixed.split(sizes, dim=2), parts, strict=True)]
    return Tokens(*mixed_parts, tokens.gate, tokens.beta)


def _into(out: torch.Tensor | None, outputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`outputs` in the caller's tensor, if there is one."""
    if out is None:
        return outputs
    if rows.first_token is None:
        return out.copy_(outputs)
    index, inside = runs(rows.first_token, rows.num_rows, outputs.shape[1])
    out[0, index[inside]] = outputs[0, index[inside]].to(out.dtype)
    return out
