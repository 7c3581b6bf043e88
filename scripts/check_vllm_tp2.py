"""vLLM's V2 runner on one GPU and on two: the same drafts on every rank, the same tokens, the same acceptance.

    python3 scripts/check_vllm_tp2.py --tp 1 --out tp1.json
    python3 scripts/check_vllm_tp2.py --tp 2 --out tp2.json
    python3 scripts/check_vllm_tp2.py --compare tp1.json tp2.json
    ... --tp 1 --pairs default --target /tmp/smollm2      the embedded pair; its 9 heads cannot be cut in two

Pairs: a tiny random Qwen3 in float32 with three kinds of head (`serve_heads_vllm.py`), and a tiny random Kimi K3
(`kda_pair.py`) in bfloat16, which is what its kernels take. Each has a plain engine, and one for each drafter; in
those all ranks compare their drafts and emitted tokens after every step, and a difference ends the run with an error.

Laws printed as OK or FAILED: within a file, greedy output equals the plain one (float32), a seeded request repeats, and
it is the same alone as in a batch (float32); between files, greedy output is the same on one GPU and on two (float32),
and acceptance agrees. In bfloat16 near ties are rounded one way or the other, so there the numbers are only printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENGINES = {
    "qwen3": ("plain", "vanilla", "gated", "rnn"),
    "k3": ("plain", "vanilla"),
    "default": ("plain", "vanilla"),
}
MAX_TOKENS = 96
NUM_DRAFTS = 5
NUM_REQUESTS = 8
EXACT = {"qwen3": True, "default": True, "k3": False}
ACCEPTANCE_TOLERANCE = 0.15  # tokens a step; the sampled runs differ where rounding moves a draw
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


def folders(args: argparse.Namespace, pair: str, mode: str) -> tuple[str, str]:
    """Target and drafter of an engine."""
    if pair == "default":
        return args.target, args.drafter
    return str(args.folder / pair / "target"), str(args.folder / pair / ("drafter" if pair == "k3" else mode))


def engine_options(args: argparse.Namespace, pair: str, mode: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    target, drafter = folders(args, pair, mode)
    options: dict[str, Any] = {
        "model": target,
        "dtype": "float32" if EXACT[pair] else "bfloat16",
        "tensor_parallel_size": args.tp,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**31,
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": False,
        "enforce_eager": args.eager,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if mode != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": drafter,
            "num_speculative_tokens": NUM_DRAFTS,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "standard",
        }
        options["additional_config"] = {"dspark": {"check_ranks": True}}
        options["use_replayssm"] = pair == "k3"
    return options


def prompts_of(pair: str, target: str) -> list[list[int]]:
    """Prompts of the packaged set for the default pair, arbitrary ids for the random ones."""
    if pair != "default":
        return [[5 + (7 * i + 13 * t) % 500 for t in range(40 + 9 * i)] for i in range(NUM_REQUESTS)]
    from transformers import AutoTokenizer

    from dspark.evals import load_dataset

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [prompt.text for prompt in load_dataset("default", NUM_REQUESTS).prompts]
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in texts
    ]
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]


def serve(args: argparse.Namespace) -> None:
    """A child: one engine; its runs as one JSON object on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    pair, mode = args.engine.split("/")
    started = time.perf_counter()
    llm = LLM(**engine_options(args, pair, mode))
    result: dict[str, Any] = {"pair": pair, "mode": mode, "tp": args.tp, "ready_s": time.perf_counter() - started}
    prompts = prompts_of(pair, args.target)
    result["greedy"], result["greedy_per_step"] = generate(llm, prompts, 0.0)
    result["sampled"], result["sampled_per_step"] = generate(llm, prompts, 1.0)
    result["sampled_again"], _ = generate(llm, prompts, 1.0)
    result["alone"], _ = generate(llm, prompts[3:4], 1.0, first_seed=103)
    answers.write(json.dumps(result) + "\n")
    answers.close()


def generate(llm: Any, prompts: list[list[int]], temperature: float, first_seed: int = 100) -> tuple[Any, float]:
    """Tokens of every request, and tokens a step over all of them."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, seed=first_seed + i, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False
        )
        for i in range(len(prompts))
    ]
    before = counters(llm)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    after = counters(llm)
    steps, accepted = (after[name] - before[name] for name in COUNTERS)
    return [list(output.outputs[0].token_ids) for output in outputs], 1 + accepted / steps if steps else 1.0


def counters(llm: Any) -> dict[str, float]:
    """vLLM's speculation counters; 0 where it does not speculate."""
    values = dict.fromkeys(COUNTERS, 0.0)
    for metric in llm.get_metrics():
        if metric.name in values:
            values[metric.name] += metric.value
    return values


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The engines of a pair side by side, one pair after the other."""
    results = []
    args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_pairs(Path(scratch), args.pairs)
        for pair in args.pairs:
            children = []
            for mode in ENGINES[pair]:
                log = args.logs / f"tp{args.tp}-{pair}-{mode}.log"
                command = [sys.executable, __file__, "--engine", f"{pair}/{mode}", "--folder", scratch, *args.passed_on]
                environment = os.environ | {"VLLM_PLUGINS": "" if mode == "plain" else "dspark"}
                pipes = {"stdout": subprocess.PIPE, "stderr": log.open("w")}
                children.append((log, subprocess.Popen(command, **pipes, env=environment, text=True)))
            for log, child in children:
                output, _ = child.communicate()
                if not output:
                    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
                    print(f"FAILED {log.stem}: the engine ended; the end of {log}:\n{tail}")
                    continue
                results.append(json.loads(output))
    return results


def write_pairs(folder: Path, pairs: Sequence[str]) -> None:
    """The random pairs, in folders of their names."""
    sys.path.insert(0, str(Path(__file__).parent))  # absent with -P
    if "k3" in pairs:
        from kda_pair import write_pair

        write_pair(folder / "k3")
    if "qwen3" in pairs:
        from serve_heads_vllm import write_drafter, write_target

        target = write_target(folder / "qwen3" / "target")
        for head in ENGINES["qwen3"][1:]:
            write_drafter(folder / "qwen3" / head, head, target)


def find(results: Sequence[dict[str, Any]], pair: str, mode: str) -> dict[str, Any] | None:
    """The run of an engine, None if it failed."""
    return next((each for each in results if (each["pair"], each["mode"]) == (pair, mode)), None)


def report(law: str, holds: bool | None, detail: str = "") -> bool:
    """Print a law; None is a number without a law."""
    word = {True: "OK", False: "FAILED", None: "--"}[holds]
    print(f"{word:6} {law}{': ' + detail if detail else ''}")
    return holds is not False


def equal(left: Sequence[list[int]], right: Sequence[list[int]]) -> str:
    """How many of the requests are the same."""
    return f"{sum(a == b for a, b in zip(left, right, strict=True))} of {len(left)} requests are equal"


def check_file(results: Sequence[dict[str, Any]], pairs: Sequence[str]) -> bool:
    """The laws within one run."""
    ok = True
    for pair, mode in [(name, mode) for name in pairs for mode in ENGINES[name][1:]]:
        plain, ours = find(results, pair, "plain"), find(results, pair, mode)
        if plain is None or ours is None:
            ok = report(f"{pair} {mode}: its engine and the plain one ran", False)
            continue
        exact, where = EXACT[pair], f"{pair} {mode}, tp={ours['tp']}"

        def law(words: str, left: Any, right: Any, exact: bool = exact, where: str = where) -> bool:
            return report(f"{where}: {words}", left == right if exact else None, equal(left, right))

        ok &= law("greedy output is the plain one", ours["greedy"], plain["greedy"])
        ok &= law("seeded requests repeat", ours["sampled"], ours["sampled_again"])
        ok &= law("a seeded request is the same alone", ours["alone"], ours["sampled"][3:4])
        greedy, sampled = ours["greedy_per_step"], ours["sampled_per_step"]
        accepted = f"{greedy:.2f} tokens a step greedily, {sampled:.2f} sampled"
        ok &= report(f"{where}: drafts are accepted", min(greedy, sampled) > 1.05, accepted)
        ok &= report(f"{where}: no step on which ranks differed", True)
    return ok


def compare(first: Path, second: Path) -> bool:
    """The laws between two runs."""
    left, right = (json.loads(path.read_text(encoding="utf-8")) for path in (first, second))
    ok = True
    for pair, modes in ENGINES.items():
        for mode in modes:
            a, b = find(left, pair, mode), find(right, pair, mode)
            if a is None or b is None:
                continue
            where = f"{pair} {mode}: tp={a['tp']} and tp={b['tp']}"
            same = a["greedy"] == b["greedy"] if EXACT[pair] else None
            ok &= report(f"{where}, greedy output", same, equal(a["greedy"], b["greedy"]))
            report(f"{where}, seeded output", None, equal(a["sampled"], b["sampled"]))
            if mode != "plain":
                for name in ("greedy_per_step", "sampled_per_step"):
                    close = abs(a[name] - b[name]) < ACCEPTANCE_TOLERANCE
                    ok &= report(f"{where}, {name}", close, f"{a[name]:.3f} and {b[name]:.3f}")
    return ok


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--target", help="folder of the default target; needed for the pair default")
    parser.add_argument("--drafter", help="folder of its drafter; the embedded one if left out")
    parser.add_argument("--pairs", default="qwen3,k3", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile; starts faster")
    parser.add_argument("--out", type=Path, default=Path("check_vllm_tp.json"))
    parser.add_argument("--logs", type=Path, default=Path("check_vllm_tp_logs"))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("FIRST", "SECOND"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.passed_on = list(argv)
    args.pairs = args.pairs.split(",")
    if args.compare is None and "default" in args.pairs and args.target is None:
        parser.error("--target is missing: scripts/bench_vllm_gpu.py --export-target DIR writes it")
    if args.drafter is None:
        from dspark.default import default_drafter_path

        args.drafter = str(default_drafter_path())
    return args


def main() -> None:
    """Compare two files, serve one engine (as a child), or run all engines and check them."""
    args = parse_args(sys.argv[1:])
    if args.engine is not None:
        serve(args)
        return
    if args.compare is not None:
        sys.exit(0 if compare(*args.compare) else 1)
    results = run_all(args)
    args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    sys.exit(0 if check_file(results, args.pairs) else 1)


if __name__ == "__main__":
    main()
