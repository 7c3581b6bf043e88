"""Key/value storage for a batch whose requests have different lengths.

Slot j of a request holds absolute position j, so a request's rows are the same whatever the batch around it looks
like. Rejected tokens are undone by not committing them: rows past a request's length are never visible, and the next
write overwrites them.
The target's cache and the drafter's context cache are both a `RaggedKV`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_GROWTH_ROWS = 256  # capacity grows in steps, so that a long generation does not copy the cache every step


class Place(NamedTuple):
    """Which rows of a pass are stored, and where: [N] int64 each; [B, 1], [B, T] and None where all rows are."""

    request: torch.Tensor
    slot: torch.Tensor
    row: torch.Tensor | None


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

    def place(self, num_rows: Sequence[int]) -> Place:
        """Where the first `num_rows[b]` of T = max(num_rows) rows go, row t to slot `lengths[b] + t`; for all layers of
        a pass. Rows left out are not written at all, so a rejected row can't be read back by mistake.
        """
        longest, device = max(num_rows), self.lengths.device
        if min(num_rows) == longest:
            request = torch.arange(self.batch_size, device=device)[:, None]
            return Place(request, self.lengths[:, None] + torch.arange(longest, device=device), None)
        requests, rows = (np.arange(longest) < np.array(num_rows)[:, None]).nonzero()
        index = np.stack([requests, np.array(self.host_lengths)[requests] + rows, rows])
        return Place(*torch.from_numpy(index).to(device, non_blocking=True))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, place: Place) -> None:
        """Store rows behind the committed ones, without committing them.

        Args:
            layer: index of the layer.
            keys: [B, T, heads, head_dim].
            values: the same shape except for the head dim.
            place: which rows, and their slots.
        """
        for stores, rows in ((self.keys, keys), (self.values, values)):
            store = stores[layer] = _with_capacity(stores[layer], rows, self.max_length + rows.shape[1])
            store[place.request, place.slot] = rows if place.row is None else rows[place.request, place.row]

    def read(self, layer: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots 0..num_slots-1 as [B, heads, num_slots, head_dim] views."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None, f"layer {layer} was read before anything was written"
        assert values is not None, f"layer {layer} was read before anything was written"
        return keys[:, :num_slots].transpose(1, 2), values[:, :num_slots].transpose(1, 2)

    def advance(self, num_rows: Sequence[int]) -> None:
        """Commit the first `num_rows[b]` rows written behind request b's length; the others count as never written."""
        self.host_lengths = [length + rows for length, rows in zip(self.host_lengths, num_rows, strict=True)]
        self.lengths = torch.tensor(self.host_lengths, dtype=torch.int64).to(self.lengths.device, non_blocking=True)

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
