"""KDA targets on vLLM's V2 runner: our verify and commit against vLLM's own, on a GPU. Prints OK or FAILED per law.

    python3 scripts/check_vllm_kda.py --out kda.json        both gates, ten engines at a time: about a minute and a half
    ... --gate full-rank                                    Kimi K3's layers only; low-rank: Kimi Linear's
    ... --only ours-graph,plain                             some engines, and the laws that need no others

Each engine is a process of its own, on a tiny random target with a drafter that guesses two tokens of three
(`kda_pair.py`); they run side by side, spread over the GPUs, and need 3 GiB each. vLLM drafts and judges in all of
them; only the KDA kernels differ, by additional_config "dspark_kda". Requests have prompts of 180 to 250 tokens and end
at different lengths, more of them than run at a time: windows of 9 tokens, batches mixed with prefill, and graphs
padded with rows that have none.

Exact equality with plain decoding is not to be had in bfloat16: two logits that round to the same number are told apart
by the order of a sum. So the plain engine reads every text that another engine wrote and gives the logarithm of
each token's probability; for a greedy text the distance to the best token (the gap) is 0, or the size of the rounding.
vLLM's own kernels show which gaps rounding makes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from kda_laws import MAX_TOKENS, WINDOW_DRAFTS, check_gate, prompts

TEMPERATURE = 0.4
RUNNING = 5
GRAPHS = {True: [9, 18, 36, 45], False: [1, 2, 4]}  # tokens of captured batches, with drafts and without
PATIENCE = 300  # seconds that the plain engine waits for the others

ENGINES = {
    "full-rank": ("ours-graph", "vllm-graph", "ours-eager", "ours-cached", "vllm-cached", "plain"),
    "low-rank": ("ours-graph", "vllm-snapshots", "vllm-replay", "plain"),
}
EXTRA = 7  # tokens that a follow-up adds to an earlier text


def make_engine(name: str, folder: Path):
    """The engine of a name, on the pair in `folder`."""
    from vllm import LLM

    additional = {"dspark": {"chain": "vllm", "verification": "vllm"}}
    if name.startswith("vllm"):
        additional["dspark_kda"] = "vllm"
    options = {}
    if name != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": str(folder / "drafter"),
            "num_speculative_tokens": WINDOW_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }
        options["use_replayssm"] = name != "vllm-snapshots"
    return LLM(
        str(folder / "target"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.03,
        kernel_config={"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
        enforce_eager=name.endswith("eager"),
        compilation_config={"cudagraph_capture_sizes": GRAPHS[name != "plain"]},
        enable_prefix_caching=name.endswith("cached"),
        disable_log_stats=False,
        additional_config=additional,
        seed=0,
        **options,
    )


def watch_commits() -> list[int]:
    """Sizes of the batches that our commit folds, as they happen."""
    from dspark.vllm import kda

    folded: list[int] = []
    vllms_call = kda.ReplayCommit.commit

    def commit(self, accepted, state_indices, *rest, **named):
        folded.append(len(state_indices))
        return vllms_call(self, accepted, state_indices, *rest, **named)

    kda.ReplayCommit.commit = commit
    return folded


def acceptance(llm) -> list[float]:
    """Steps with drafts so far, and how many of them accepted the draft at each position."""
    counts: dict[str, float] = {}
    positions = [0.0] * WINDOW_DRAFTS
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            counts["drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            positions = list(metric.values)
    return [counts.get("drafts", 0.0), *positions]


def run(llm, texts: list[list[int]], temperature: float, lengths=None) -> dict:
    """Generate, and report tokens, cached tokens, seconds and what was accepted."""
    from vllm import SamplingParams

    before, start = acceptance(llm), time.perf_counter()
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=100 + i, ignore_eos=True, detokenize=False)
        for i, n in enumerate(lengths or MAX_TOKENS)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    return {
        "prompts": texts,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "cached": [o.num_cached_tokens or 0 for o in outputs],
        "seconds": time.perf_counter() - start,
        "accepted": [a - b for a, b in zip(acceptance(llm), before, strict=True)],
    }


def score(llm, part: dict) -> dict:
    """What the plain engine thinks of a part's texts: log probability of each token, and its distance to the best."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    texts = [prompt + tokens for prompt, tokens in zip(part["prompts"], part["tokens"], strict=True)]
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    logprobs, gaps = [], []
    for prompt, text, output in zip(part["prompts"], texts, outputs, strict=True):
        rows, tokens = list(output.prompt_logprobs)[len(prompt) :], text[len(prompt) :]
        own = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
        logprobs.append(own)
        gaps.append([max(x.logprob for x in row.values()) - value for row, value in zip(rows, own, strict=True)])
    return {"logprobs": logprobs, "gaps": gaps}


def others(results: Path, names: list[str]) -> dict:
    """What the engines of these names wrote, once each of them has or has failed."""
    deadline = time.monotonic() + PATIENCE
    while missing := [n for n in names if not any((results / f"{n}.{end}").exists() for end in ("json", "failed"))]:
        if time.monotonic() > deadline:
            print(f"plain: gave up waiting for {', '.join(missing)}")
            break
        time.sleep(0.2)
    return {
        name: json.loads((results / f"{name}.json").read_text())
        for name in names
        if (results / f"{name}.json").exists()
    }


def engine_main(name: str, folder: Path, results: Path, names: list[str]) -> None:
    """One engine's process: write its results as JSON. The plain engine waits for those of `names`."""
    start = time.perf_counter()
    llm = make_engine(name, folder)
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    found = {
        "load_seconds": time.perf_counter() - start,
        "replaying": sum(bool(getattr(layer, "replays", False)) for layer in layers),
        "block_size": config.cache_config.mamba_block_size,
        "cache_mode": config.cache_config.mamba_cache_mode,
    }
    folded = watch_commits() if name.startswith("ours") else []
    parts = {"greedy": run(llm, prompts(), 0.0), "sampled": run(llm, prompts(), TEMPERATURE)}
    if name.endswith("cached"):
        longer = [
            [*prompt, *tokens, *range(10, 10 + EXTRA)]
            for prompt, tokens in zip(parts["greedy"]["prompts"], parts["greedy"]["tokens"], strict=True)
        ]
        parts["follow-up"] = run(llm, longer, 0.0, [60] * len(longer))
    elif name != "plain":
        parts["sampled again"] = run(llm, prompts(), TEMPERATURE)
    found["commits"] = len(folded)
    if name == "plain":
        texts = others(results, names) | {"plain": {"parts": parts}}
        found["scores"] = {
            other: {part: score(llm, each) for part, each in data["parts"].items() if part != "sampled again"}
            for other, data in texts.items()
        }
    unfinished = results / f"{name}.unfinished"
    unfinished.write_text(json.dumps(found | {"parts": parts}))
    unfinished.rename(results / f"{name}.json")  # the plain engine must not read half a file


def spawn(names: list[str], folder: Path, results: Path, log: Path, gpus: list[int]) -> dict[str, subprocess.Popen]:
    """Start the processes of some engines, one GPU after the other; `log` is the common beginning of their logs."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "OMP_NUM_THREADS": "1"} | os.environ
    started = {}
    for number, name in enumerate(names):
        command = [sys.executable, __file__, "--engine", name, "--folder", str(folder), "--results", str(results)]
        command += ["--only", ",".join(n for n in names if n != "plain")]
        with Path(f"{log}{name}.log").open("w") as stream:
            visible = {"CUDA_VISIBLE_DEVICES": str(gpus[number % len(gpus)])}
            started[name] = subprocess.Popen(
                command, env=environment | visible, stdout=stream, stderr=subprocess.STDOUT
            )
    return started


def finish(started: dict[str, subprocess.Popen], results: Path, log: Path) -> None:
    """Wait for processes to end; tell the plain engine, and the user, of those that failed."""
    since, waiting = time.monotonic(), dict(started)
    while waiting:
        for name, process in list(waiting.items()):
            if process.poll() is None:
                continue
            del waiting[name]
            print(f"       {log.name}{name}: {time.monotonic() - since:.0f} s", flush=True)
            if process.returncode:
                (results / f"{name}.failed").touch()
                print("\n".join(Path(f"{log}{name}.log").read_text().splitlines()[-25:]), flush=True)
        time.sleep(0.2)


def figures(engines: dict) -> dict:
    """What is kept of the engines' results: everything but the texts."""
    return {
        name: {key: value for key, value in data.items() if key != "parts"}
        | {part: {k: found[k] for k in ("accepted", "seconds", "cached")} for part, found in data["parts"].items()}
        for name, data in engines.items()
    }


def parse_args() -> argparse.Namespace:
    """The command line; the last three options are this program's own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gate", choices=("both", *ENGINES), default="both")
    parser.add_argument("--only", help="engines, separated by commas")
    parser.add_argument(
        "--gpus", default="0", help="numbers of the GPUs to spread the engines over, separated by commas"
    )
    parser.add_argument("--out", type=Path, help="write laws and figures here, and the engines' logs beside it")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main(args: argparse.Namespace) -> int:
    """Start all engines, wait for them, and check."""
    from kda_pair import write_pair

    gates = list(ENGINES) if args.gate == "both" else [args.gate]
    chosen = {g: [n for n in ENGINES[g] if args.only is None or n in args.only.split(",")] for g in gates}
    gpus, reports, kept = [int(g) for g in args.gpus.split(",")], {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.out.parent if args.out else Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        running = []
        for gate in gates:
            folder, results = Path(temporary) / gate, Path(temporary) / f"{gate}-results"
            results.mkdir()
            write_pair(folder, full_rank=gate == "full-rank")
            log = logs / f"kda-{gate}-"
            started = spawn(chosen[gate], folder, results, log, gpus)
            watcher = threading.Thread(target=finish, args=(started, results, log))
            watcher.start()
            running.append((gate, results, watcher))
        for gate, results, watcher in running:
            watcher.join()
            engines = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
            reports[gate] = check_gate(gate, engines, chosen[gate])
            kept[gate] = figures(engines)
    laws = [law for report in reports.values() for law in report.laws]
    failed = sum(not law["holds"] for law in laws)
    print(f"{len(laws) - failed} of {len(laws)} laws hold")
    if args.out:
        found = {g: {"laws": r.laws, "notes": r.notes, "engines": kept[g]} for g, r in reports.items()}
        args.out.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    arguments = parse_args()
    if arguments.engine:
        engine_main(arguments.engine, arguments.folder, arguments.results, [n for n in arguments.only.split(",") if n])
    else:
        sys.exit(main(arguments))
