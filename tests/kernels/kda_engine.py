"""A miniature engine around the KDA kernels: requests in slots, steps of drafts, acceptance, reuse, preemption,
snapshots.

Every request follows a fixed line of tokens; what is drafted beyond the accepted part of a step is other, random
tokens. Beside each request stands the state and window that one-token-at-a-time recurrence gives it.
"""

import torch
from kda_cases import DEVICE, close, cut, draw, pad, plain, random_layer, random_tokens

from dspark.kernels.conv_window import conv_window
from dspark.kernels.kda import KDALayer, Rows, Tokens, kda_scan
from dspark.kernels.kda_commit import Boundary, kda_commit
from dspark.kernels.kda_ring import RingCursor
from dspark.kernels.kda_verify import kda_verify

HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 6, 5, 4
CHANNELS = 3


class Request:
    """A line of tokens, how far it is accepted, and the oracle's state there."""

    def __init__(self, seed: int, gates, dtype) -> None:
        self.line = random_tokens(1, 600, HEADS, KEY_DIM, VALUE_DIM, seed=seed, dtype=dtype)
        self.inputs = draw(1, 600, CHANNELS, seed=seed, dtype=dtype)
        self.gates, self.accepted = gates, 0
        self.states = [torch.zeros(1, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float64) for _ in gates]

    def accept(self, count: int) -> None:
        for layer, gate in enumerate(self.gates):
            tokens = cut(self.line, 0, self.accepted, self.accepted + count)
            exact = Tokens(*(x.double() for x in vars(tokens).values()))
            self.states[layer] = plain(exact, gate, self.states[layer], count)[1]
        self.accepted += count

    def history(self) -> torch.Tensor:
        padded = torch.cat([self.inputs.new_zeros(1, WIDTH - 1, CHANNELS), self.inputs], 1)
        return padded[0, self.accepted : self.accepted + WIDTH - 1]


class Engine:
    """Slots, layers and cursors; `deferred` folds only when the ring fills, otherwise every step folds."""

    def __init__(self, num_slots=4, num_layers=2, window=5, capacity=None, deferred=True, **layer) -> None:
        self.window, self.deferred = window, deferred
        capacity = capacity or (2 * window if deferred else window)
        self.layers = [
            random_layer(num_slots, HEADS, KEY_DIM, VALUE_DIM, capacity, seed=7 * i, **layer) for i in range(num_layers)
        ]
        self.dtype = self.layers[0].records.key.dtype
        self.cursor = RingCursor(num_slots, capacity if deferred else 2 * window, window, DEVICE)
        self.conv = torch.full((num_slots, WIDTH - 1 + window, CHANNELS), float("nan"), dtype=self.dtype)
        self.conv_cursor = torch.zeros(num_slots, dtype=torch.int64)
        self.weight = draw(CHANNELS, WIDTH, seed=3, dtype=torch.float64)
        self.requests: dict[int, Request] = {}
        self.seed = 100
        self.error = 1e-12

    @property
    def gates(self):
        return [layer.gate for layer in self.layers]

    def admit(self, slot: int, request: Request | None = None) -> None:
        """Prefill into a slot whatever it held before: three tokens of a new request, or all accepted tokens of a
        resumed one."""
        self.seed += 1
        if request is None:
            request = Request(self.seed, self.gates, self.dtype)
            request.accept(3)
        for layer in self.layers:
            tokens = cut(request.line, 0, 0, request.accepted)
            start = torch.zeros(1, HEADS, VALUE_DIM, KEY_DIM, dtype=layer.checkpoint.dtype)
            layer.checkpoint[slot] = kda_scan(tokens, layer.gate, start)[2][0, -1].to(layer.checkpoint.dtype)
        self.conv[slot] = float("nan")
        self.conv[slot, : WIDTH - 1] = request.history()
        self.conv_cursor[slot] = WIDTH - 1
        self.cursor.reset(torch.tensor([slot]))
        self.requests[slot] = request

    def rows(self, slots, num_rows) -> Rows:
        slots, num_rows = torch.tensor(slots), torch.tensor(num_rows)
        return self.cursor.plan(slots, num_rows) if self.deferred else Rows.current(slots, num_rows)

    def step(self, slots, num_rows, accepted, *, boundary=None) -> None:
        """One step for the rows in `slots` (-1: padding), checked against the oracle.

        `boundary`: {row: (slot, position in the window)} to snapshot on the way.
        """
        self.seed += 1
        num_tokens = max(num_rows)
        rows = self.rows(slots, num_rows)
        untouched = [layer.checkpoint.clone() for layer in self.layers]
        for index, layer in enumerate(self.layers):
            tokens = self.window_tokens(index, slots, num_rows, accepted)
            outputs = kda_verify(pad(tokens, num_tokens), layer, rows)
            folds = set(rows.slots[rows.fold & (rows.held > 0)].tolist())
            for slot in set(range(len(layer.checkpoint))) - folds:
                assert torch.equal(layer.checkpoint[slot], untouched[index][slot]), "verification changed a checkpoint"
            self.check_outputs(index, slots, num_rows, tokens, outputs)
        self.convolve(slots, num_rows, accepted)
        self.poison_rejected(rows, accepted)
        self.commit(rows, accepted, boundary or {})
        for slot, count in zip(slots, accepted, strict=True):
            if slot >= 0:
                self.requests[slot].accept(count)
        self.check(slots)

    def window_tokens(self, layer, slots, num_rows, accepted):
        pieces = []
        for row, (slot, n, a) in enumerate(zip(slots, num_rows, accepted, strict=True)):
            other = random_tokens(1, n, HEADS, KEY_DIM, VALUE_DIM, seed=self.seed * 1000 + row, dtype=self.dtype)
            if slot >= 0:
                request = self.requests[slot]
                line = cut(request.line, 0, request.accepted, request.accepted + a)
                other = Tokens(
                    *(
                        torch.cat([x, y[:, a:]], 1)
                        for x, y in zip(vars(line).values(), vars(other).values(), strict=True)
                    )
                )
            pieces.append(other)
        return pieces

    def check_outputs(self, layer, slots, num_rows, tokens, outputs) -> None:
        assert outputs.isfinite().all()
        for row, (slot, n) in enumerate(zip(slots, num_rows, strict=True)):
            assert not outputs[row, n if slot >= 0 else 0 :].any()
            if slot >= 0 and n:
                exact = Tokens(*(x.double() for x in vars(tokens[row]).values()))
                expected = kda_scan(exact, self.gates[layer], self.requests[slot].states[layer])[0]
                close(outputs[row, :n], expected[0], self.error)

    def convolve(self, slots, num_rows, accepted) -> None:
        inputs = torch.full((len(slots), max(num_rows), CHANNELS), float("nan"), dtype=self.dtype)
        expected = {}
        for row, (slot, n, a) in enumerate(zip(slots, num_rows, accepted, strict=True)):
            inputs[row, :n] = draw(n, CHANNELS, seed=self.seed + row, dtype=self.dtype)
            if slot >= 0 and n:
                request = self.requests[slot]
                inputs[row, :a] = request.inputs[0, request.accepted : request.accepted + a]
                line = torch.cat([request.history(), inputs[row, :n]]).double()
                window = line.unfold(0, WIDTH, 1)  # [n, C, W]
                expected[row] = torch.nn.functional.silu((window * self.weight).sum(-1))
        cursor = torch.where(torch.tensor(slots) >= 0, self.conv_cursor[torch.tensor(slots).clamp_min(0)], 0)
        mixed = conv_window(inputs, self.weight, self.conv, torch.tensor(slots), cursor, torch.tensor(num_rows))
        for row, (slot, n, a) in enumerate(zip(slots, num_rows, accepted, strict=True)):
            if slot >= 0:
                if n:
                    close(mixed[row, :n], expected[row], self.error)
                rejected = (cursor[row] + torch.arange(a, n)) % self.conv.shape[1]
                self.conv[slot, rejected] = float("nan")
                self.conv_cursor[slot] = (cursor[row] + a) % self.conv.shape[1]

    def poison_rejected(self, rows, accepted) -> None:
        """What was recorded for rejected tokens must never be read again."""
        for row, slot in enumerate(rows.slots.tolist()):
            if slot >= 0:
                first = int(rows.start[row] + rows.held[row])
                for layer in self.layers:
                    index = [
                        (first + i) % layer.records.capacity for i in range(accepted[row], int(rows.num_rows[row]))
                    ]
                    for store in (layer.records.correction, layer.records.key, layer.records.gate):
                        store[slot, :, index] = float("nan")

    def commit(self, rows, accepted, boundary) -> None:
        counts = torch.tensor(accepted)
        into = torch.tensor([boundary.get(row, (-1, 0))[0] for row in range(len(accepted))])
        at = torch.tensor([boundary.get(row, (-1, 0))[1] for row in range(len(accepted))])
        if not self.deferred:
            kda_commit(self.layers, rows, counts, boundary=Boundary(into, at) if boundary else None)
            return
        if boundary:  # the checkpoint of a row that folded at its start is held records further
            behind = torch.where(rows.fold, 0, rows.held)
            start = torch.where(rows.fold, rows.start + rows.held, rows.start)
            shifted = Rows(rows.slots, rows.record_slots, rows.num_rows, start, behind, rows.fold)
            kda_commit(self.layers, shifted, behind * 0, boundary=Boundary(into, behind + at))
        self.cursor.advance(rows, counts)

    def current(self, layer: KDALayer, slot: int) -> torch.Tensor:
        """The state of a slot with what it holds in the ring folded in, without writing it."""
        rows = self.rows([slot], [0])
        scratch = KDALayer(layer.checkpoint.clone(), layer.records, layer.gate)
        kda_commit([scratch], rows, rows.held)
        return scratch.checkpoint[slot]

    def check(self, slots) -> None:
        for slot in slots:
            if slot >= 0:
                request = self.requests[slot]
                for layer, expected in zip(self.layers, request.states, strict=True):
                    close(self.current(layer, slot), expected[0], self.error)
                index = (self.conv_cursor[slot] + torch.arange(-(WIDTH - 1), 0)) % self.conv.shape[1]
                assert torch.equal(self.conv[slot, index], request.history())
