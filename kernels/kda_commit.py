"""Commit: fold the accepted prefix of the records into the checkpoint, all layers in one launch.

    S_n = S_0 Diag(e^{G_n}) + U_n^T (k^_j e^{G_n - G_j})_j        over the first n records

n = 0 leaves the checkpoint bit-identical (nothing is read or written), and records beyond n are not read. The cost
does not depend on n: the records are a [16, V]^T [16, K] product. The same fold writes the state at a chosen position
inside the window somewhere else (`Boundary`), which is what a prefix cache stores; both come from one read of S_0.
Source: `dspark.kernels.kda`, closed form.

Read `kda_fold_ref` first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.kernels import tl, triton
from dspark.kernels.kda import KDALayer, LayerTable, Rows, compute_dtype, replay, ring_rows, runs_kernel
from dspark.kernels.kda_device import fold_streamed, folded, head_rate, prefetch


@dataclass(frozen=True)
class Boundary:
    """A second state to store: after `num_records` [B] records, into `slots` [B] of the checkpoints; both int64.

    A negative slot stores nothing. The slot may be the row's own destination, when the boundary is where the window
    ends; both writes then have one value.
    """

    slots: torch.Tensor
    num_records: torch.Tensor


def check_block_size(block_size: int, window: int) -> None:
    """Raise ValueError where a step of `window` tokens could cross two boundaries of blocks."""
    if block_size < window:
        raise ValueError(
            f"block_size={block_size} is smaller than a step of {window} tokens: one step could cross two boundaries, "
            f"and the state at the first would be lost; use blocks of at least {window} tokens, or fewer drafts"
        )


def block_boundary(
    computed: torch.Tensor, num_accepted: torch.Tensor, block_slots: torch.Tensor, block_size: int
) -> Boundary:
    """The prefix-cache boundary that a step crosses, if it does.

    Args:
        computed: [B] int64, tokens of each row before the step.
        num_accepted: [B] int64, tokens that the step keeps.
        block_slots: [B] int64, slot of the block that `computed` lies in.
        block_size: tokens of a block, at least those of a step (`check_block_size`).

    Returns:
        For rows that reach the next multiple m of `block_size`: the slot, and the records between `computed` and m.
        For the others a negative slot. Records that were held before the step come on top of the count.
    """
    distance = block_size - computed % block_size
    return Boundary(torch.where(num_accepted >= distance, block_slots, -1), distance)


def kda_fold_ref(layer: KDALayer, rows: Rows, num_records: torch.Tensor) -> torch.Tensor:
    """The states after `num_records` [B] records from `rows.start`: [B, H, V, K] float32 or float64.

    Rows without a slot read slot 0; their result means nothing.
    """
    slots, record_slots = rows.slots.clamp_min(0), rows.record_slots.clamp_min(0)
    index = ring_rows(rows.start, layer.records.capacity, layer.records.capacity)
    counts = (torch.arange(index.shape[1], device=index.device) < num_records[:, None])[:, None, :, None]
    dtype = compute_dtype(layer.checkpoint, layer.records.key)
    correction, key, raw = (
        torch.where(counts, r[record_slots[:, None], :, index].transpose(1, 2).to(dtype), 0)
        for r in (layer.records.correction, layer.records.key, layer.records.gate)
    )
    log_decay = torch.where(counts, layer.gate.log_decay(raw.transpose(1, 2)).transpose(1, 2), 0)
    return replay(layer.checkpoint[slots].to(dtype), correction, key, log_decay)


def kda_commit_ref(
    layers: Sequence[KDALayer],
    rows: Rows,
    num_records: torch.Tensor,
    destinations: torch.Tensor,
    boundary: Boundary | None,
) -> None:
    """The definition, in PyTorch. Same contract as `kda_commit`."""
    for layer in layers:
        kept = [(rows.slots, destinations, num_records)]
        kept += [] if boundary is None else [(rows.slots, boundary.slots, boundary.num_records)]
        written = []
        for (
            slots,
            into,
            count,
        ) in kept:  # both are computed before either is written: a row may overwrite another's source
            row = ((slots >= 0) & (into >= 0) & ((count > 0) | (into != slots))).nonzero()[:, 0]
            state = torch.where(
                (count > 0)[row, None, None, None],
                kda_fold_ref(layer, rows, count)[row].to(layer.checkpoint.dtype),
                layer.checkpoint[slots[row]],
            )
            written.append((into[row], state))
        for into, state in written:
            layer.checkpoint[into] = state


# Value channels of a program, warps, most registers of a thread: all of a head of 128, so that the weights of records
# are worked out once. STREAMED channels of it are in registers at a time.
TILE, STREAMED = (128, 4, 128), 32


@triton.jit
def _kda_commit_kernel(
    state_ptr,
    correction_ptr,
    key_ptr,
    gate_ptr,
    a_log_ptr,
    bias_ptr,
    offsets_ptr,
    slots_ptr,
    record_slots_ptr,
    start_ptr,
    count_ptr,
    into_ptr,
    boundary_into_ptr,
    boundary_count_ptr,
    lower_bound,
    state_stride,
    correction_stride,
    record_stride,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_RATE: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr,
):
    row, layer, head = tl.program_id(1), tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    slot = tl.load(slots_ptr + row).to(tl.int64)  # int64: slots times a state's size overflow int32
    into = tl.load(into_ptr + row).to(tl.int64)
    count = tl.load(count_ptr + row).to(tl.int32)
    writes = (into >= 0) & ((count > 0) | (into != slot))
    boundary_into, boundary_count = into * 0 - 1, count * 0
    if HAS_BOUNDARY:
        boundary_into = tl.load(boundary_into_ptr + row).to(tl.int64)
        boundary_count = tl.load(boundary_count_ptr + row).to(tl.int32)
    if (slot < 0) | ((writes == 0) & (boundary_into < 0)):
        return
    columns = tl.arange(0, BLOCK_K)
    first_value = tl.program_id(0) * BLOCK_V
    values = first_value + tl.arange(0, BLOCK_V)
    tile = values[:, None] * KEY_DIM + columns[None, :]
    known = values < VALUE_DIM
    inside = known[:, None] & (columns < KEY_DIM)[None, :]
    SPAN: tl.constexpr = 128 // (state_ptr.dtype.element_ty.primitive_bitwidth // 8)  # elements of a cache line
    record_slot = tl.load(record_slots_ptr + row).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int32)
    # Each layer lies where it was allocated; the table holds its distance from layer 0 in elements.
    table = offsets_ptr + layer * 6
    state_at, u_at, key_at, gate_at = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    if ALIGNED:  # or every access would be of one element
        state_at, u_at = tl.multiple_of(state_at, 16), tl.multiple_of(u_at, 16)
        key_at, gate_at = tl.multiple_of(key_at, 16), tl.multiple_of(gate_at, 16)
    states = state_ptr + state_at + head * VALUE_DIM * KEY_DIM
    corrections = correction_ptr + u_at + record_slot * correction_stride + head * CAPACITY * VALUE_DIM
    keys = key_ptr + key_at + record_slot * record_stride + head * CAPACITY * KEY_DIM
    gates = gate_ptr + gate_at + record_slot * record_stride + head * CAPACITY * KEY_DIM
    # The states are on their way while weights are worked out.
    line = first_value * KEY_DIM + tl.arange(0, BLOCK_V * BLOCK_K // SPAN) * SPAN
    prefetch(states + slot * state_stride + tl.minimum(line, VALUE_DIM * KEY_DIM - 1))
    rate = head_rate(a_log_ptr + tl.load(table + 4), head, HAS_RATE)
    sixteen = tl.arange(0, 16)[:, None]
    bias = tl.load(
        bias_ptr + tl.load(table + 5) + head * KEY_DIM + sixteen * 0 + columns[None, :],
        mask=(sixteen >= 0) & (columns < KEY_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    source = states + slot * state_stride
    target = states + into * state_stride
    if HAS_BOUNDARY:
        state = tl.load(source + tile, mask=inside, other=0.0).to(tl.float32)
        if boundary_into >= 0:
            snapshot = folded(
                state, keys, gates, corrections, start, boundary_count, columns, values, known, bias, rate, lower_bound,
                BOUNDED, CAPACITY, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            tl.store(states + boundary_into * state_stride + tile, snapshot.to(state_ptr.dtype.element_ty), mask=inside)
        if writes:
            final = folded(
                state, keys, gates, corrections, start, count, columns, values, known, bias, rate, lower_bound,
                BOUNDED, CAPACITY, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            tl.store(target + tile, final.to(state_ptr.dtype.element_ty), mask=inside)
    elif count > 0:
        fold_streamed(
            source + first_value * KEY_DIM, target + first_value * KEY_DIM, keys, gates, corrections + first_value,
            start, count, columns, VALUE_DIM - first_value, bias, rate, lower_bound, BOUNDED, CAPACITY, KEY_DIM,
            VALUE_DIM, BLOCK_V, TILE_V,
        )  # fmt: skip
    else:  # the state moves as it is
        for begin in tl.range(0, BLOCK_V * BLOCK_K, 1024, num_stages=1):
            element = first_value * KEY_DIM + begin + tl.arange(0, 1024)
            own_element = element < tl.minimum(VALUE_DIM, first_value + BLOCK_V) * KEY_DIM
            tl.store(target + element, tl.load(source + element, mask=own_element, other=0.0), mask=own_element)


def launch_kda_commit(
    table: LayerTable, rows: Rows, num_records: torch.Tensor, destinations: torch.Tensor, boundary: Boundary | None
) -> None:
    """One launch of the kernel for all layers, wherever Triton runs. Same contract as `kda_commit`."""
    first, records = table.layers[0], table.layers[0].records
    _, heads, value_dim, key_dim = first.checkpoint.shape
    tile_v, num_warps, registers = TILE
    block_v = min(tile_v, max(16, triton.next_power_of_2(value_dim)))
    grid = (triton.cdiv(value_dim, block_v), len(rows.slots), len(table.layers) * heads)
    if not (grid[1] and records.capacity):
        return
    unused = rows.slots
    _kda_commit_kernel[grid](
        first.checkpoint,
        records.correction,
        records.key,
        records.gate,
        first.gate.dt_bias if first.gate.a_log is None else first.gate.a_log,
        first.gate.dt_bias,
        table.offsets,
        rows.slots,
        rows.record_slots,
        rows.start,
        num_records,
        destinations,
        unused if boundary is None else boundary.slots,
        unused if boundary is None else boundary.num_records,
        first.gate.lower_bound or 0.0,
        first.checkpoint.stride(0),
        records.correction.stride(0),
        records.key.stride(0),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CAPACITY=records.capacity,
        BOUNDED=first.gate.lower_bound is not None,
        HAS_RATE=first.gate.a_log is not None,
        HAS_BOUNDARY=boundary is not None,
        ALIGNED=table.aligned,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v,
        TILE_V=min(STREAMED, block_v),
        num_warps=num_warps,
        num_stages=1,
        **({} if registers is None else {"maxnreg": registers}),
    )


def kda_commit(
    layers: Sequence[KDALayer] | LayerTable,
    rows: Rows,
    num_records: torch.Tensor,
    *,
    destinations: torch.Tensor | None = None,
    boundary: Boundary | None = None,
) -> None:
    """Write the state after the accepted records into the checkpoint of every layer.

    Args:
        layers: all layers of one shape, at least one; their checkpoints are changed. A `LayerTable` spares the
            check and the copy of addresses in every step.
        rows: the step's rows; records are read from ring row `rows.start` on, so the held ones count too.
        num_records: [B] int64, records to fold, from the oldest: `rows.held` plus the rows accepted in this step. 0
            changes nothing. At most the ring's capacity.
        destinations: [B] int64 slots to write, where the state moves to another block; default `rows.slots`. Negative
            writes nothing. Neither these nor the boundary's slots may be another row's slot.
        boundary: a state at another position to store as well.

    Raises:
        ValueError: the layers differ in shape, dtype or gate form.

    Source: `kda_commit_ref`.
    """
    table = layers if isinstance(layers, LayerTable) else LayerTable(layers)
    destinations = rows.slots if destinations is None else destinations
    if runs_kernel(table.layers[0].checkpoint):
        launch_kda_commit(table, rows, num_records, destinations, boundary)
    else:
        kda_commit_ref(table.layers, rows, num_records, destinations, boundary)
