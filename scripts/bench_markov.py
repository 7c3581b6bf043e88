"""Check and time the Markov chain kernels on one GPU, beside vLLM's loop and the memory-traffic floor.

    python scripts/bench_markov.py --out markov.jsonl            all shapes; --cases small for a quick look

Every chain runs in a CUDA graph; L2 is flushed before each replay; a figure is the median of 50 and, after the ±, half
the distance between the 10th and the 90th percentile. The floor is what a chain over the whole vocabulary must move
once: W2 at each of the K steps, the base logits, and the logits it stores, at the copy bandwidth of this very run. A
W2 that stays on chip can be faster than that floor.

Before anything is timed, every case is checked: cached logits within one bfloat16 unit of a float32 recomputation
given the drafted tokens, each token the winner of the race of the *stored* logits, the normaliser within 1e-5, the
candidates equal to a stable sort's, half of them from lists of the head. A failed check ends the program.

vLLM's loop is timed where vLLM is importable, written as its DSpark speculator runs it (0.33,
v1/worker/gpu/spec_decode/dspark/speculator.py): embedding, linear, add, `gumbel_sample` with the logits cache.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from dspark.kernels.markov import ChainOutput, ChainRequests, MarkovWeights, draw_ref, race_ref
from dspark.kernels.markov_candidates import (
    CandidatesWorkspace,
    SparseOutput,
    bias_lists,
    candidates_chain,
    candidates_ref,
)
from dspark.kernels.markov_chain import DenseWorkspace, dense_chain

STEPS = 8
SHAPES = ((49152, 64), (151936, 256), (163840, 256))
BATCHES = (1, 4, 16, 64, 256)
CANDIDATES = (32, 64, 128)
CHECKED_ROWS = 8
TIE = 2e-5  # leads below this are decided by rounding; less than one draw in a thousand


class Case:
    """Inputs of one shape, with logits about as peaked as a drafter's."""

    def __init__(self, batch: int, vocab: int, rank: int) -> None:
        torch.manual_seed(vocab)
        self.batch, self.vocab, self.rank = batch, vocab, rank
        device, dtype = "cuda", torch.bfloat16
        self.weights = MarkovWeights(
            kind="vanilla",
            w1=torch.randn(vocab, rank, device=device, dtype=dtype) * 0.3,
            w2=torch.randn(vocab, rank, device=device, dtype=dtype) * 0.3,
        )
        self.base = torch.randn(batch, STEPS, vocab, device=device, dtype=dtype) * 2
        self.requests = ChainRequests(
            anchors=torch.randint(0, vocab, (batch,), device=device),
            positions=torch.randint(0, 100000, (batch,), device=device),
            seeds=torch.randint(-(2**62), 2**62, (batch,), device=device),
            temperature=torch.full((batch,), 0.8, device=device),
            cache_rows=torch.randperm(batch, device=device),
        )
        if batch > 1:
            self.requests.temperature[1] = 0.0

    def floor_bytes(self, weight_bytes: int = 2) -> int:
        return STEPS * self.vocab * (self.rank * weight_bytes + 2 * self.batch * 2)


def dense(case: Case, weights: MarkovWeights) -> tuple[Callable[[], None], ChainOutput]:
    """A dense chain ready to run, and its outputs."""
    out = ChainOutput.allocate(weights, case.base)
    workspace = DenseWorkspace(weights, case.base)
    return lambda: dense_chain(weights, case.base, None, case.requests, out, workspace), out


@lru_cache(maxsize=len(CANDIDATES))
def lists_of(vocab: int, rank: int, k: int) -> torch.Tensor | None:
    """The lists of the weights of a shape, which are the same for every batch size."""
    return bias_lists(Case(1, vocab, rank).weights, k)


def sparse(case: Case, weights: MarkovWeights, k: int) -> tuple[Callable[[], None], SparseOutput, CandidatesWorkspace]:
    """A chain over k candidates ready to run, its outputs, and its workspace."""
    out = SparseOutput.allocate(weights, case.base, k)
    workspace = CandidatesWorkspace(weights, case.base, k, lists_of(case.vocab, case.rank, k))
    return lambda: candidates_chain(weights, case.base, None, case.requests, out, workspace), out, workspace


def vllm_loop(case: Case) -> Callable[[], None] | None:
    """vLLM's loop ready to run, or None without vLLM."""
    try:
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    except ImportError:
        return None
    cache, requests, weights = torch.empty_like(case.base), case.requests, case.weights
    index = torch.arange(case.batch, device="cuda", dtype=torch.int32)
    columns = torch.arange(STEPS, device="cuda", dtype=torch.int32)
    drafted = torch.empty(case.batch, STEPS, device="cuda", dtype=torch.int64)

    def run() -> None:
        previous = requests.anchors
        for i in range(STEPS):
            logits = case.base[:, i] + F.linear(F.embedding(previous, weights.w1), weights.w2)
            previous = gumbel_sample(
                logits, index, requests.temperature, requests.seeds, requests.positions + i, apply_temperature=True,
                is_drafting=True, logits_cache=cache, logits_cache_col=columns[i],
            )  # fmt: skip
            drafted[:, i] = previous

    return run


def check(condition: bool, what: str) -> None:
    """Stop the program with `what` unless the condition holds."""
    if not condition:
        raise SystemExit(f"check failed: {what}")


def recomputed(case: Case, weights: MarkovWeights, tokens: torch.Tensor, rows: torch.Tensor, i: int) -> torch.Tensor:
    """Logits [rows, V] float32 of draft i, given the drafted tokens."""
    previous = case.requests.anchors if i == 0 else tokens[:, i - 1]
    bias = weights.w1[previous[rows]].float() @ weights.w2.float().T
    if weights.w2_scale is not None:
        bias = bias * weights.w2_scale
    return case.base[rows, i].float() + bias


def close_to_stored(stored: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within one bfloat16 unit of the larger magnitude, besides float32 rounding."""
    scale = torch.maximum(stored.float().abs(), exact.abs())
    unit = torch.exp2(torch.floor(torch.log2(scale.clamp_min(2.0**-100))) - 7)
    return bool(((stored.float() - exact).abs() <= 0.5 * unit + 2e-5).all())


def lse_error(stored: torch.Tensor, temperature: torch.Tensor, lse: torch.Tensor) -> float:
    """Largest error of logsumexp(logits / T), against float64; greedy rows hold the largest logit."""
    logits, t = stored.double(), temperature.double()[:, None]
    exact = torch.where(t[:, 0] > 0, torch.logsumexp(logits / t.clamp_min(1e-30), -1), logits.amax(-1))
    return float((exact - lse.double()).abs().max())


def subset(case: Case, rows: torch.Tensor) -> ChainRequests:
    """The requests `rows` [n], without cache rows."""
    r = case.requests
    return ChainRequests(r.anchors[rows], r.positions[rows], r.seeds[rows], r.temperature[rows])


def check_dense(case: Case, weights: MarkovWeights, out: ChainOutput, name: str) -> None:
    """Every law of the dense chain, on a sample of the requests."""
    rows = torch.arange(case.batch, device="cuda")[:: max(case.batch // CHECKED_ROWS, 1)]
    requests = subset(case, rows)
    assert case.requests.cache_rows is not None
    for i in range(STEPS):
        stored = out.cache[case.requests.cache_rows[rows], i]
        check(close_to_stored(stored, recomputed(case, weights, out.tokens, rows, i)), f"{name}: logits of draft {i}")
        tokens, lead = draw_ref(stored, requests, i)
        wrong = (tokens != out.tokens[rows, i]) & ((lead > TIE) | (requests.temperature == 0))
        check(not bool(wrong.any()), f"{name}: token of draft {i}, rows {rows[wrong].tolist()}")
        error = lse_error(stored, requests.temperature, out.lse[rows, i])
        check(error < 1e-5, f"{name}: normaliser of draft {i} is off by {error:.2e}")


def check_sparse(case: Case, out: SparseOutput, workspace: CandidatesWorkspace, name: str) -> None:
    """Every law of the chain over candidates, on a sample of the requests."""
    rows = torch.arange(case.batch, device="cuda")[:: max(case.batch // CHECKED_ROWS, 1)]
    requests = subset(case, rows)
    columns, _ = candidates_ref(case.base[rows], workspace.k // 2)
    check(torch.equal(columns, out.ids[rows, :, ::2]), f"{name}: candidates")
    for i in range(STEPS):
        exact = recomputed(case, case.weights, out.tokens, rows, i).gather(-1, out.ids[rows, i])
        twice = out.logits[rows, i] == float("-inf")
        known = (out.ids[rows, i, :, None] == columns[:, i, None, :]).any(-1)
        check(torch.equal(twice[:, 1::2], known[:, 1::2]) and not bool(twice[:, ::2].any()), f"{name}: tokens twice")
        check(float((out.logits[rows, i] - exact)[~twice].abs().max()) < 2e-4, f"{name}: logits of draft {i}")
        tokens, lead = race_ref(out.logits[rows, i], requests, i, out.ids[rows, i])
        wrong = (tokens != out.tokens[rows, i]) & ((lead > TIE) | (requests.temperature == 0))
        check(not bool(wrong.any()), f"{name}: token of draft {i}, rows {rows[wrong].tolist()}")
        error = lse_error(out.logits[rows, i], requests.temperature, out.lse[rows, i])
        check(error < 1e-5, f"{name}: normaliser of draft {i} is off by {error:.2e}")


def graph_times(run: Callable[[], None], flush: torch.Tensor, repetitions: int = 50) -> tuple[float, float]:
    """Median microseconds of a graph replay with a cold L2, and half the 10-90 % distance."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return event_times(graph.replay, flush, repetitions)


def event_times(run: Callable[[], object], flush: torch.Tensor, repetitions: int) -> tuple[float, float]:
    """Median microseconds of a call with a cold L2, and half the 10-90 % distance."""
    times = []
    for _ in range(repetitions):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    deciles = statistics.quantiles(times, n=10)
    return statistics.median(times), (deciles[-1] - deciles[0]) / 2


def copy_bandwidth(flush: torch.Tensor) -> float:
    """Bytes per second of a 4 GB copy, reads and writes counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / event_times(lambda: target.copy_(source), flush, 10)[0] * 1e6


def run_case(case: Case, flush: torch.Tensor, bandwidth: float, modes: list[str]) -> list[dict[str, object]]:
    """Check and time one shape in every mode."""
    records = []
    quantized = case.weights.quantized()
    for mode in modes:
        floor = case.floor_bytes(1 if mode == "fp8" else 2) / bandwidth * 1e6
        name = f"{mode} V={case.vocab} r={case.rank} B={case.batch}"
        if mode == "vllm":
            run = vllm_loop(case)
            if run is None:
                continue
        elif mode in ("dense", "fp8"):
            weights = case.weights if mode == "dense" else quantized
            run, out = dense(case, weights)
            run()
            run()  # the second launch meets the words of the first
            check_dense(case, weights, out, name)
        else:
            run, sparse_out, workspace = sparse(case, case.weights, int(mode.removeprefix("top")))
            run()
            check_sparse(case, sparse_out, workspace, name)
        median, spread = graph_times(run, flush)
        records.append(
            {"mode": mode, "vocab": case.vocab, "rank": case.rank, "batch": case.batch, "steps": STEPS,
             "us": round(median, 2), "spread_us": round(spread, 2), "floor_us": round(floor, 2)}
        )  # fmt: skip
        print(f"{name}: {median:.1f} us", flush=True)
    return records


def compile_one(job: tuple[int, int, int, str]) -> None:
    """Compile the kernels of one case into the on-disk cache; run in a process of its own."""
    batch, vocab, rank, mode = job
    case = Case(batch, vocab, rank)
    if mode in ("dense", "fp8"):
        run, _ = dense(case, case.weights if mode == "dense" else case.weights.quantized())
    else:
        run, _, _ = sparse(case, case.weights, int(mode.removeprefix("top")))
    run()
    torch.cuda.synchronize()


def compile_all(cases: list[tuple[int, int, int]], modes: list[str], processes: int) -> None:
    """Compile in parallel: each kernel takes seconds on one core. CUDA must not have been used yet in this process."""
    jobs = [(b, v, r, m) for m in modes if m != "vllm" for b, v, r in cases]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)


def table(records: list[dict[str, object]], modes: list[str]) -> str:
    """One row a shape: microseconds of each mode, and times the floor."""
    lines = [f"{'V':>7} {'r':>4} {'B':>4} {'floor':>8} " + " ".join(f"{mode:>16}" for mode in modes)]
    shapes = dict.fromkeys((r["vocab"], r["rank"], r["batch"]) for r in records)
    for vocab, rank, batch in shapes:
        row = {r["mode"]: r for r in records if (r["vocab"], r["rank"], r["batch"]) == (vocab, rank, batch)}
        floor = max(float(str(each["floor_us"])) for each in row.values())  # of bfloat16 weights
        cells = []
        for mode in modes:
            each = row.get(mode)
            cells.append(f"{each['us']:>8.1f}±{each['spread_us']:<7.1f}" if each else " " * 16)
        lines.append(f"{vocab:>7} {rank:>4} {batch:>4} {floor:>8.1f} " + " ".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Compile, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=["small", "all"], default="all")
    parser.add_argument("--batches", type=int, nargs="+", help="these batch sizes only")
    parser.add_argument("--modes", default="vllm,dense,fp8," + ",".join(f"top{k}" for k in CANDIDATES))
    parser.add_argument("--out", help="JSON lines, one a case and mode")
    parser.add_argument("--processes", type=int, default=12, help="compile with so many; 0 compiles as it goes")
    args = parser.parse_args()
    modes = args.modes.split(",")
    shapes, batches = (SHAPES[:1] + SHAPES[2:], (1, 16)) if args.cases == "small" else (SHAPES, BATCHES)
    batches = args.batches or batches
    cases = [(batch, vocab, rank) for vocab, rank in shapes for batch in batches]
    begun = time.perf_counter()
    if args.processes:
        compile_all(cases, modes, args.processes)
    print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    bandwidth = copy_bandwidth(flush)
    records = []
    for batch, vocab, rank in cases:
        records += run_case(Case(batch, vocab, rank), flush, bandwidth, modes)
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
    print(f"\n{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, torch {torch.__version__}, "
          f"K={STEPS}, {time.perf_counter() - begun:.0f} s\nmicroseconds for all {STEPS} steps")  # fmt: skip
    print(table(records, modes))


if __name__ == "__main__":
    main()
