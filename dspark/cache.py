"""Key/value storage for a batch whose requests have different lengths.

Slot j of a request holds absolute position j, so a request's rows are the same whatever the batch around it looks
like. Rejected tokens are undone by not committing them: rows past a request's length are never visible, and the next
write overwrites them.
The target's cache and the drafter's context cache are both a `RaggedKV`.
"""

from collections.abc import Sequence

import torch

_GROWTH_ROWS = 256  # capacity grows in steps, so that a long generation does not copy the cache every step


class RaggedKV:
    """Keys and values of `num_layers` layers for B requests.

    `keys[l]`, `values[l]`: [B, capacity, heads, head_dim], zero where nothing was written. `lengths`: [B] int64,
    committed rows of each request; `host_lengths` are the same numbers, so that sizing a step does not wait for the
    device.
    """

    def __init__(self, num_layers: int, batch_size: int, device: torch.device | str) -> None:
        self.keys: list[torch.Tensor | None] = [None] * num_layers
        self.values: list[torch.Tensor | None] = [None] * num_layers
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.host_lengths = [0] * batch_size

    @property
    def batch_size(self) -> int:
        return len(self.host_lengths)

    @property
    def max_length(self) -> int:
        return max(self.host_lengths, default=0)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, row_mask: torch.Tensor | None = None) -> None:
        """Store rows behind the committed ones, without committing them.

        Args:
            layer: index of the layer.
            keys: [B, T, heads, head_dim]; row t of request b goes to slot `lengths[b] + t`.
            values: the same shape except for the head dim.
            row_mask: [B, T] bool, True = store. Rows left out are not written at all, so a rejected row can't be read
                back by mistake.
        """
        num_rows = keys.shape[1]
        self.keys[layer] = _with_capacity(self.keys[layer], keys, self.max_length + num_rows)
        self.values[layer] = _with_capacity(self.values[layer], values, self.max_length + num_rows)
        if row_mask is None:
            request, row = (
                torch.arange(self.batch_size, device=keys.device)[:, None],
                torch.arange(num_rows, device=keys.device),
            )
        else:
            request, row = row_mask.nonzero(as_tuple=True)
            keys, values = keys[request, row], values[request, row]
        self.keys[layer][request, self.lengths[request] + row] = keys  # type: ignore[index]
        self.values[layer][request, self.lengths[request] + row] = values  # type: ignore[index]

    def read(self, layer: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots 0..num_slots-1 as [B, heads, num_slots, head_dim] views."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None, f"layer {layer} was read before anything was written"
        assert values is not None, f"layer {layer} was read before anything was written"
        return keys[:, :num_slots].transpose(1, 2), values[:, :num_slots].transpose(1, 2)

    def advance(self, num_rows: Sequence[int]) -> None:
        """Commit the first `num_rows[b]` rows written behind request b's length; the others count as never written."""
        self.lengths += torch.tensor(list(num_rows), dtype=torch.int64, device=self.lengths.device)
        self.host_lengths = [length + rows for length, rows in zip(self.host_lengths, num_rows, strict=True)]

    def keep(self, requests: Sequence[int]) -> None:
        """Drop every request that is not listed; the rest take the listed order."""
        index = torch.tensor(list(requests), dtype=torch.int64, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.host_lengths = [self.host_lengths[request] for request in requests]
        self.keys = [None if k is None else k[index, : self.max_length] for k in self.keys]
        self.values = [None if v is None else v[index, : self.max_length] for v in self.values]

    def append(self, other: "RaggedKV") -> None:
        """Add the requests of `other` behind this cache's own."""
        self.keys = [_stack(a, b) for a, b in zip(self.keys, other.keys, strict=True)]
        self.values = [_stack(a, b) for a, b in zip(self.values, other.values, strict=True)]
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.host_lengths = self.host_lengths + other.host_lengths


def _with_capacity(store: torch.Tensor | None, rows: torch.Tensor, num_slots: int) -> torch.Tensor:
    """`store` [B, capacity, ...] with room for `num_slots`; zeros, because a masked NaN would still poison
    attention's sum.
    """
    if store is not None and store.shape[1] >= num_slots:
        return store
    capacity = -(-num_slots // _GROWTH_ROWS) * _GROWTH_ROWS
    grown = rows.new_zeros(rows.shape[0], capacity, *rows.shape[2:])
    if store is not None:
        grown[:, : store.shape[1]] = store
    return grown


def _stack(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Concatenate along the request axis, padding the shorter capacity with zeros."""
    if a is None or b is None:
        return b if a is None else a
    num_slots = max(a.shape[1], b.shape[1])
    return torch.cat([_with_capacity(a, a, num_slots)[:, :num_slots], _with_capacity(b, b, num_slots)[:, :num_slots]])
