"""Times the KDA kernels on a GPU at the shapes of Kimi K3, checks every timed launch, and sets peers beside them.

    python scripts/bench_kda.py --out kda.jsonl    # TP8, batch 1/16/64/256, three ways of folding
    python scripts/bench_kda.py --tp 8,1 --batch 1,16,64,256 --state float32,bfloat16
    python scripts/bench_kda.py --only step,step-fused                         # convolution apart, or inside
    python scripts/bench_kda.py --variants --batch 1,64 --only verify,conv     # which tiles and warps are best
    python scripts/bench_kda.py --peers-script bench_kda_peers.py --peers DIR  # a peer harness, in the same process
    ncu --clock-control none --profile-from-start off ... python scripts/bench_kda.py --profile verify --batch 64

Kimi K3 has 69 KDA layers of 96 heads with K = V = 128, a convolution of width 4 and a gate bounded by -5; a step
verifies 9 tokens. Times are medians over replays of a CUDA graph that walks all layers with a pool of states, records
and windows for each, and several such sets where one would fit into the L2 cache, so that states come from device
memory as they do in serving; the spread is that of the 10th and 90th percentile. Activations are shared by the layers:
in serving they come from the projection just before. Every configuration is checked before it is timed, on random
inputs, against `kda_verify_ref`, `kda_commit_ref` and `conv_window_ref` in float64, and after it: a replay of the graph
must be the eager launch bit for bit. The verification that convolves ("fused") must leave inputs, keys and
gates bit for bit as the convolution and then the verification do, and the rest up to roundings.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from kda_problem import LAYERS, TOKENS, Problem, Shape, bound, check
from kda_results import Report, captured, copy_bandwidth, peer_totals, run_peers, table, timed

from dspark.kernels import conv_window as conv_module
from dspark.kernels import kda_chunk, triton
from dspark.kernels import kda_launch as launch_module
from dspark.kernels.kda_commit import kda_commit

Change = tuple[ModuleType, str, Any]


def tiles(name: str, module: ModuleType, attributes: tuple[str, ...], shapes: str) -> dict[str, list[Change]]:
    """Variants named after `shapes`: numbers as in the module's tuple, the last the most registers (0: any)."""
    found = {}
    for shape in shapes.split():
        *sizes, registers = map(int, shape.split("x"))
        found[f"{name}-{shape}"] = [(module, attribute, (*sizes, registers or None)) for attribute in attributes]
    return found


VARIANTS = (
    tiles("chunk", kda_chunk, ("TILE", "SPREAD_TILE"), "128x128x8x128 128x64x4x128 128x64x4x168 64x64x4x168")
    | tiles("conv", conv_module, ("TILE", "SPREAD_TILE"), "512x4 256x4 128x4")
    | {"step-no-overlap": [(launch_module, "OVERLAP", 0)]}
)


# Phases that a variant may change, by how its name begins.
CONCERNED = {
    "chunk": {"verify", "fused", "step", "step-fused"},
    "conv": {"conv"},
    "step": {"step", "step-fused"},
}


def graph_is_eager(problem: Problem, fused: bool = False) -> bool:
    """Whether a replay of a step's graph leaves every bit of outputs, states and records where the eager step does.

    Cursors and one layer are saved and restored around the two; the others keep what the second step makes of them.
    """
    probed = problem.layers_per_set - 1
    layer, cursor = problem.sets[0][probed], problem.cursors[0]
    held: list[torch.Tensor] = []
    graph = captured(lambda: held.append(problem.step(0, fused)))
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
    eager = [problem.step(0, fused), *live]
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
        "step-fused": lambda: [problem.step(index, fused=True) for index in range(problem.num_sets)],
    }
    if not problem.shape.ring:
        found["commit"] = lambda: [
            kda_commit(*args) for args in zip(problem.tables, rows, problem.accepted, strict=True)
        ]
    return found


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
        # Where folding is deferred, some steps fold: a group has to see as many of either kind as there are.
        varies = phase.startswith("step") and shape.capacity > 2 * shape.tokens
        timing = timed(run, groups=9, least=12) if varies else timed(run)
        layers = problem.num_sets * problem.layers_per_set
        scale = LAYERS / layers
        least = problem.least_bytes(phase, held, folded)
        rate = least * layers / (timing.median * 1e-3)
        report.add(
            kind="time", **names, phase=phase, ms_step=timing.median * scale, low=timing.low * scale,
            high=timing.high * scale, us_layer=timing.median * 1e3 / layers, gb_s=rate / 1e9,
            share=rate / bandwidth, layers=layers, held=held, folded=folded,
        )  # fmt: skip
    for phase in ("step", "step-fused"):
        if (not only or phase in only) and not graph_is_eager(problem, fused=phase == "step-fused"):
            report.fail(f"{names}: a replayed {phase} is not the eager one")


def shapes(args: argparse.Namespace) -> list[Shape]:
    """Every configuration that the flags ask for."""
    found = []
    for tp in args.tp:
        for state in args.state:
            for batch in args.batch:
                for mode in args.mode:
                    dtype = getattr(torch, state)
                    capacity = {"commit": TOKENS, "fold": 2 * TOKENS}.get(mode) or int(mode.removeprefix("ring-"))
                    found.append(Shape(tp, batch, dtype, capacity, ring=mode != "commit"))
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
            only = set(args.only)
            if changes:
                concerned = CONCERNED[name.split("-")[0]]
                only = concerned & only or concerned
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
        elif args.profile == "fused":
            for layer in range(last):
                problem.fused(0, layer, rows)
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
        "--mode", type=words, default=["commit", "fold", "ring-25"],
        help="commit (fold after every step), fold (in the next verification), ring-R (when R records are full)",
    )  # fmt: skip
    parser.add_argument("--only", type=words, default=[], help="phases: verify, commit, conv, fused, step, step-fused")
    parser.add_argument("--variants", nargs="?", const="", help="also other tiles and warps; prefixes of names to take")
    parser.add_argument("--peers-script", help="the peer harness, a Python file")
    parser.add_argument("--peers", help="folder with the peers' files, as the harness's --stage makes it")
    parser.add_argument("--schemes", type=words, default=[""], help="peers' schemes, by how their names begin")
    parser.add_argument(
        "--budget-gb", type=float, default=60.0, help="memory for pools; fewer layers where they don't fit"
    )
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; what is left then is listed, not run")
    parser.add_argument(
        "--profile", choices=["verify", "commit", "conv", "fused"], help="launch one phase for a profiler"
    )
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
