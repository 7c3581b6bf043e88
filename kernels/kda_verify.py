"""Verify: the outputs of T new tokens from the checkpoint, recording their inputs and leaving the checkpoint as it is.

With held records (a deferred fold) the state S_h after them is rebuilt on the way; where `Rows.fold` says so it is
also written to the checkpoint, which is the only write to a checkpoint here. The T tokens then run from S_h by the
recurrence of `dspark.kernels.kda`, and (u, k, gate) of each is recorded behind the held ones. The rows that are read
(held records) and written (new ones) never overlap, so that thread blocks need no order.

Read `kda_verify_ref` first.
"""

import torch

from dspark.kernels.kda import KDALayer, Rows, Tokens, kda_scan, ring_rows
from dspark.kernels.kda_commit import kda_fold_ref


def kda_verify_ref(tokens: Tokens, layer: KDALayer, rows: Rows) -> torch.Tensor:
    """The definition, in PyTorch. Same contract as `kda_verify`."""
    num_tokens, records = tokens.key.shape[1], layer.records
    state = kda_fold_ref(layer, rows, rows.held)
    active = rows.slots >= 0
    inside = (torch.arange(num_tokens, device=active.device) < rows.num_rows[:, None]) & active[:, None]
    folded = (active & rows.fold & (rows.held > 0)).nonzero()[:, 0]
    layer.checkpoint[rows.slots[folded]] = state[folded].to(layer.checkpoint.dtype)
    outputs, corrections, _ = kda_scan(tokens, layer.gate, state)
    row, t = inside.nonzero(as_tuple=True)
    index = ring_rows(rows.start + rows.held, num_tokens, records.capacity)[row, t]
    for store, new in ((records.correction, corrections), (records.key, tokens.key), (records.gate, tokens.gate)):
        store[rows.record_slots[row], :, index] = new[row, t].to(store.dtype)
    return torch.where(inside[:, :, None, None], outputs, 0).to(tokens.value.dtype)


def kda_verify(tokens: Tokens, layer: KDALayer, rows: Rows) -> torch.Tensor:
    """Outputs of T new tokens a row, with their inputs recorded.

    Args:
        tokens: [B, T, ...] of the layer; tokens past a row's `num_rows` may hold anything, NaN too.
        layer: checkpoint and records; only the records change, and the checkpoint of rows that fold.
        rows: where each row's state lies. held + T must not exceed the records' capacity.

    Returns:
        [B, T, H, V] in the dtype of `tokens.value`; zero past `num_rows` and for padding rows.

    Raises:
        ValueError: the window does not fit into the records.

    Source: `kda_verify_ref`.
    """
    num_tokens = tokens.key.shape[1]
    if num_tokens > layer.records.capacity:
        raise ValueError(
            f"{num_tokens} tokens do not fit into records of {layer.records.capacity} rows: later tokens would "
            f"overwrite earlier ones of the same step; "
            "allocate at least as many rows as a step has tokens, twice as many to defer folding"
        )
    return kda_verify_ref(tokens, layer, rows)
