"""Timing of CUDA graphs, and what `bench_kda.py` prints and writes: rows as they come, peers, a table at the end."""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from kda_problem import HEADS, LAYERS, TOKENS

GOALS_MS = {1: 0.60, 16: 1.35, 64: 4.2, 256: 15.5}  # a step of float32 states at TP8


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


def timed(run: Callable[[], object], groups: int = 21, group_ms: float = 4.0, least: int = 1) -> Timing:
    """Replays of a graph of `run`, in groups of about `group_ms` and at least `least` replays."""
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
    replays = max(least, min(400, round(group_ms / max(group(3), 1e-3))))
    times = sorted(group(replays) for _ in range(groups))
    return Timing(statistics.median(times), times[groups // 10], times[-1 - groups // 10])


def copy_bandwidth() -> float:
    """Bytes per second that a kernel moving 4 GiB reads and writes."""
    source = torch.empty(1 << 30, device="cuda").normal_()
    target = torch.empty_like(source)
    timing = timed(lambda: torch.neg(source, out=target), groups=9)  # `copy_` takes another engine in a graph
    return 2 * source.nbytes / (timing.median * 1e-3)


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


# Rows of the peer harness that make up one step of each scheme.
SCHEMES = {
    "vLLM snapshots": ("vllm.conv", "vllm.snapshot"),
    "vLLM RecoverSSM": ("vllm.conv", "vllm.verify", "vllm.commit"),
    "SGLang snapshots, fused": ("sgl.fused.snapshot", "sgl.commit.scatter"),
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
    schemes = [rows for name, rows in SCHEMES.items() if name.startswith(tuple(args.schemes))]
    wanted = {row for rows in schemes for row in rows}
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
