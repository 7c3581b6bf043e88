"""Layers of Kimi K3's KDA on a GPU for `bench_kda.py`: pools, inputs, a step, and the check against float64."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.conv_window import conv_window, conv_window_ref
from dspark.kernels.kda import Gate, KDALayer, LayerTable, Records, Rows, Tokens, Window
from dspark.kernels.kda_chunk import launch_kda_chunk
from dspark.kernels.kda_commit import kda_commit, kda_commit_ref
from dspark.kernels.kda_ring import RingCursor
from dspark.kernels.kda_verify import kda_verify, kda_verify_ref

LAYERS, HEADS, DIM, WIDTH, BOUND, TOKENS = 69, 96, 128, 4, -5.0, 9
CACHE_BYTES = 60 << 20
RECORD_BYTES = DIM * (4 + 2 + 2)
# Relative Frobenius error that a launch may show: one rounding to bfloat16, or split products in float32.
BFLOAT16_ERROR, FLOAT32_ERROR = 8e-3, 2e-5


@dataclass(frozen=True)
class Shape:
    """One configuration. `capacity` is the records' ring, `ring` whether folding is deferred."""

    tp: int
    batch: int
    state: torch.dtype
    capacity: int = TOKENS
    ring: bool = False
    tokens: int = TOKENS

    @property
    def heads(self) -> int:
        return HEADS // self.tp

    @property
    def mode(self) -> str:
        if self.ring:
            return "fold" if self.capacity == 2 * self.tokens else f"ring-{self.capacity}"
        return "commit"

    @property
    def state_bytes(self) -> int:
        """Of one layer, all rows."""
        return self.batch * self.heads * DIM * DIM * self.state.itemsize

    def names(self) -> dict[str, Any]:
        return {
            "tp": self.tp,
            "batch": self.batch,
            "tokens": self.tokens,
            "state": str(self.state).removeprefix("torch."),
            "mode": self.mode,
        }


class Problem:
    """Pools of `sets` times `layers` layers, one step's inputs, and the cursors of every set."""

    def __init__(self, shape: Shape, budget: float, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator("cuda").manual_seed(seed)
        batch, heads, channels = shape.batch, shape.heads, 3 * shape.heads * DIM
        per_layer = shape.state_bytes + batch * heads * shape.capacity * RECORD_BYTES + batch * channels * 24
        self.layers_per_set = max(1, min(LAYERS, int(budget / per_layer)))
        per_set = per_layer * self.layers_per_set
        self.num_sets = max(1, min(int(5 * CACHE_BYTES / per_set) + 1, int(budget / per_set)))
        self.slots = 1 + torch.randperm(batch, generator=self.generator, device="cuda")  # slot 0 belongs to nobody
        self.num_rows = torch.full((batch,), shape.tokens, device="cuda")
        self.accepted = [
            torch.randint(1, shape.tokens + 1, (batch,), generator=self.generator, device="cuda")
            for _ in range(self.num_sets)
        ]
        self.inputs = self.normal(batch, shape.tokens, channels).bfloat16()
        self.gate = self.normal(batch, shape.tokens, heads, DIM).bfloat16()
        self.beta = self.normal(batch, shape.tokens, heads).bfloat16()
        self.weights = [0.5 * self.normal(channels, WIDTH) for _ in range(self.layers_per_set)]
        gates = [
            Gate(0.5 * self.normal(heads), 9 * self.uniform(heads, DIM) - 7, BOUND) for _ in range(self.layers_per_set)
        ]
        self.sets = [[self.make_layer(gate) for gate in gates] for _ in range(self.num_sets)]
        self.tables = [LayerTable(layers) for layers in self.sets]
        rows = WIDTH - 1 + shape.tokens
        self.windows = [
            [self.normal(batch + 1, rows, channels).bfloat16() for _ in range(self.layers_per_set)]
            for _ in range(self.num_sets)
        ]
        self.window_cursor = [torch.full((batch,), WIDTH - 1, device="cuda") for _ in range(self.num_sets)]
        self.cursors = [
            RingCursor(batch + 1, max(shape.capacity, 2 * shape.tokens), shape.tokens, "cuda")
            for _ in range(self.num_sets)
        ]

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device="cuda")

    def uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(*size, generator=self.generator, device="cuda")

    def make_layer(self, gate: Gate) -> KDALayer:
        shape = self.shape
        state = torch.empty(shape.batch + 1, shape.heads, DIM, DIM, dtype=shape.state, device="cuda")
        state.normal_(0, 0.3, generator=self.generator)
        records = Records.empty(shape.batch + 1, shape.capacity, state, torch.bfloat16)
        for store in vars(records).values():  # as if written by earlier steps
            store.normal_(0, 0.3, generator=self.generator)
        return KDALayer(state, records, gate)

    def tokens_of(self, mixed: torch.Tensor) -> Tokens:
        query, key, value = (x.unflatten(2, (self.shape.heads, DIM)) for x in mixed.chunk(3, dim=2))
        return Tokens(query, key, value, self.gate, self.beta)

    def plan(self, index: int) -> Rows:
        if self.shape.ring:
            return self.cursors[index].plan(self.slots, self.num_rows, null_slot=0)
        return Rows.current(self.slots, self.num_rows, null_slot=0)

    def settle(self) -> None:
        """The usual fill of rings, each row somewhere between two folds: cursors as after some steps."""
        for _ in range(7 if self.shape.ring else 0):
            for index, cursor in enumerate(self.cursors):
                cursor.advance(self.plan(index), self.accepted[index])

    def redraw(self) -> None:
        """Fresh inputs in the tensors that a graph reads."""
        self.inputs.copy_(self.normal(*self.inputs.shape))
        self.gate.copy_(self.normal(*self.gate.shape))
        self.beta.copy_(self.normal(*self.beta.shape))

    def convolve(self, index: int, layer: int) -> torch.Tensor:
        return conv_window(
            self.inputs,
            self.weights[layer],
            self.windows[index][layer],
            self.slots,
            self.window_cursor[index],
            self.num_rows,
            rows_settled=True,
        )

    def verify(self, index: int, layer: int, rows: Rows, mixed: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens_of(mixed)
        return kda_verify(tokens, self.sets[index][layer], rows, deferred=self.shape.ring, rows_settled=True)

    def fused(self, index: int, layer: int, rows: Rows) -> torch.Tensor:
        """Convolution and verification in one launch. Right before that of the first layer the rows are made."""
        window = Window(self.weights[layer], self.windows[index][layer], self.window_cursor[index])
        tokens, settled = self.tokens_of(self.inputs), layer > 0
        return launch_kda_chunk(
            tokens, self.sets[index][layer], rows, deferred=self.shape.ring, window=window, rows_settled=settled
        )

    def step(self, index: int, fused: bool = False) -> torch.Tensor:
        """A whole step of one set: plan, every layer, acceptance. Returns the last layer's outputs. `fused`: the
        verification convolves."""
        rows = self.plan(index)
        for layer in range(self.layers_per_set):
            if fused:
                out = self.fused(index, layer, rows)
            else:
                out = self.verify(index, layer, rows, self.convolve(index, layer))
        self.accept(index, rows)
        return out

    def accept(self, index: int, rows: Rows) -> None:
        if self.shape.ring:
            self.cursors[index].advance(rows, self.accepted[index])
        else:
            kda_commit(self.tables[index], rows, self.accepted[index])
        window = self.windows[index][0].shape[1]
        self.window_cursor[index].add_(self.accepted[index]).remainder_(window)

    def least_bytes(self, phase: str, held: float, folded: float) -> float:
        """Bytes of one layer that the scheme can't avoid; `held` records are read and a share `folded` of the states is
        written."""
        shape, per_head = self.shape, self.shape.batch * self.shape.heads
        activations = per_head * shape.tokens * (5 * DIM * 2 + 2)
        records = per_head * shape.tokens * RECORD_BYTES
        window = per_head * 3 * DIM * 2 * (WIDTH - 1 + 2 * shape.tokens)
        accepted = per_head * torch.stack(self.accepted).float().mean().item() * RECORD_BYTES
        verify = shape.state_bytes * (1 + folded) + activations + records + per_head * held * RECORD_BYTES
        commit = 2 * shape.state_bytes + accepted
        conv = window + per_head * 3 * DIM * 2 * shape.tokens
        whole = verify + per_head * 3 * DIM * 2 * (WIDTH - 1 + shape.tokens) + (0 if shape.ring else commit)
        return {
            "verify": verify,
            "commit": commit,
            "conv": conv,
            "step": whole,
            "fused": whole - (0 if shape.ring else commit),
            "step-fused": whole,
        }[phase]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; NaN and infinities come out as infinity."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def picked(problem: Problem, layer: KDALayer, rows: Rows, index: torch.Tensor) -> tuple[KDALayer, Rows]:
    """Some rows of a batch in float64, with pools of their own."""
    slots, ring = rows.slots[index], rows.record_slots[index]
    gate = layer.gate
    double = Gate(None if gate.a_log is None else gate.a_log.double(), gate.dt_bias.double(), gate.lower_bound)
    records = Records(*(store[ring].double() for store in vars(layer.records).values()))
    own = torch.arange(len(index), device="cuda")
    fields = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    cut = {name: value[index] for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return KDALayer(layer.checkpoint[slots].double(), records, double), Rows(
        **(cut | {"slots": own, "record_slots": own})
    )


def check(problem: Problem, layer_index: int) -> dict[str, float]:
    """Largest relative errors of one layer of the first set, in one step on fresh inputs, against float64; those of the
    verification that convolves are against the two launches."""
    shape = problem.shape
    problem.redraw()
    layer, rows = problem.sets[0][layer_index], problem.plan(0)
    index = torch.tensor(sorted({0, shape.batch // 2, shape.batch - 1}), device="cuda")
    weight, window = problem.weights[layer_index], problem.windows[0][layer_index]
    exact_mixed = conv_window_ref(
        problem.inputs[index].double(),
        weight.double(),
        window[problem.slots[index]].double(),
        torch.arange(len(index), device="cuda"),
        problem.window_cursor[0][index],
        problem.num_rows[index],
    )
    changed = [window, layer.checkpoint, *vars(layer.records).values()]
    before = [x.clone() for x in changed]
    mixed = problem.convolve(0, layer_index)
    exact, cut = picked(problem, layer, rows, index)
    tokens = Tokens(*(x[index].double() for x in vars(problem.tokens_of(mixed)).values()))
    expected = kda_verify_ref(tokens, exact, cut)
    out = problem.verify(0, layer_index, rows, mixed)
    errors = {"conv": relative(mixed[index], exact_mixed), "out": relative(out[index], expected)}
    after = [out, *(x.clone() for x in changed)]
    for x, old in zip(changed, before, strict=True):
        x.copy_(old)
    again = [problem.fused(0, layer_index, rows), *changed]
    parts = ("out", "inputs", "checkpoint", "record_correction", "record_key", "record_gate")
    errors |= {f"fused_{part}": relative(a, b) for part, a, b in zip(parts, again, after, strict=True)}
    new = (rows.start + rows.held)[index, None] + torch.arange(shape.tokens, device="cuda")
    new, at = new % shape.capacity, torch.arange(len(index), device="cuda")[:, None]
    ring = rows.record_slots[index][:, None]
    for name in ("correction", "key", "gate"):
        got = getattr(layer.records, name)[ring, :, new]
        errors[f"record_{name}"] = relative(got, getattr(exact.records, name)[at, :, new])
    if not shape.ring:
        kda_commit_ref([exact], cut, problem.accepted[0][index], cut.slots, None)
        kda_commit([layer], rows, problem.accepted[0])
    errors["checkpoint"] = relative(layer.checkpoint[rows.slots[index]], exact.checkpoint)
    return errors


def bound(name: str, state: torch.dtype) -> float:
    """What `check` may show under `name`."""
    if name in ("fused_inputs", "fused_record_key", "fused_record_gate"):  # not a bit may differ
        return 0.0
    name = name.removeprefix("fused_")
    rounded = name in ("conv", "out") or (name in ("checkpoint", "record_correction") and state == torch.bfloat16)
    return BFLOAT16_ERROR if rounded else FLOAT32_ERROR
