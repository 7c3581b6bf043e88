"""Times the KDA kernels on a GPU at the shapes of Kimi K3, checks every timed launch, and sets peers beside them.

    python scripts/bench_kda.py --out kda.jsonl                            # TP8, batch 1/16/64/256, both folding modes
    python scripts/bench_kda.py --tp 8,1 --batch 1,16,64,256 --state float32,bfloat16
    python scripts/bench_kda.py --variants --batch 1,64 --only verify,commit   # which tiles and warps are best
    python scripts/bench_kda.py --peers-script bench_kda_peers.py --peers DIR  # a peer harness, in the same process
    ncu --clock-control none --profile-from-start off ... python scripts/bench_kda.py --profile verify --batch 64

Kimi K3 has 69 KDA layers of 96 heads with K = V = 128, a convolution of width 4 and a gate bounded by -5; a step
verifies 9 tokens. Times are medians over replays of a CUDA graph that walks all layers with a pool of states, records
and windows for each, and several such sets where one would fit into the L2 cache, so that states come from device
memory as they do in serving; the spread is that of the 10th and 90th percentile. Activations are shared by the layers:
in serving they come from the projection just before. Every configuration is checked before it is timed, on random
inputs, against `kda_verify_ref`, `kda_commit_ref` and `conv_window_ref` in float64, and after it: a replay of the graph
must be the eager launch bit for bit.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dspark.kernels import conv_window as conv_module
from dspark.kernels import kda_chunk, triton
from dspark.kernels import kda_commit as commit_module
from dspark.kernels import kda_launch as launch_module
from dspark.kernels import kda_verify as verify_module
from dspark.kernels.conv_window import conv_window, conv_window_ref
from dspark.kernels.kda import Gate, KDALayer, LayerTable, Records, Rows, Tokens, Window
from dspark.kernels.kda_commit import kda_commit, kda_commit_ref, kda_fold_held
from dspark.kernels.kda_ring import RingCursor
from dspark.kernels.kda_verify import kda_verify, kda_verify_ref

LAYERS, HEADS, DIM, WIDTH, BOUND, TOKENS = 69, 96, 128, 4, -5.0, 9
GOALS_MS = {1: 0.60, 16: 1.35, 64: 4.2, 256: 15.5}  # a step of float32 states at TP8
CACHE_BYTES = 60 << 20
FOLDS_APART = True  # a variant folds inside the verifications
RECORD_BYTES = DIM * (4 + 2 + 2)
# Relative Frobenius error that a launch may show: one rounding to bfloat16, or split products in float32.
BFLOAT16_ERROR, FLOAT32_ERROR = 8e-3, 2e-5

Change = tuple[ModuleType, str, Any]


def tiles(name: str, module: ModuleType, attributes: tuple[str, ...], shapes: str) -> dict[str, list[Change]]:
    """Variants named after `shapes`, such as 128x8x128: value channels, warps, most registers of a thread (0: any)."""
    found = {}
    for shape in shapes.split():
        tile, warps, registers = map(int, shape.split("x"))
        found[f"{name}-{shape}"] = [(module, attribute, (tile, warps, registers or None)) for attribute in attributes]
    return found


VARIANTS = (
    tiles("chunk", kda_chunk, ("TILE", "SPREAD_TILE"), "128x8x0 128x8x128 64x4x0 64x4x128 64x8x0 64x16x0 32x8x0")
    | {
        f"commit-{tile}x{warps}x{registers}": [
            (commit_module, "TILE", (128, warps, registers)),
            (commit_module, "STREAMED", tile),
        ]
        for tile, warps, registers in (
            (32, 4, 168),
            (64, 4, 168),
            (32, 8, 80),
            (64, 8, 128),
            (128, 8, 128),
            (16, 4, 128),
        )
    }
    | {
        f"conv-{tile}x{warps}": [(conv_module, "TILE_CHANNELS", tile), (conv_module, "NUM_WARPS", warps)]
        for tile, warps in ((512, 2), (256, 2), (1024, 8), (128, 1))
    }
    | {
        "step-fold-inside": [(sys.modules[__name__], "FOLDS_APART", False)],
        "step-no-overlap": [(launch_module, "OVERLAP", 0)],
        "step-fused": [(verify_module, "FUSED_HEADS", 1 << 30)],
        "step-spread": [(kda_chunk, "FULL_GRID", 400), (kda_chunk, "SPREAD_TILE", (64, 4, 168))],
    }
)


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
        return f"ring-{self.capacity}" if self.ring else "commit"

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
        self.taps = [weight.T.contiguous() for weight in self.weights]
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

    @property
    def folds_apart(self) -> bool:
        """Whether a step with a ring folds in one launch for all layers, ahead of the verifications."""
        return FOLDS_APART

    @property
    def fuses(self) -> bool:
        """Whether the step convolves inside the verification."""
        return self.shape.batch * self.shape.heads < verify_module.FUSED_HEADS

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
        )

    def fused(self, index: int, layer: int, rows: Rows) -> torch.Tensor:
        """Convolution and verification in one call."""
        window = Window(self.taps[layer], self.windows[index][layer], self.window_cursor[index])
        tokens = self.tokens_of(self.inputs)
        return kda_verify(tokens, self.sets[index][layer], rows, deferred=self.shape.ring, window=window)

    def verify(self, index: int, layer: int, rows: Rows, mixed: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens_of(mixed)
        return kda_verify(tokens, self.sets[index][layer], rows, deferred=self.shape.ring, rows_settled=True)

    def step(self, index: int) -> torch.Tensor:
        """A whole step of one set: plan, every layer, acceptance. Returns the last layer's outputs."""
        rows = plan = self.plan(index)
        if self.shape.ring and self.folds_apart:
            rows = kda_fold_held(self.tables[index], plan)
        for layer in range(self.layers_per_set):
            if self.fuses:
                out = self.fused(index, layer, rows)
            else:
                out = self.verify(index, layer, rows, self.convolve(index, layer))
        self.accept(index, plan)
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
            "fused": whole - commit * (not shape.ring),
        }[phase]


# --------------------------------------------------------------------------------------------------------------------
# Correctness


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
    """Largest relative errors of one layer of the first set, in one step on fresh inputs, against float64."""
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
    mixed = problem.convolve(0, layer_index)
    exact, cut = picked(problem, layer, rows, index)
    tokens = Tokens(*(x[index].double() for x in vars(problem.tokens_of(mixed)).values()))
    expected = kda_verify_ref(tokens, exact, cut)
    if layer_index and problem.fuses:
        out = problem.fused(0, layer_index, rows)
    else:
        out = problem.verify(0, layer_index, rows, mixed)
    errors = {"conv": relative(mixed[index], exact_mixed), "out": relative(out[index], expected)}
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
    rounded = name in ("conv", "out") or (name in ("checkpoint", "record_correction") and state == torch.bfloat16)
    return BFLOAT16_ERROR if rounded else FLOAT32_ERROR


# --------------------------------------------------------------------------------------------------------------------
# Timing


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, and the 10th and 90th percentile over groups of replays."""

    median: float
    low: float
    high: float


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, after two eager calls of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(run: Callable[[], object], groups: int = 21, group_ms: float = 4.0) -> Timing:
    """Replays of a graph of `run`, in groups of at least one replay and about `group_ms`."""
    graph = captured(run)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def group(replays: int) -> float:
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / replays

    group(2)
    replays = max(1, min(400, round(group_ms / max(group(3), 1e-3))))
    times = sorted(group(replays) for _ in range(groups))
    return Timing(statistics.median(times), times[groups // 10], times[-1 - groups // 10])


def copy_bandwidth() -> float:
    """Bytes per second that a kernel moving 4 GiB reads and writes."""
    source = torch.empty(1 << 30, device="cuda").normal_()
    target = torch.empty_like(source)
    timing = timed(lambda: torch.neg(source, out=target), groups=9)  # `copy_` takes another engine in a graph
    return 2 * source.nbytes / (timing.median * 1e-3)


def graph_is_eager(problem: Problem) -> bool:
    """Whether a replay of a step's graph leaves every bit of outputs, states and records where the eager step does.

    Cursors and one layer are saved and restored around the two; the others keep what the second step makes of them.
    """
    probed = problem.layers_per_set - 1
    layer, cursor = problem.sets[0][probed], problem.cursors[0]
    held: list[torch.Tensor] = []
    graph = captured(lambda: held.append(problem.step(0)))
    problem.redraw()
    live = [
        layer.checkpoint, *vars(layer.records).values(), problem.windows[0][probed], cursor.start, cursor.held,
        problem.window_cursor[0],
    ]  # fmt: skip
    saved = [x.clone() for x in live]
    graph.replay()
    replayed = [x.clone() for x in [held[-1], *live]]
    for x, old in zip(live, saved, strict=True):
        x.copy_(old)
    eager = [problem.step(0), *live]
    return all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


@contextlib.contextmanager
def patched(changes: list[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    """Module constants set for a while."""
    saved = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def phases(problem: Problem) -> dict[str, Callable[[], object]]:
    """What is timed, each over all layers of all sets."""
    mixed = problem.convolve(0, 0)
    rows = [problem.plan(index) for index in range(problem.num_sets)]
    every = [(index, layer) for index in range(problem.num_sets) for layer in range(problem.layers_per_set)]
    found: dict[str, Callable[[], object]] = {
        "verify": lambda: [problem.verify(index, layer, rows[index], mixed) for index, layer in every],
        "conv": lambda: [problem.convolve(index, layer) for index, layer in every],
        "fused": lambda: [problem.fused(index, layer, rows[index]) for index, layer in every],
        "step": lambda: [problem.step(index) for index in range(problem.num_sets)],
    }
    if not problem.shape.ring:
        found["commit"] = lambda: [
            kda_commit(*args) for args in zip(problem.tables, rows, problem.accepted, strict=True)
        ]
    return found


# --------------------------------------------------------------------------------------------------------------------
# The run


class Report:
    """Rows as JSON lines while the run goes on, a table at its end."""

    def __init__(self, out: str | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.file = open(out, "w") if out else None  # noqa: SIM115 (open as long as the run)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  " + "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def fail(self, message: str) -> None:
        print("FAILED", message, flush=True)
        self.failures.append(message)


def measure(problem: Problem, variant: str, only: set[str], bandwidth: float, report: Report) -> None:
    """Check one configuration, then time its phases."""
    shape = problem.shape
    names = shape.names() | {"variant": variant}
    problem.settle()
    plans = [problem.plan(index) for index in range(problem.num_sets)]
    held = torch.stack([rows.held for rows in plans]).float().mean().item()
    folded = torch.stack([rows.fold for rows in plans]).float().mean().item()
    for layer in {0, problem.layers_per_set - 1}:
        errors = check(problem, layer)
        report.add(kind="errors", **names, layer=layer, **errors)
        for name, error in errors.items():
            if not error <= bound(name, shape.state):
                report.fail(f"{names}: layer {layer}: {name} is off by {error:.2e}")
    for phase, run in phases(problem).items():
        if only and phase not in only:
            continue
        timing = timed(run)
        layers = problem.num_sets * problem.layers_per_set
        scale = LAYERS / layers
        least = problem.least_bytes(phase, held, folded)
        rate = least * layers / (timing.median * 1e-3)
        report.add(
            kind="time", **names, phase=phase, ms_step=timing.median * scale, low=timing.low * scale,
            high=timing.high * scale, us_layer=timing.median * 1e3 / layers, gb_s=rate / 1e9,
            share=rate / bandwidth, layers=layers, held=held, folded=folded,
        )  # fmt: skip
    if (not only or "step" in only) and not graph_is_eager(problem):
        report.fail(f"{names}: a replayed step is not the eager step")


def shapes(args: argparse.Namespace) -> list[Shape]:
    """Every configuration that the flags ask for."""
    found = []
    for tp in args.tp:
        for state in args.state:
            for batch in args.batch:
                for mode in args.mode:
                    dtype = getattr(torch, state)
                    if mode == "commit":
                        found.append(Shape(tp, batch, dtype))
                    else:
                        found.append(Shape(tp, batch, dtype, int(mode.removeprefix("ring-")), ring=True))
    return found


def run_ours(args: argparse.Namespace, bandwidth: float, report: Report, late: Callable[[], bool]) -> None:
    """Every configuration and variant; one that fails is named at the end, and the others still run."""
    variants = {"default": []} | (VARIANTS if args.variants is not None else {})
    wanted = [v for v in (args.variants or "").split(",") if v]
    if wanted:
        variants = {name: v for name, v in variants.items() if name == "default" or any(map(name.startswith, wanted))}
    for shape in shapes(args):
        problem = None
        torch.cuda.empty_cache()
        for name, changes in variants.items():
            if late():
                report.fail(f"{shape.names()} {name}: not run, the time limit is over")
                continue
            print(f"{shape.names()} {name}", flush=True)
            only = {name.split("-")[0].replace("chunk", "verify")} if changes else set(args.only)
            if only == {"commit"} and shape.ring:
                continue
            with patched(changes):
                try:
                    problem = problem or Problem(shape, args.budget_gb * 1e9)
                    measure(problem, name, only, bandwidth, report)
                except (RuntimeError, triton.CompilationError) as error:
                    if "CUDA error" in str(error):
                        raise  # nothing after it would mean anything
                    report.fail(f"{shape.names()} {name}: {type(error).__name__}: {str(error).splitlines()[0]}")


# Rows of the peer harness that make up one step of each scheme.
SCHEMES = {
    "vLLM snapshots": ("vllm.conv", "vllm.snapshot"),
    "vLLM RecoverSSM": ("vllm.conv", "vllm.verify", "vllm.commit"),
    "SGLang snapshots, fused": ("sgl.fused.snapshot", "sgl.commit.scatter"),
    "SGLang fold, fused": ("sgl.fused.ring", "sgl.commit.fold"),
    "SGLang fold, vLLM's convolution": ("vllm.conv", "sgl.ring", "sgl.commit.fold"),
    "fla snapshots, vLLM's convolution": ("vllm.conv", "fla.snapshot"),
    "prototype, commit": ("vllm.conv", "proto.verify2", "proto.commit"),
    "prototype, fold at start": ("vllm.conv", "proto.verify2.fold"),
}


def load_harness(path: str) -> ModuleType:
    """The peer harness as a module; its prototypes are found beside it."""
    spec = importlib.util.spec_from_file_location("kda_peer_harness", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--peers-script {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_peers(args: argparse.Namespace, report: Report, late: Callable[[], bool]) -> None:
    """Rows of the peer harness at the same shapes; a peer that fails is named and passed over."""
    harness = load_harness(args.peers_script)
    roots = harness.find_roots(
        argparse.Namespace(peers=args.peers, vllm=None, sglang=None, fla=None, atom=None, sgl_bv=None)
    )
    for name, install in (
        ("vllm", harness.install_vllm),
        ("sglang", harness.install_sglang),
        ("fla", harness.install_fla),
    ):
        if name in roots:
            install(roots[name])
        else:
            print(f"peer files of {name} not found under {args.peers}")
    peers = harness.PEERS | harness.load_protos(roots)
    wanted = {row for rows in SCHEMES.values() for row in rows}
    timer = harness.Timer(20.0, 15)
    for tp in args.tp:
        for state in args.state:
            for batch in args.batch:
                case = harness.Case(batch, TOKENS, HEADS // tp, "cuda", seed=batch + tp, bf16_state=state == "bfloat16")
                for name in sorted(wanted & peers.keys()):
                    root, make = peers[name][:2]
                    where = f"{name} TP{tp} B{batch} {state}"
                    if (root and root not in roots) or late():
                        print(f"peer {where}: not run: {'time limit' if late() else f'no files of {root}'}")
                        continue
                    run_peer(harness.Ctx(case, 14 * 2**30, roots, timer), make, where, report, name, tp, batch, state)
                    torch.cuda.empty_cache()


def run_peer(
    context: Any,
    make: Callable[[Any], dict[str, Any]],
    where: str,
    report: Report,
    name: str,
    tp: int,
    batch: int,
    state: str,
) -> None:
    """Time one row of the harness."""
    made: dict[str, Any] = {}
    try:
        made = make(context)
        milliseconds = context.timer(made["fn"]) / made["layers"]
    except Exception as error:
        print(f"peer {where}: not run: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return
    finally:
        made.get("done", lambda: None)()
    report.add(
        kind="peer", variant=name, tp=tp, batch=batch, state=state, phase=made["phase"], us_layer=milliseconds * 1e3,
        ms_step=milliseconds * LAYERS, error=made["err"],
    )  # fmt: skip


def peer_totals(report: Report) -> None:
    """One step of each scheme as rows of the table."""
    rows = {(r["variant"], r["tp"], r["batch"], r["state"]): r["ms_step"] for r in report.rows if r["kind"] == "peer"}
    for tp, batch, state in dict.fromkeys(key[1:] for key in rows):
        for scheme, parts in SCHEMES.items():
            if all((part, tp, batch, state) in rows for part in parts):
                total = sum(rows[part, tp, batch, state] for part in parts)
                report.add(kind="scheme", variant=scheme, tp=tp, batch=batch, state=state, ms_step=total)


def table(report: Report) -> None:
    """Milliseconds of 69 layers: a line for every variant, mode and phase, a column for every batch."""
    timed_rows = [r for r in report.rows if r["kind"] in ("time", "scheme", "peer")]
    columns = sorted(
        {(r["state"], r["tp"], r["batch"]) for r in timed_rows}, key=lambda c: (c[0] != "float32", -c[1], c[2])
    )
    lines: dict[tuple[str, ...], dict[Any, float]] = {}
    for r in timed_rows:
        line = lines.setdefault((r["kind"], r.get("mode", ""), r.get("phase", ""), r["variant"]), {})
        line[r["state"], r["tp"], r["batch"]] = r["ms_step"]
    print("\nmilliseconds of 69 layers")
    print(f"{'':<52}" + "".join(f"{state[:5]} TP{tp} B{batch}".rjust(16) for state, tp, batch in columns))
    for names, values in sorted(lines.items()):
        cells = "".join((f"{values[c]:.3f}" if c in values else "-").rjust(16) for c in columns)
        print(f"{' '.join(filter(None, names)):<52}" + cells)
    goals = "".join(
        (f"{GOALS_MS[c[2]]}" if c[:2] == ("float32", 8) and c[2] in GOALS_MS else "-").rjust(16) for c in columns
    )
    print(f"{'goal of a step':<52}{goals}")


def profile(args: argparse.Namespace) -> None:
    """A few launches of one phase between cudaProfilerStart and cudaProfilerStop."""
    for shape in shapes(args):
        problem = Problem(shape, args.budget_gb * 1e9)
        problem.settle()
        problem.step(0)
        rows, mixed = problem.plan(0), problem.convolve(0, 0)
        last = min(4, problem.layers_per_set)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        if args.profile == "verify":
            for layer in range(last):
                problem.verify(0, layer, rows, mixed)
        elif args.profile == "conv":
            for layer in range(last):
                problem.convolve(0, layer)
        else:
            kda_commit(problem.tables[0], rows, problem.accepted[0])
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def words(text: str) -> list[str]:
    """A comma list."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """A comma list of whole numbers."""
    return [int(word) for word in words(text)]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=numbers, default=[8], help="tensor-parallel sizes: 8 is 12 heads, 1 is 96")
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--state", type=words, default=["float32"], help="float32, bfloat16")
    parser.add_argument(
        "--mode", type=words, default=["commit", "ring-25"],
        help="commit (fold after every step), ring-R (fold when R records are full)",
    )  # fmt: skip
    parser.add_argument("--only", type=words, default=[], help="phases: verify, commit, conv, fused, step")
    parser.add_argument("--variants", nargs="?", const="", help="also other tiles and warps; prefixes of names to take")
    parser.add_argument("--peers-script", help="the peer harness, a Python file")
    parser.add_argument("--peers", help="folder with the peers' files, as the harness's --stage makes it")
    parser.add_argument(
        "--budget-gb", type=float, default=60.0, help="memory for pools; fewer layers where they don't fit"
    )
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; what is left then is listed, not run")
    parser.add_argument("--profile", choices=["verify", "commit", "conv"], help="launch one phase for a profiler")
    return parser.parse_args()


def main() -> int:
    """Run; 1 if a launch was wrong or not run, 2 without a GPU."""
    args, started = parse_args(), time.monotonic()
    if not torch.cuda.is_available():
        print("bench_kda.py times GPU kernels, and torch finds no CUDA device here; the tests run them on a CPU")
        return 2
    if args.profile:
        profile(args)
        return 0

    def late() -> bool:
        return time.monotonic() - started > args.time_limit

    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}, triton {triton.__version__}")
    bandwidth, report = copy_bandwidth(), Report(args.out)
    report.add(kind="device", name=properties.name, copy_tb_s=bandwidth / 1e12, torch=torch.__version__)
    run_ours(args, bandwidth, report, late)
    if args.peers_script:
        run_peers(args, report, late)
        peer_totals(report)
    table(report)
    print(f"{time.monotonic() - started:.0f} s")
    if report.failures:
        print("failed:", *report.failures, sep="\n  ")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
