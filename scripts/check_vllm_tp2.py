"""vLLM's V2 runner on one GPU and on two: the same drafts on every rank, the same tokens, the same acceptance.

    python3 scripts/check_vllm_tp2.py --gpus 2 --target /tmp/smollm2 --out tp.json     ten engines, fifteen processes
    python3 scripts/check_vllm_tp2.py --engines qwen3/plain/1,qwen3/gated/2,qwen3/rnn/2 --gpus 2

Pairs: the embedded one in float32 (--target: `bench_vllm_gpu.py --export-target` writes it), a tiny random Qwen3 in
float32 (`serve_heads_vllm.py`), and a tiny random Kimi K3 (`kda_pair.py`) in bfloat16, which is what its kernels take.
The embedded pair has 9 heads, 3 of keys, which two ranks cannot share: default/unpadded/2 writes down what vLLM says,
and on more than one rank both its models get key heads of zeros, which changes no output (`padded_heads.py`).

An engine is named by pair, head ("plain" has no drafter) and tensor-parallel size. All ranks compare the Markov head's
weights once, and their drafts and emitted tokens after every step; a difference ends the run with an error.

Laws, printed as OK or FAILED when the engines that they need have ended: greedy output is that of plain decoding on one
GPU, or each of its tokens is the most probable one there but for rounding (the plain engine reads the text); a seeded
request repeats, and is the same alone as in a batch (in float32 on one GPU only: bfloat16 and sums over ranks round in
another way in a batch of another size); acceptance on two GPUs is that on one.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAIRS = ("default", "qwen3", "k3")
ENGINES = (
    "default/plain/1,k3/plain/1,qwen3/plain/1,default/vanilla/2,k3/vanilla/2,default/vanilla/1,k3/vanilla/1,"
    "qwen3/gated/2,default/unpadded/2"
)
MAX_TOKENS = 64
NUM_REQUESTS = 8
NUM_DRAFTS = {"qwen3": 5, "default": 8, "k3": 5}
EXACT = {"qwen3": True, "default": True, "k3": False}
ROUNDING = {True: 1e-3, False: 0.3}  # largest gap to the best token, as a difference of logits; float32, bfloat16
REFUSALS = (ValueError, RuntimeError, AssertionError)


def folders(args: argparse.Namespace, pair: str, mode: str, tp: int) -> tuple[str, str]:
    """Target and drafter of an engine."""
    if pair == "default" and (tp == 1 or mode == "unpadded"):
        return args.target, args.drafter
    return str(args.folder / pair / "target"), str(args.folder / pair / (mode if pair == "qwen3" else "drafter"))


def engine_options(args: argparse.Namespace, pair: str, mode: str, tp: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    from side_by_side import ENGINE_OPTIONS

    target, drafter = folders(args, pair, mode, tp)
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
    if args.graphs:  # no torch.compile, which takes most of a start; vLLM does without it for Kimi by itself
        rows = 1 if mode == "plain" else 1 + NUM_DRAFTS[pair]
        graphs = {} if pair == "k3" else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options["compilation_config"] = graphs | {
            "cudagraph_capture_sizes": [rows * n for n in (1, 2, 4, NUM_REQUESTS)]
        }
        options["kernel_config"] = {"enable_flashinfer_autotune": False}
    if mode != "plain":
        options["speculative_config"] = {
            "method": "dspark",
            "model": drafter,
            "num_speculative_tokens": NUM_DRAFTS[pair],
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
    from check_vllm_kda import run, write_whole
    from side_by_side import answers, start_quickly
    from vllm import LLM

    kept, started = answers(), time.perf_counter()
    pair, mode, tp = args.engine.split("/")
    result: dict[str, Any] = {}
    start_quickly()
    try:
        llm = LLM(**engine_options(args, pair, mode, int(tp)))
    except REFUSALS as error:
        if mode != "unpadded":
            raise
        result["refused"] = " ".join(str(error).split())[:400]
    else:
        result["ready_s"] = time.perf_counter() - started
        prompts = prompts_of(pair, args.target)
        lengths = [MAX_TOKENS] * len(prompts)
        result["greedy"] = run(llm, prompts, 0.0, lengths)
        if mode == "plain":
            result["gaps"] = read_others(llm, args, pair, result["greedy"])
        else:
            write_whole(args.folder / f"{args.engine.replace('/', '-')}.json", result["greedy"])
            result["sampled"] = run(llm, prompts, 1.0, lengths)
            result["sampled_again"] = run(llm, prompts, 1.0, lengths)
            result["alone"] = run(llm, prompts[3:4], 1.0, lengths[:1], first_seed=103)
    kept.write(json.dumps(result | {"seconds": time.perf_counter() - started}) + "\n")
    kept.close()


def read_others(llm: Any, args: argparse.Namespace, pair: str, own: dict[str, Any]) -> dict[str, float]:
    """The largest gap between a token of an engine's greedy text and the best one, under this plain engine.

    Args:
        llm: it.
        args: the command line; texts appear in its folder as the other engines go on.
        pair: whose texts to read.
        own: this engine's text; its gap is the rounding between decoding and reading.
    """
    from check_vllm_kda import score

    waiting = {f"{p}-{mode}-{tp}" for p, mode, tp in args.engines if p == pair and mode not in ("plain", "unpadded")}
    gaps = {"plain": max(max(row) for row in score(llm, own)["gaps"])}
    deadline = time.monotonic() + 0.8 * args.limit
    while waiting and time.monotonic() < deadline:
        for name in sorted(waiting):
            path = args.folder / f"{name}.json"
            if path.exists():
                gaps[name] = max(max(row) for row in score(llm, json.loads(path.read_text()))["gaps"])
            if path.exists() or path.with_suffix(".failed").exists():
                waiting.remove(name)
        time.sleep(0.2)
    return gaps


def run_all(args: argparse.Namespace) -> bool:
    """All engines at once; one GPU each at tp 1, all of them at more. Each is written down and checked as it ends."""
    from side_by_side import Job, run_jobs

    results: list[dict[str, Any]] = []
    ok = True
    with tempfile.TemporaryDirectory() as scratch:
        write_pairs(Path(scratch), args)
        jobs = []
        for pair, mode, tp in args.engines:
            passed_on = ["--engine", f"{pair}/{mode}/{tp}", "--folder", scratch, *args.passed_on]
            jobs.append(Job(f"{pair}-{mode}-tp{tp}", passed_on, tp, mode != "plain"))
        for index, result in run_jobs(
            __file__, jobs, gpus=args.gpus, logs=args.logs, limit_s=args.limit, at_once=args.at_once
        ):
            pair, mode, tp = args.engines[index]
            if "error" in result:
                (Path(scratch) / f"{pair}-{mode}-{tp}.failed").touch()
            newest = {"pair": pair, "mode": mode, "tp": tp} | result
            results.append(newest)
            args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
            ok &= check_alone(newest)
            for other in results[:-1]:
                if other["pair"] == pair:
                    ok &= check_together(
                        *sorted((newest, other), key=lambda each: (each["mode"] != "plain", each["tp"]))
                    )
    return ok


def write_pairs(folder: Path, args: argparse.Namespace) -> None:
    """The pairs that the engines need, in folders of their names."""
    needed = {pair for pair, _, _ in args.engines}
    if "k3" in needed:
        from kda_pair import write_pair

        write_pair(folder / "k3")
    if "default" in needed:
        from padded_heads import pad_heads

        (folder / "default").mkdir()
        pad_heads(Path(args.target), folder / "default" / "target", 2)
        pad_heads(Path(args.drafter), folder / "default" / "drafter", 2)
    if "qwen3" in needed:
        from serve_heads_vllm import write_drafter, write_target

        target = write_target(folder / "qwen3" / "target")
        for head in {mode for pair, mode, _ in args.engines if pair == "qwen3"} - {"plain"}:
            write_drafter(folder / "qwen3" / head, head, target)


def report(law: str, holds: bool | None, detail: str = "") -> bool:
    """Print a law; None is a number without a law."""
    word = {True: "OK", False: "FAILED", None: "--"}[holds]
    print(f"{word:6} {law}{': ' + detail if detail else ''}", flush=True)
    return holds is not False


def equal(left: Sequence[list[int]], right: Sequence[list[int]]) -> str:
    """How many of the requests are the same."""
    return f"{sum(a == b for a, b in zip(left, right, strict=True))} of {len(left)} requests are equal"


def check_alone(run: dict[str, Any]) -> bool:
    """The laws of an engine by itself."""
    from kda_laws import mean_accepted

    pair, mode = run["pair"], run["mode"]
    where = f"{pair} {mode}, tp={run['tp']}"
    if "error" in run:
        return report(f"{where}: runs to its end", False, run["error"])
    if mode == "unpadded":
        return report(
            f"{where}: vLLM refuses heads that two ranks cannot share", "refused" in run, run.get("refused", "")
        )
    if mode == "plain":
        return report(f"{where}: runs to its end", True, f"{run['seconds']:.0f} s; gaps of texts {run['gaps']}")
    ok = report(f"{where}: runs to its end, and ranks agreed in every step", True, f"{run['seconds']:.0f} s")
    once, again, alone = (run[part]["tokens"] for part in ("sampled", "sampled_again", "alone"))
    ok &= report(f"{where}: seeded requests repeat", once == again, equal(once, again))
    same = alone == once[3:4] if EXACT[pair] and run["tp"] == 1 else None
    ok &= report(f"{where}: a seeded request is the same alone", same, equal(alone, once[3:4]))
    means = [mean_accepted(run, part)[0] for part in ("greedy", "sampled")]
    figure = f"{means[0]:.2f} of {NUM_DRAFTS[pair]} drafts a step greedily, {means[1]:.2f} sampled"
    return ok & report(f"{where}: drafts are accepted", min(means) > 0.05, figure)


def check_together(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The laws between two engines of a pair, the plain one or that of fewer ranks first."""
    from kda_laws import ERRORS, mean_accepted

    if "greedy" not in a or "greedy" not in b:
        return True
    pair, exact = a["pair"], EXACT[a["pair"]]
    where = f"{pair} {b['mode']}, tp={b['tp']}"
    same = a["greedy"]["tokens"] == b["greedy"]["tokens"]
    figure = equal(a["greedy"]["tokens"], b["greedy"]["tokens"])
    if a["mode"] == "plain":
        gap, own = (a["gaps"].get(name) for name in (f"{pair}-{b['mode']}-{b['tp']}", "plain"))
        holds = same or (gap is not None and gap <= max(ROUNDING[exact], 2 * own))
        figure += f"; largest gap under plain decoding {gap}, of its own text {own}"
        return report(f"{where}: greedy output is plain decoding's, or within rounding of it", holds, figure)
    if a["mode"] != b["mode"]:
        return True
    where += f" against tp={a['tp']}"
    report(f"{where}: greedy output", None, figure)
    report(f"{where}: seeded output", None, equal(a["sampled"]["tokens"], b["sampled"]["tokens"]))
    ok = True
    for part in ("greedy", "sampled"):
        (one, d_one), (two, d_two) = (mean_accepted(each, part) for each in (a, b))
        z = (two - one) / (math.hypot(d_one, d_two) or 1.0)
        ok &= report(f"{where}: {part} acceptance", abs(z) < ERRORS, f"{two:.3f} and {one:.3f}, z = {z:+.2f}")
    return ok


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", default=ENGINES, help=f"pair/head/tp, pairs {', '.join(PAIRS)}")
    parser.add_argument("--gpus", type=int, default=1, help="spread the one-GPU engines over so many")
    parser.add_argument("--target", help="folder of the default target; without it that pair is left out")
    parser.add_argument("--drafter", help="folder of its drafter; the embedded one if left out")
    parser.add_argument("--graphs", action="store_true", help="in CUDA graphs")
    parser.add_argument("--at-once", type=int, default=9, help="most engines at a time; more than there are plain ones")
    parser.add_argument("--limit", type=float, default=240, help="seconds until what still runs is stopped")
    parser.add_argument("--out", type=Path, default=Path("check_vllm_tp.json"))
    parser.add_argument("--logs", type=Path, default=Path("check_vllm_tp_logs"))
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.passed_on = list(argv)
    args.engines = [(pair, mode, int(tp)) for pair, mode, tp in (each.split("/") for each in args.engines.split(","))]
    if args.target is None and args.engine is None:
        print("--       the default pair is left out: --target is missing")
    args.engines = [each for each in args.engines if args.target is not None or each[0] != "default"]
    if args.target is not None and args.drafter is None:
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
    sys.exit(0 if run_all(args) else 1)


if __name__ == "__main__":
    main()
