"""KDA targets on vLLM's V2 runner: our verify and commit against vLLM's own, on a GPU. Prints OK or FAILED per law.

    python3 scripts/check_vllm_kda.py --out kda.json        both gates, twelve engines: about two minutes
    ... --gate low-rank                                     Kimi Linear's layers only; full-rank: Kimi K3's
    ... --only plain,ours-graph,full-rank/vllm-graph        some engines, and the laws that need no others

Each engine is a process of its own, forked once vLLM is imported, on a tiny random target with a drafter that guesses
two tokens of three (`kda_pair.py`); they run side by side, spread over the GPUs, and need 3 GiB each. vLLM drafts and
judges in all of them; only the KDA kernels differ, by additional_config "dspark_kda". Requests have prompts of 180 to
250 tokens and end at different lengths, more of them than run at a time: windows of 9 tokens, batches mixed with
prefill, and graphs padded with rows that have none. With prefix caching, texts go on over three blocks, and follow-ups
start from the states that decoding stored at the boundaries.

Exact equality with plain decoding is not to be had in bfloat16: two logits that round to the same number are told apart
by the order of a sum. So the plain engine reads every text that another engine wrote and gives the logarithm of
each token's probability; for a greedy text the distance to the best token (the gap) is 0, or the size of the rounding.
vLLM's own kernels show which gaps rounding makes.

Laws are printed, and appended to the .jsonl beside --out, as soon as the engines that they need have ended.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from itertools import zip_longest
from pathlib import Path

from kda_laws import FOLLOW_UP_TOKENS, LONG_TEXT, MAX_TOKENS, WINDOW_DRAFTS, GateCheck, prompts

TEMPERATURE = 0.4
RUNNING = 5
GRAPHS = {True: [9, 18, 36, 45], False: [1, 2, 4]}  # tokens of captured batches, with drafts and without
PATIENCE = 300  # seconds that the plain engine waits for the others

ENGINES = {
    "low-rank": ("plain", "ours-graph", "ours-cached", "ours-eager", "vllm-snapshots", "vllm-replay"),
    "full-rank": ("plain", "ours-cached", "vllm-cached", "ours-graph", "vllm-graph", "ours-eager"),
}
EXTRA = 7  # tokens that a follow-up adds to an earlier text


def engine_options(name: str, folder: Path) -> dict:
    """Arguments of the engine of a name, on the pair in `folder`."""
    additional = {"dspark": {"chain": "vllm", "verification": "vllm"}}
    if name.startswith("vllm"):
        additional["dspark_kda"] = "vllm"
    options = {
        "model": str(folder / "target"),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": RUNNING,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.03,
        "enforce_eager": name.endswith("eager"),
        "compilation_config": {"cudagraph_capture_sizes": GRAPHS[name != "plain"]},
        "kernel_config": {"enable_flashinfer_autotune": False},
        "enable_prefix_caching": name.endswith("cached"),
        "prefix_cache_retention_interval": None,  # every block; vLLM's default keeps states of prompts only
        "disable_log_stats": False,
        "additional_config": additional,
        "seed": 0,
    }
    if name != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": str(folder / "drafter"),
            "num_speculative_tokens": WINDOW_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }
        options["use_replayssm"] = name != "vllm-snapshots"
    return options


def make_engine(name: str, folder: Path):
    """The engine of a name."""
    from side_by_side import start_quickly
    from vllm import LLM

    start_quickly()
    return LLM(**engine_options(name, folder))


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
    positions: list[float] = []
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            counts["drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            positions = list(metric.values)
    return [counts.get("drafts", 0.0), *positions]


def run(llm, texts: list[list[int]], temperature: float, lengths=None, first_seed: int = 100) -> dict:
    """Generate, the i-th text with seed first_seed + i; tokens, cached tokens, seconds and what was accepted."""
    from vllm import SamplingParams

    before, start = acceptance(llm), time.perf_counter()
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=first_seed + i, ignore_eos=True, detokenize=False)
        for i, n in enumerate(lengths or MAX_TOKENS)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    return {
        "prompts": texts,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "cached": [o.num_cached_tokens or 0 for o in outputs],
        "seconds": time.perf_counter() - start,
        "accepted": [a - b for a, b in zip_longest(acceptance(llm), before, fillvalue=0.0)],
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


def score_others(llm, results: Path, names: list[str]) -> None:
    """Score what the engines of these names wrote, each as soon as it is there, or has failed."""
    deadline, missing = time.monotonic() + PATIENCE, list(names)
    while missing and time.monotonic() < deadline:
        for name in missing[:]:
            if (results / f"{name}.json").exists():
                write_scores(llm, results, name)
            if (results / f"{name}.json").exists() or (results / f"{name}.failed").exists():
                missing.remove(name)
        time.sleep(0.2)
    if missing:
        print(f"plain: gave up waiting for {', '.join(missing)}")


def write_scores(llm, results: Path, name: str) -> None:
    """What the plain engine thinks of another's texts, in a file beside them."""
    parts = json.loads((results / f"{name}.json").read_text())["parts"]
    scores = {part: score(llm, each) for part, each in parts.items() if part != "sampled again"}
    write_whole(results / f"{name}.scores.json", scores)


def write_whole(path: Path, data: dict) -> None:
    """Write JSON that nobody can read half of."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(data))
    unfinished.rename(path)


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
        parts["long"] = run(llm, prompts(), 0.0, [LONG_TEXT - len(prompt) for prompt in prompts()])
        follow_ups = [
            [*prompt, *tokens, *range(10, 10 + EXTRA)]
            for prompt, tokens in zip(parts["long"]["prompts"], parts["long"]["tokens"], strict=True)
        ]
        parts["follow-up"] = run(llm, follow_ups, 0.0, [FOLLOW_UP_TOKENS] * len(follow_ups))
    elif name != "plain":
        parts["sampled again"] = run(llm, prompts(), TEMPERATURE)
    write_whole(results / f"{name}.json", found | {"commits": len(folded), "parts": parts})
    if name == "plain":
        write_scores(llm, results, name)
        score_others(llm, results, names)


def prepare(folder: Path) -> None:
    """Import vLLM and resolve the models' classes, once for all engines; nothing of it touches a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(**engine_options("ours-graph", folder)).create_engine_config()
    from vllm.v1.worker import gpu_worker  # noqa: F401 (for the processes to come)
    from vllm.v1.worker.gpu import model_runner  # noqa: F401


def forked_main(name: str, folder: Path, results: Path, names: list[str], log: Path) -> None:
    """One engine's process, forked: as if it had been started with its log as output."""
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    code = 1
    try:
        engine_main(name, folder, results, names)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)  # no tidying up: what the parent left here is not this process's


def run_engines(waiting: list[tuple[str, str]], at_once: int, begin, checks: dict[str, GateCheck], logs: Path) -> None:
    """Run all engines, `at_once` of them at a time, and check what can be checked whenever one has ended."""
    since, running = time.monotonic(), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            running[waiting[0]] = begin(*waiting[0])
            del waiting[0]
        for (gate, name), process in list(running.items()):
            if (code := process.exitcode) is not None:
                del running[gate, name]
                checks[gate].ended(name, code, time.monotonic() - since)
                if code:
                    print("\n".join(log_of(logs, gate, name).read_text().splitlines()[-25:]), flush=True)
        for check in checks.values():
            check.update()
        time.sleep(0.2)


def log_of(logs: Path, gate: str, name: str) -> Path:
    """Where an engine's process writes."""
    return logs / f"kda-{gate}-{name}.log"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gate", choices=("both", *ENGINES), default="both")
    parser.add_argument("--only", help="engines, or one gate's as GATE/ENGINE, separated by commas")
    parser.add_argument(
        "--gpus", default="0", help="numbers of the GPUs to spread the engines over, separated by commas"
    )
    parser.add_argument("--at-once", type=int, default=8, help="most engines at a time; two more than gates at least")
    parser.add_argument("--out", type=Path, help="write laws and figures here; the engines' logs and texts beside it")
    return parser.parse_args()


def main(args: argparse.Namespace) -> int:
    """Run all engines, and check."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "OMP_NUM_THREADS": "1"}
    from kda_pair import write_pair

    gates = list(ENGINES) if args.gate == "both" else [args.gate]
    only = [name for gate in ENGINES for name in ENGINES[gate]] if args.only is None else args.only.split(",")
    chosen = {g: [n for n in ENGINES[g] if n in only or f"{g}/{n}" in only] for g in gates}
    gpus, checks = args.gpus.split(","), {}
    journal = args.out.with_suffix(".jsonl") if args.out else None
    if journal:
        journal.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.out.parent if args.out else Path(temporary)
        for gate in gates:
            results = logs / f"kda-{gate}"  # what engines wrote outlives this program
            results.mkdir(parents=True, exist_ok=True)
            for old in results.iterdir():
                old.unlink()
            checks[gate] = GateCheck(gate, chosen[gate], results, journal)
            write_pair(Path(temporary) / gate, full_rank=gate == "full-rank")
        prepare(Path(temporary) / gates[0])
        print("       ready, forking the engines' processes", flush=True)
        todo = [(gate, name) for gate in gates for name in chosen[gate]]
        numbers = {job: number for number, job in enumerate(todo)}

        def begin(gate: str, name: str):
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[numbers[gate, name] % len(gpus)]
            others = [other for other in chosen[gate] if other != "plain"]
            arguments = (name, Path(temporary) / gate, checks[gate].folder, others, log_of(logs, gate, name))
            process = multiprocessing.get_context("fork").Process(target=forked_main, args=arguments)
            process.start()
            return process

        run_engines(todo, args.at_once, begin, checks, logs)
    laws = [law for check in checks.values() for law in check.laws]
    failed = sum(not law["holds"] for law in laws)
    print(f"{len(laws) - failed} of {len(laws)} laws hold")
    if args.out:
        found = {g: {"laws": c.laws, "notes": c.notes, "engines": c.figures()} for g, c in checks.items()}
        args.out.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(parse_args()))
