"""Undoing rejected drafts in every kind of state that a target keeps, in one `advance`.

    attention layers       rows of rejected tokens stay behind the committed length and are overwritten (`RaggedKV`)
    KDA layers             one checkpoint and the inputs of recent tokens (`RecurrentState`); rejecting moves a cursor
    short convolutions     a ring of recent inputs; the same cursor movement

`verify` records and never touches what is committed; `advance` is the only writer. A step that keeps no row of a
request changes nothing of it, and state after any sequence of steps is that of decoding the kept tokens one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dspark.cache import RaggedKV
from dspark.kernels.conv_window import conv_window
from dspark.kernels.kda import Gate, KDALayer, LayerTable, Records, Rows, Tokens, Window
from dspark.kernels.kda_chunk import MAX_TOKENS
from dspark.kernels.kda_commit import kda_commit
from dspark.kernels.kda_prefill import kda_prefill
from dspark.kernels.kda_ring import RingCursor
from dspark.kernels.kda_verify import convolved_tokens, kda_verify


def ring_capacity(window: int) -> int:
    """Rows of a ring for steps of up to `window` tokens: a window behind all that a step can start with.

    More is of no use: records that the chunk kernel cannot take together with a window are folded (`RingCursor`).
    """
    return window + max(window, MAX_TOKENS)


@dataclass(frozen=True)
class RecurrentSpec:
    """Sizes and gate of one KDA layer.

    Attributes:
        gate: its gate, which also says the number of heads H and the key dim K.
        value_dim: V.
        channels: C of the short convolution, H (2 K + V) where queries and keys have as many heads as values.
        conv_width: W of the short convolution.
        dtype: of the activations, hence of recorded keys, gates and convolution inputs.
        state_dtype: of checkpoints and corrections.
    """

    gate: Gate
    value_dim: int
    channels: int
    conv_width: int
    dtype: torch.dtype
    state_dtype: torch.dtype

    @property
    def state_shape(self) -> tuple[int, int, int]:
        heads, key_dim = self.gate.dt_bias.shape
        return heads, self.value_dim, key_dim


class RecurrentState:
    """KDA state of B requests, kept in slots.

    A request's slot never moves, so batch rows may be reordered and dropped at will. `layers` and `rings` hold the
    pools [slots, ...] of each KDA layer, `cursor` and `conv_cursor` where each slot is in them, the same for all
    layers.
    """

    def __init__(
        self, specs: Sequence[RecurrentSpec], batch_size: int, device: torch.device | str, *, defer_folds: bool = True
    ) -> None:
        """Zero states for `batch_size` requests.

        Args:
            specs: one per KDA layer, all of one shape.
            batch_size: B.
            device: where the state lies.
            defer_folds: keep accepted records in a ring and rewrite the checkpoint only when it fills; otherwise every
                step rewrites it.
        """
        self.specs, self.defer_folds = tuple(specs), defer_folds
        self.slots = list(range(batch_size))
        self.num_slots = batch_size
        self.window = 0  # most tokens of a step so far; records are allocated for it by the first verification
        self.cursor = RingCursor(batch_size, 2, 1, device)
        self.conv_cursor = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.layers = [
            KDALayer(
                torch.zeros(batch_size, *spec.state_shape, dtype=spec.state_dtype, device=device),
                Records.empty(
                    0, 0, torch.empty(0, *spec.state_shape, dtype=spec.state_dtype, device=device), spec.dtype
                ),
                spec.gate,
            )
            for spec in self.specs
        ]
        self.rings = [
            torch.zeros(batch_size, spec.conv_width - 1, spec.channels, dtype=spec.dtype, device=device)
            for spec in self.specs
        ]
        self._table: LayerTable | None = None  # of `layers`, made when first needed
        self._rows: Rows | None = None  # of the pass under way
        self._conv_rows = self.conv_cursor  # its rows' places in the rings, looked up once for all layers
        self._attended: set[int] = set()  # layers that ran in it
        self._fresh = False  # that pass is a prefill
        self._limits: list[int] = []  # its tokens by row, on the host

    @property
    def device(self) -> torch.device:
        return self.conv_cursor.device

    def _slot_index(self) -> torch.Tensor:
        return torch.tensor(self.slots, dtype=torch.int64, device=self.device)

    def begin(self, num_tokens: int, prompt_lengths: Sequence[int] | None = None) -> None:
        """Start a pass over `num_tokens` tokens a request; with `prompt_lengths`, a prefill that starts from nothing.

        A pass that was not committed counts as having kept nothing.
        """
        self._settle()
        slots = self._slot_index()
        if prompt_lengths is not None:
            self.cursor.reset(slots)
            self._rows = Rows.current(slots, torch.tensor(list(prompt_lengths), dtype=torch.int64, device=self.device))
            self._fresh, self._limits = True, list(prompt_lengths)
            return
        if num_tokens > self.window:
            self._widen(num_tokens)
        num_rows, self._limits = torch.full_like(slots, num_tokens), [num_tokens] * len(self.slots)
        self._rows = self.cursor.plan(slots, num_rows) if self.defer_folds else Rows.current(slots, num_rows)
        self._conv_rows = self.conv_cursor[slots]
        self._attended.clear()

    def _settle(self) -> None:
        """Close a pass that was abandoned: what it recorded is dropped; layers it did not reach fold too."""
        rows = self._rows
        if rows is not None and not self._fresh and self.defer_folds:
            behind = [layer for index, layer in enumerate(self.layers) if index not in self._attended]
            if behind:
                kda_commit(behind, rows, torch.where(rows.fold, rows.held, 0))
            self.cursor.advance(rows, torch.zeros_like(rows.num_rows))
        self._rows, self._fresh = None, False

    def convolve(self, layer: int, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The short convolution of this pass: inputs [B, T, C] and weight [C, W] to [B, T, C]."""
        assert self._rows is not None, "a layer ran outside a pass: begin() comes first"
        rows, ring = self._rows, self.rings[layer]
        if not self._fresh:
            return conv_window(inputs, weight, ring, rows.slots, self._conv_rows, rows.num_rows)
        history = weight.shape[1] - 1
        scratch = inputs.new_zeros(len(inputs), history + inputs.shape[1], inputs.shape[2])
        local = torch.arange(len(inputs), device=self.device)
        start = torch.full_like(local, history)
        mixed = conv_window(inputs, weight, scratch, local, start, rows.num_rows)
        last = rows.num_rows[:, None] + torch.arange(history, device=self.device)
        ring[rows.slots, :history] = scratch[local[:, None], last]
        return mixed

    def attend(self, layer: int, tokens: Tokens, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs [B, T, H, V] of this pass's tokens; inputs are recorded, or the state written if this is a
        prefill. With `weight` [C, W], queries, keys and values are the inputs of `convolve`, which then is done here:
        where the kernels allow, in the same launch."""
        assert self._rows is not None, "a layer ran outside a pass: begin() comes first"
        rows, state = self._rows, self.layers[layer]
        if not self._fresh:
            self._attended.add(layer)
            window = None if weight is None else Window(weight, self.rings[layer], self._conv_rows)
            return kda_verify(tokens, state, rows, deferred=self.defer_folds, window=window)
        if weight is not None:
            window = Window(weight, self.rings[layer], rows.start)
            tokens = convolved_tokens(tokens, rows, window, lambda line, taps, *_: self.convolve(layer, line, taps))
        zero = torch.zeros_like(state.checkpoint[:1]).expand(len(rows.slots), -1, -1, -1)
        outputs, final = kda_prefill(tokens, state.gate, zero, rows.num_rows)
        state.checkpoint[rows.slots] = final.to(state.checkpoint.dtype)
        return outputs

    def commit(self, num_rows: Sequence[int]) -> None:
        """Keep the first `num_rows[b]` tokens of the pass for request b.

        Raises:
            ValueError: there is no pass to commit, or a number lies outside 0..T of its row.
        """
        if self._rows is None:
            raise ValueError(
                "there is no pass to commit: it was committed already, or nothing was verified since; "
                "committing twice would advance the state twice"
            )
        for row, (count, limit) in enumerate(zip(num_rows, self._limits, strict=True)):
            if not 0 <= count <= limit or (self._fresh and count != limit):
                expected = f"{limit}, the whole prompt" if self._fresh else f"within 0..{limit}"
                raise ValueError(
                    f"row {row} commits {count} tokens, expected {expected}: the state holds no other prefix"
                )
        counts = torch.tensor(list(num_rows), dtype=torch.int64, device=self.device)
        rows, history = self._rows, self.specs[0].conv_width - 1
        if self._fresh:
            self.conv_cursor[rows.slots] = history % self.rings[0].shape[1]
        else:
            self.conv_cursor[rows.slots] = (self.conv_cursor[rows.slots] + counts) % self.rings[0].shape[1]
            if self.defer_folds:
                self.cursor.advance(rows, counts)
            else:
                kda_commit(self._layer_table(), rows, counts)
        self._rows, self._fresh = None, False

    def fold(self) -> None:
        """Write the held records of every request into its checkpoint, so that the checkpoint alone is its state."""
        self._settle()
        slots = self._slot_index()
        rows = self.cursor.plan(slots, torch.zeros_like(slots))
        kda_commit(self._layer_table(), rows, rows.held)
        self.cursor.reset(slots)

    def _layer_table(self) -> LayerTable:
        if self._table is None:
            self._table = LayerTable(self.layers)
        return self._table

    def histories(self, layer: int) -> torch.Tensor:
        """[B, W - 1, C]: the last convolution inputs of each request, oldest first."""
        slots, capacity = self._slot_index(), self.rings[layer].shape[1]
        history = self.specs[layer].conv_width - 1
        index = (self.conv_cursor[slots, None] + torch.arange(-history, 0, device=self.device)) % capacity
        return self.rings[layer][slots[:, None], index]

    def _widen(self, window: int) -> None:
        """Make room for steps of `window` tokens."""
        self.fold()
        capacity = ring_capacity(window) if self.defer_folds else window
        self._allocate(self.num_slots, window, capacity)

    def _allocate(self, num_slots: int, window: int, capacity: int) -> None:
        """New pools with the present requests' folded state in them, at the same slots."""
        slots = self._slot_index()
        for index, spec in enumerate(self.specs):
            histories, layer = self.histories(index), self.layers[index]
            checkpoint = torch.zeros(num_slots, *spec.state_shape, dtype=spec.state_dtype, device=self.device)
            checkpoint[slots] = layer.checkpoint[slots]
            records = Records.empty(num_slots if window else 0, capacity, checkpoint, spec.dtype)
            self.layers[index] = replace(layer, checkpoint=checkpoint, records=records)
            rows = spec.conv_width - 1 + window
            self.rings[index] = torch.zeros(num_slots, rows, spec.channels, dtype=spec.dtype, device=self.device)
            self.rings[index][slots, : spec.conv_width - 1] = histories
        self.num_slots, self.window, self._table = num_slots, window, None
        self.cursor = RingCursor(num_slots, max(capacity, 2 * window, 2), max(window, 1), self.device)
        first = (self.specs[0].conv_width - 1) % self.rings[0].shape[1]
        self.conv_cursor = torch.full((num_slots,), first, dtype=torch.int64, device=self.device)

    def keep(self, requests: Sequence[int]) -> None:
        """Drop every request that is not listed; their slots become free, nothing is copied."""
        self._settle()
        self.slots = [self.slots[request] for request in requests]

    def append(self, other: "RecurrentState") -> None:
        """Add the requests of `other` behind this state's own, in free slots."""
        self._settle()
        other.fold()
        free = sorted(set(range(self.num_slots)) - set(self.slots))
        missing = len(other.slots) - len(free)
        if missing > 0:
            self.fold()
            free += range(self.num_slots, self.num_slots + missing)
            self._allocate(self.num_slots + missing, self.window, self.layers[0].records.capacity)
        taken = free[: len(other.slots)]
        into = torch.tensor(taken, dtype=torch.int64, device=self.device)
        source = other._slot_index()
        self.cursor.reset(into)  # a freed slot still has the cursor of its last request
        self.conv_cursor[into] = (self.specs[0].conv_width - 1) % self.rings[0].shape[1]
        for index, spec in enumerate(self.specs):
            self.layers[index].checkpoint[into] = other.layers[index].checkpoint[source]
            self.rings[index][into, : spec.conv_width - 1] = other.histories(index)
        self.slots = self.slots + taken


class HybridCache(RaggedKV):
    """Cache of a target with attention and KDA layers: one `advance` commits, and thereby undoes, both.

    Keys and values of KDA layers stay None. `recurrent` holds their state, numbered by KDA layer.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        device: torch.device | str,
        specs: Sequence[RecurrentSpec],
        recurrent_layers: Sequence[int],
        *,
        defer_folds: bool = True,
    ) -> None:
        """Empty cache.

        Args:
            num_layers: decoder layers of the target, of both kinds.
            batch_size: B.
            device: where it lies.
            specs: one per KDA layer.
            recurrent_layers: which decoder layers those are.
            defer_folds: see `RecurrentState`.
        """
        super().__init__(num_layers, batch_size, device)
        self.recurrent_layers = tuple(recurrent_layers)
        self.recurrent = RecurrentState(specs, batch_size, device, defer_folds=defer_folds)

    def advance(self, num_rows: Sequence[int]) -> None:
        """Keep the first `num_rows[b]` rows of the last pass for request b; the others are undone everywhere."""
        self.recurrent.commit(num_rows)
        super().advance(num_rows)

    def keep(self, requests: Sequence[int]) -> None:
        """Drop every request that is not listed; the rest take the listed order."""
        self.recurrent.keep(requests)
        super().keep(requests)

    def append(self, other: RaggedKV) -> None:
        """Add the requests of `other`, a cache of the same target, behind this cache's own."""
        assert isinstance(other, HybridCache), f"a {type(other).__name__} has no recurrent state to append"
        self.recurrent.append(other.recurrent)
        super().append(other)
