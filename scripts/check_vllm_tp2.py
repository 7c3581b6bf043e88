"""vLLM's V2 runner on one GPU and on two: the same drafts on every rank, the same tokens, the same acceptance.

    python3 scripts/check_vllm_tp2.py --gpus 2 --out tp.json        five engines side by side, nine processes
    python3 scripts/check_vllm_tp2.py --engines qwen3/plain/1,qwen3/gated/2,qwen3/rnn/2 --gpus 2
    python3 scripts/check_vllm_tp2.py --engines default/plain/1,default/vanilla/1 --target /tmp/smollm2

Pairs: a tiny random Qwen3 in float32 (`serve_heads_vllm.py`), and a tiny random Kimi K3 (`kda_pair.py`) in bfloat16,
which is what its kernels take. The embedded pair has 9 heads, which cannot be cut in two. An engine is named by pair,
head ("plain" has no drafter) and tensor-parallel size. All ranks compare their drafts and emitted tokens after every
step, and a difference ends the run with an error.

Laws printed as OK or FAILED: greedy output equals the plain one (float32), a seeded request repeats, and it is the same
alone as in a batch (float32); greedy output is the same on one GPU and on two (float32), and acceptance agrees. In
bfloat16 near ties are rounded one way or the other, so there the numbers are only printed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAIRS = ("qwen3", "k3", "default")
ENGINES = "qwen3/plain/1,qwen3/gated/1,qwen3/gated/2,k3/vanilla/1,k3/vanilla/2"
MAX_TOKENS = 48
NUM_DRAFTS = 5
NUM_REQUESTS = 8
EXACT = {"qwen3": True, "default": True, "k3": False}
ACCEPTANCE_TOLERANCE = 0.15  # tokens a step; the sampled runs differ where rounding moves a draw


def folders(args: argparse.Namespace, pair: str, mode: str) -> tuple[str, str]:
    """Target and drafter of an engine."""
    if pair == "default":
        return args.target, args.drafter
    return str(args.folder / pair / "target"), str(args.folder / pair / ("drafter" if pair == "k3" else mode))


def engine_options(args: argparse.Namespace, pair: str, mode: str, tp: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    from side_by_side import ENGINE_OPTIONS

    target, drafter = folders(args, pair, mode)
    options: dict[str, Any] = ENGINE_OPTIONS | {
        "model": target,
        "dtype": "float32" if EXACT[pair] else "bfloat16",
        "tensor_parallel_size": tp,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
        "enforce_eager": not args.graphs,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if args.graphs:  # as much as is needed to run in graphs, and no torch.compile, which takes most of a start
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options["kernel_config"] = {"enable_jit_warmup": False, "enable_flashinfer_autotune": False}
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
    """A child: one engine, its runs as a line of JSON."""
    from side_by_side import answers, generate
    from vllm import LLM

    kept, started = answers(), time.perf_counter()
    pair, mode, tp = args.engine.split("/")
    llm = LLM(**engine_options(args, pair, mode, int(tp)))
    result: dict[str, Any] = {"ready_s": time.perf_counter() - started}
    prompts = prompts_of(pair, args.target)
    result["greedy"], result["greedy_per_step"] = generate(llm, prompts, 0.0, MAX_TOKENS)
    result["sampled"], result["sampled_per_step"] = generate(llm, prompts, 1.0, MAX_TOKENS)
    result["sampled_again"], _ = generate(llm, prompts, 1.0, MAX_TOKENS)
    result["alone"], _ = generate(llm, prompts[3:4], 1.0, MAX_TOKENS, first_seed=103)
    kept.write(json.dumps(result | {"seconds": time.perf_counter() - started}) + "\n")
    kept.close()


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All engines at once; one GPU each at tp 1, all of them at more. Each is written down as it ends."""
    from side_by_side import Job, run_jobs

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        write_pairs(Path(scratch), args.engines)
        jobs = []
        for pair, mode, tp in args.engines:
            passed_on = ["--engine", f"{pair}/{mode}/{tp}", "--folder", scratch, *args.passed_on]
            jobs.append(Job(f"{pair}-{mode}-tp{tp}", passed_on, tp, mode != "plain"))
        for index, result in run_jobs(__file__, jobs, gpus=args.gpus, logs=args.logs, limit_s=args.limit):
            results.append(dict(zip(("pair", "mode", "tp"), args.engines[index], strict=True)) | result)
            args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
            print(f"{jobs[index].name} ended", file=sys.stderr, flush=True)
    return results


def write_pairs(folder: Path, engines: Sequence[tuple[str, str, int]]) -> None:
    """The random pairs that the engines need, in folders of their names."""
    if any(pair == "k3" for pair, _, _ in engines):
        from kda_pair import write_pair

        write_pair(folder / "k3")
    heads = {mode for pair, mode, _ in engines if pair == "qwen3"}
    if heads:
        from serve_heads_vllm import write_drafter, write_target

        target = write_target(folder / "qwen3" / "target")
        for head in heads - {"plain"}:
            write_drafter(folder / "qwen3" / head, head, target)


def find_plain(results: Sequence[dict[str, Any]], pair: str) -> dict[str, Any] | None:
    """The plain run of a pair; None if there was none or it failed."""
    plain = [each for each in results if (each["pair"], each["mode"]) == (pair, "plain") and "error" not in each]
    return plain[0] if plain else None


def report(law: str, holds: bool | None, detail: str = "") -> bool:
    """Print a law; None is a number without a law."""
    word = {True: "OK", False: "FAILED", None: "--"}[holds]
    print(f"{word:6} {law}{': ' + detail if detail else ''}")
    return holds is not False


def equal(left: Sequence[list[int]], right: Sequence[list[int]]) -> str:
    """How many of the requests are the same."""
    return f"{sum(a == b for a, b in zip(left, right, strict=True))} of {len(left)} requests are equal"


def check_runs(results: Sequence[dict[str, Any]]) -> bool:
    """The laws of each engine by itself and against the plain one."""
    ok = True
    for ours in results:
        pair, where = ours["pair"], f"{ours['pair']} {ours['mode']}, tp={ours['tp']}"
        if "error" in ours:
            ok = report(f"{where}: runs to its end", False, ours["error"])
            continue
        plain = find_plain(results, pair)
        if ours["mode"] == "plain":
            continue

        def law(words: str, left: Any, right: Any, exact: bool = EXACT[pair], where: str = where) -> bool:
            return report(f"{where}: {words}", left == right if exact else None, equal(left, right))

        ok &= report(f"{where}: runs to its end, no step on which ranks differed", True, f"{ours['seconds']:.0f} s")
        if plain is not None:
            ok &= law("greedy output is the plain one", ours["greedy"], plain["greedy"])
        ok &= law("seeded requests repeat", ours["sampled"], ours["sampled_again"])
        ok &= law("a seeded request is the same alone", ours["alone"], ours["sampled"][3:4])
        greedy, sampled = ours["greedy_per_step"], ours["sampled_per_step"]
        accepted = f"{greedy:.2f} tokens a step greedily, {sampled:.2f} sampled"
        ok &= report(f"{where}: drafts are accepted", min(greedy, sampled) > 1.05, accepted)
    return ok


def compare(results: Sequence[dict[str, Any]]) -> bool:
    """The laws between runs at tp 1 and at more."""
    ok = True
    for a in results:
        for b in results:
            if "error" in a or "error" in b or (a["pair"], a["mode"]) != (b["pair"], b["mode"]) or a["tp"] >= b["tp"]:
                continue
            where = f"{a['pair']} {a['mode']}: tp={a['tp']} and tp={b['tp']}"
            same = a["greedy"] == b["greedy"] if EXACT[a["pair"]] else None
            ok &= report(f"{where}, greedy output", same, equal(a["greedy"], b["greedy"]))
            report(f"{where}, seeded output", None, equal(a["sampled"], b["sampled"]))
            if a["mode"] != "plain":
                for name in ("greedy_per_step", "sampled_per_step"):
                    close = abs(a[name] - b[name]) < ACCEPTANCE_TOLERANCE
                    ok &= report(f"{where}, {name}", close, f"{a[name]:.3f} and {b[name]:.3f}")
    return ok


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", default=ENGINES, help=f"pair/head/tp, pairs {', '.join(PAIRS)}")
    parser.add_argument("--gpus", type=int, default=1, help="spread the one-GPU engines over so many")
    parser.add_argument("--target", help="folder of the default target; needed for the pair default")
    parser.add_argument("--drafter", help="folder of its drafter; the embedded one if left out")
    parser.add_argument("--graphs", action="store_true", help="in CUDA graphs")
    parser.add_argument("--limit", type=float, default=240, help="seconds until what still runs is stopped")
    parser.add_argument("--out", type=Path, default=Path("check_vllm_tp.json"))
    parser.add_argument("--logs", type=Path, default=Path("check_vllm_tp_logs"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.passed_on = list(argv)
    args.engines = [(pair, mode, int(tp)) for pair, mode, tp in (each.split("/") for each in args.engines.split(","))]
    if any(pair == "default" for pair, _, _ in args.engines):
        if args.target is None:
            parser.error("--target is missing: scripts/bench_vllm_gpu.py --export-target DIR writes it")
        if args.drafter is None:
            from dspark.default import default_drafter_path

            args.drafter = str(default_drafter_path())
    return args


def main() -> None:
    """Serve one engine (as a child), or run all engines and check them."""
    sys.path.insert(0, str(Path(__file__).parent))  # absent with -P
    args = parse_args(sys.argv[1:])
    if args.engine is not None:
        serve(args)
        return
    results = run_all(args)
    sys.exit(0 if check_runs(results) & compare(results) else 1)


if __name__ == "__main__":
    main()
