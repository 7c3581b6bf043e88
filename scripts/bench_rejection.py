"""Check and time the rejection kernels on one GPU, beside vLLM's where vLLM can be imported.

    python scripts/bench_rejection.py --out rejection.jsonl

First every form of q against the reference, on small steps and on steps of full size; a difference that rounding
cannot explain ends the program with status 1. Then the times of one step of K drafts a request: as launches from Python
(eager), as a CUDA graph, and as a graph with a clean L2 cache. The cache is emptied before each repetition by writing
other data, which then goes to memory while the kernels read, or by reading it (clean). The floor is one read of all
logits of target and draft, and of the drafter's list, at the copy bandwidth measured in the same run; rows after a
rejection need not be read, so that a step may take less.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

from dspark.kernels.rejection import Block, DraftLaw, Verified, Workspace, verify, verify_ref

sys.path.insert(0, str(Path(__file__).parent))  # not there under `python -P`
from rejection_cases import CASES, random_step, settled

STEPS = 8
VOCABULARIES = (163840, 49152, 151936)
BATCHES = (1, 4, 16, 64, 256)
LISTED = 64
FORMS = ("dense", "dense, stored sum", f"sparse {LISTED}", "one-hot")
DEVICE = "cuda"
JOBS = 12  # processes that check


def event_us(
    function: Callable[[], object], flush: torch.Tensor, repeats: int = 50, *, clean: bool = False
) -> list[float]:
    """Sorted times of a call between two events, the L2 cache emptied before each by writing, or reading if clean."""
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        torch.amax(flush, 0) if clean else flush.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()  # the next call is not queued behind this one, as in a decoding loop
    return sorted(start.elapsed_time(end) * 1e3 for start, end in events)


def graph_of(function: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def copy_bandwidth(flush: torch.Tensor) -> float:
    """Bytes a second, read and written, of a device copy of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(event_us(lambda: target.copy_(source), flush, 10)) * 1e6


def full_step(batch: int, vocab_size: int) -> tuple[Block, torch.Tensor]:
    """Target logits and the draft's in bfloat16, the target's plus noise of 0.3; drafts drawn from them."""
    num_rows = batch * (STEPS + 1)
    target = torch.randn(num_rows, vocab_size, device=DEVICE)
    draft = target.view(batch, STEPS + 1, vocab_size)[:, :STEPS].bfloat16().contiguous()
    draft += 0.3 * torch.randn_like(draft)
    tokens = torch.zeros(batch, STEPS + 1, device=DEVICE, dtype=torch.int64)
    for i in range(STEPS):
        race = torch.empty(batch, vocab_size, device=DEVICE).exponential_().log_()
        tokens[:, i + 1] = (draft[:, i].float() - race).argmax(-1)
    starts = torch.arange(0, num_rows + 1, STEPS + 1, device=DEVICE, dtype=torch.int32)
    positions = 101 + torch.arange(STEPS + 1, device=DEVICE).repeat(batch)
    temperature, seeds = torch.ones(batch, device=DEVICE), torch.arange(batch, device=DEVICE)
    return Block(target, tokens.view(-1), starts, positions, temperature, seeds), draft


def laws_of(block: Block, draft: torch.Tensor) -> dict[str, tuple[Block, DraftLaw]]:
    """The step with each form of q, with drafts that this q can give."""
    batch = len(block.seeds)
    slots = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    stored = torch.stack([draft[:, i].float().logsumexp(-1) for i in range(STEPS)], 1)
    values, ids = draft.topk(LISTED, dim=-1)
    race = torch.empty(values.shape, device=DEVICE).exponential_().log_()
    picked = ids.gather(-1, (values.float() - race).argmax(-1, keepdim=True))[..., 0]
    tokens = torch.cat([picked[:, :1], picked], 1).view(-1)
    steps = (
        (block, DraftLaw(draft, None, slots)),
        (block, DraftLaw(draft, None, slots, logsumexp=stored)),
        (replace(block, tokens=tokens), DraftLaw(values, ids.int(), slots)),
        (block, DraftLaw()),
    )
    return dict(zip(FORMS, steps, strict=True))


def plain_step(block: Block) -> Block:
    """The last row of every request alone: the second launch without the first."""
    last = slice(STEPS, None, STEPS + 1)
    starts = torch.arange(len(block.seeds) + 1, device=DEVICE, dtype=torch.int32)
    rows = (block.logits[last], block.tokens[last].contiguous(), starts, block.positions[last].contiguous())
    return Block(*rows, block.temperature, block.seeds)


def floor_bytes(block: Block, law: DraftLaw) -> int:
    """One read of everything."""
    tensors = [block.logits, *(x for x in (law.values, law.ids, law.logsumexp) if x is not None)]
    return sum(x.numel() * x.element_size() for x in tensors)


def vllm_call(block: Block, draft: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor]] | None:
    """vLLM's function on the same step."""
    try:
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
    except ImportError:
        return None
    batch = len(block.seeds)
    index = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    expanded = index.repeat_interleave(STEPS + 1)
    local = torch.arange(STEPS + 1, device=DEVICE, dtype=torch.int32).repeat(batch)
    requests = (index, expanded, local, block.temperature, block.seeds)
    rows = (block.logits, draft, block.tokens, block.row_starts, block.positions - 1)
    return lambda: rejection_sample(*rows, *requests, STEPS)


def check(name: str, block: Block, law: DraftLaw, num_draft_tokens: int, *, overlap: bool = False) -> dict:
    """Tokens, counts and status against the reference, twice, so that a workspace left in disorder is seen."""
    want = verify_ref(block, law, num_draft_tokens, overlap=overlap)
    clear = settled(block, law, num_draft_tokens)
    wrong = 0
    for _ in range(2):
        got = verify(block, law, num_draft_tokens, overlap=overlap)
        pairs = ((got.tokens, want.tokens), (got.num_emitted[:, None], want.num_emitted[:, None]))
        same = torch.stack([(a == b).all(-1) for a, b in pairs]).all(0) & (got.status == want.status)
        wrong += int((~same & clear).sum())
        if overlap:
            wrong += not torch.allclose(got.overlap, want.overlap, equal_nan=True, atol=1e-5, rtol=1e-4)
    return {"check": name, "requests": len(clear), "unsettled": int((~clear).sum()), "wrong": wrong}


def check_small(name: str) -> list[dict]:
    """Steps of one kind, with a vocabulary of two or three blocks."""
    case = CASES[name]
    wide = replace(case, vocab_size={40: 4096, 192: 8192}.get(case.vocab_size, 64 * case.vocab_size + 3))
    steps = [(seed, random_step(wide, seed, DEVICE)) for seed in range(4)]
    return [
        check(f"{name} seed {seed}", block, law, case.num_draft_tokens, overlap=seed == 0)
        for seed, (block, law) in steps
    ]


def check_full(form: str) -> list[dict]:
    """Steps of full size with one form of q."""
    records = []
    for vocab_size in VOCABULARIES:
        torch.manual_seed(vocab_size)
        block, law = laws_of(*full_step(16, vocab_size))[form]
        records.append(check(f"{form} V={vocab_size}", block, law, STEPS))
    return records


def check_all(small: bool) -> list[dict]:
    """All checks in several processes: most of their time goes into compiling, and the results stay in Triton's cache
    for the timing.
    """
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(check_full, form) for form in FORMS]
        jobs += [pool.submit(check_small, name) for name in CASES if small]
        return [record for job in jobs for record in job.result()]


def time_step(batch: int, vocab_size: int, flush: torch.Tensor, bandwidth: float) -> list[dict]:
    """Rows of the table for one size."""
    block, draft = full_step(batch, vocab_size)
    calls = {}
    theirs = vllm_call(block, draft)
    if theirs is not None:
        dense = DraftLaw(draft)
        calls["vLLM dense"] = (theirs, floor_bytes(block, dense), theirs()[1])
    workspace, out = Workspace(batch, STEPS, vocab_size, DEVICE), Verified.empty(batch, STEPS, DEVICE)
    plain = Verified.empty(batch, 0, DEVICE)
    for form, (own, law) in (laws_of(block, draft) | {"no drafts": (plain_step(block), DraftLaw())}).items():
        steps, into = (0, plain) if form == "no drafts" else (STEPS, out)

        def ours(own: Block = own, law: DraftLaw = law, steps: int = steps, into: Verified = into) -> Verified:
            return verify(own, law, steps, workspace=workspace, out=into)

        calls[form] = (ours, floor_bytes(own, law), ours().num_emitted.clone())
    records = []
    for form, (call, size, emitted) in calls.items():
        replay = graph_of(call)
        eager, graph, clean = event_us(call, flush), event_us(replay, flush), event_us(replay, flush, clean=True)
        records.append(
            {
                "vocab_size": vocab_size,
                "batch": batch,
                "form": form,
                "eager_us": statistics.median(eager),
                "graph_us": statistics.median(graph),
                "clean_us": statistics.median(clean),
                "graph_p10_p90_us": [graph[len(graph) // 10], graph[-1 - len(graph) // 10]],
                "floor_us": size / bandwidth * 1e6,
                "emitted": float(emitted.float().mean()),
            }
        )
    return records


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="time V=163840 with 1 and 64 requests only")
    parser.add_argument("--no-small", action="store_true", help="leave out the checks of small steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    flush = torch.zeros(64 << 20, dtype=torch.int32, device=DEVICE)
    with args.out.open("w") if args.out is not None else nullcontext() as out:
        failed = report_checks(check_all(not args.no_small), out)
        sizes = [(vocab_size, batch) for vocab_size in VOCABULARIES for batch in BATCHES]
        report_times([(163840, 1), (163840, 64)] if args.quick else sizes, flush, out)
    sys.exit(failed)


def report_checks(records: list[dict], out: TextIO | None) -> bool:
    """Print and write the checks; whether one failed."""
    write(records, out)
    failed = [record for record in records if record["wrong"]]
    asked, unsettled = (sum(record[key] for record in records) for key in ("requests", "unsettled"))
    print(f"{len(records)} checks, {asked} requests, {unsettled} within rounding of a tie, {len(failed)} checks failed")
    for record in failed:
        print("  FAILED", json.dumps(record))
    return bool(failed)


def report_times(sizes: list[tuple[int, int]], flush: torch.Tensor, out: TextIO | None) -> None:
    """Print and write the table, row by row."""
    bandwidth = copy_bandwidth(flush)
    print(f"{torch.cuda.get_device_name()}  copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(f"K={STEPS}; microseconds             eager    graph     p10..p90      clean    floor graph/floor emitted")
    for vocab_size, batch in sizes:
        for record in time_step(batch, vocab_size, flush, bandwidth):
            write([record], out)
            (low, high), floor = record["graph_p10_p90_us"], record["floor_us"]
            print(
                f"V={vocab_size:6d} B={batch:3d} {record['form']:>18} {record['eager_us']:8.1f}"
                f" {record['graph_us']:8.1f}   {low:6.1f}..{high:6.1f} {record['clean_us']:8.1f}"
                f" {floor:8.1f}   x{record['graph_us'] / floor:.2f}     {record['emitted']:.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()


def write(records: list[dict], out: TextIO | None) -> None:
    """One JSON object a line, at once, so that a run that is cut short leaves what it had."""
    if out is not None:
        out.write("".join(json.dumps(record) + "\n" for record in records))
        out.flush()


if __name__ == "__main__":
    main()
