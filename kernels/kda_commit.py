"""Commit: fold the accepted prefix of the records into the checkpoint, all layers in one launch.

    S_n = S_0 Diag(e^{G_n}) + U_n^T (k^_j e^{G_n - G_j})_j        over the first n records

n = 0 leaves the checkpoint bit-identical (nothing is read or written), and records beyond n are not read. The cost
does not depend on n: the records are a [16, V]^T [16, K] product. The same fold writes the state at a chosen position
    inside the window somewhere else (`Boundary`), which is what a
prefix cache stores; both come from one read of S_0.
Source: `dspark.kernels.kda`, closed form.

Read `kda_fold_ref` first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.kernels.kda import KDALayer, Rows, check_layers, compute_dtype, replay, ring_rows


@dataclass(frozen=True)
class Boundary:
    """A second state to store: after `num_records` [B] records, into `slots` [B] of the checkpoints; a negative slot
    stores nothing.

    Both are int64. The slot may be the row's own destination, when the boundary is where the window ends; both writes
    then have one value.
    """

    slots: torch.Tensor
    num_records: torch.Tensor


def kda_fold_ref(layer: KDALayer, rows: Rows, num_records: torch.Tensor) -> torch.Tensor:
    """The states after `num_records` [B] records from `rows.start`: [B, H, V, K] float32 or float64. Rows without a
    slot read slot 0."""
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


def kda_commit(
    layers: Sequence[KDALayer],
    rows: Rows,
    num_records: torch.Tensor,
    *,
    destinations: torch.Tensor | None = None,
    boundary: Boundary | None = None,
) -> None:
    """Write the state after the accepted records into the checkpoint of every layer.

    Args:
        layers: all layers of one shape; their checkpoints are changed.
        rows: the step's rows; records are read from ring row `rows.start` on, so the held ones count too.
        num_records: [B] int64, records to fold, from the oldest: `rows.held` plus the rows accepted in this step. 0
            changes nothing. At most the ring's capacity.
        destinations: [B] int64 slots to write, where the state moves to another block; default `rows.slots`. Negative
            writes nothing.
        boundary: a state at another position to store as well.

    Raises:
        ValueError: the layers differ in shape, dtype or gate form.

    Source: `kda_commit_ref`.
    """
    if not layers:
        return
    check_layers(layers)
    destinations = rows.slots if destinations is None else destinations
    kda_commit_ref(layers, rows, num_records, destinations, boundary)
