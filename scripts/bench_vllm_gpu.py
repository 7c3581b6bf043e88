"""Speed of vLLM's V2 runner on a GPU: plainly, with its own DSpark, and with ours; outputs compared.

    python3 scripts/bench_vllm_gpu.py --export-target /tmp/smollm2             # once: the default target as a folder
    python3 scripts/bench_vllm_gpu.py --target /tmp/smollm2 --out runs.jsonl   # the whole matrix
    ... --modes plain,stock,ours --concurrency 1,16 --temperature 0 --repeats 3

One engine for each mode, with CUDA graphs, each in a process of its own; all stay up, and only one is asked at a time,
so that the modes take turns: for every concurrency and temperature, repeat by repeat, the modes one after the other.
An engine gets as many requests at once as the concurrency says, and when all have ended as many again, 12 requests at
least (the first run of each warms up, with fewer). Prefill, the scheduler and the answer's way back are in the time;
the text is not (token ids are compared). Sampled requests have other seeds in every repeat, the same in all modes.

Modes: plain; stock (vLLM's DSpark, plug-in off), stock-topk, stock-adaptive; ours, ours-topk, ours-fp8 (W2 in 8
bits), ours-adaptive (adaptive verification by the confidence head). MODE@K drafts K tokens whatever --num-draft-tokens
says: `ours@2,ours@4,ours@8,ours-adaptive` sets scheduling against fixed lengths, and the table is followed by adaptive
rates over the best fixed one of the same repeat.
Every run is appended to --out as one line of JSON, and is not repeated when the program is started again. Tokens per
step are vLLM's counters, 1 + accepted / steps over the run, and the time of a step is that of the run over its steps,
so that speed and luck in acceptance can be told apart. At temperature 0 outputs are compared with the plain ones;
two runs of one model may differ where two tokens are nearly equal, in bfloat16 above all, so the table says how many
requests are equal and where the others first differ.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MODES = ("plain", "stock", "stock-topk", "stock-adaptive", "ours", "ours-topk", "ours-fp8", "ours-adaptive")
DEFAULT_MODES = "plain,stock,ours,ours-topk"
MIN_REQUESTS = 12
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """--speculative-config of a mode."""
    name, _, drafts = args.mode.partition("@")
    if name == "plain":
        return None
    config: dict[str, Any] = {
        "method": "dspark",
        "model": args.drafter,
        "num_speculative_tokens": int(drafts) if drafts else args.num_draft_tokens,
        "draft_sample_method": args.drafting,
        "rejection_sample_method": "standard",
    }
    if name.endswith("-topk"):
        config["dspark_draft_topk"] = args.topk
    if name.endswith("-adaptive"):
        config["enable_adaptive_verification"] = True
    return config


def serve_commands(args: argparse.Namespace) -> None:
    """The engine's process: one line of JSON in for each run, one out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout; the log gets it
    from vllm import LLM, SamplingParams

    fp8 = args.mode.startswith("ours-fp8")
    options: dict[str, Any] = {"additional_config": {"dspark": {"w2": "fp8"}}} if fp8 else {}
    llm = LLM(
        model=args.target,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.concurrency),
        kv_cache_memory_bytes=args.kv_cache_gib * 2**30,
        gpu_memory_utilization=0.08,  # only looked at when an engine starts beside others
        enable_prefix_caching=False,  # the same prompts come again and again
        disable_log_stats=False,
        seed=0,
        speculative_config=speculative_config(args),
        **options,
    )
    prompts = [{"prompt_token_ids": ids} for ids in read_prompts(args)]
    answers.write(json.dumps({"ready": args.mode}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(run_once(llm, SamplingParams, prompts, json.loads(line), args.max_tokens)) + "\n")


def run_once(llm: Any, params_class: Any, prompts: list[Any], job: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """One run: token ids of every request, seconds, and what the counters grew by."""
    width = job["concurrency"]
    count = max(2 * width, MIN_REQUESTS) if job["repeat"] else max(width, 2)
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    first_seed = 1000 * job["repeat"]
    options = {"temperature": job["temperature"], "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    params = [params_class(seed=first_seed + i, **options) for i in range(count)]
    before = counters(llm)
    started = time.perf_counter()
    outputs = []
    for first in range(0, count, width):
        part = slice(first, first + width)
        outputs += llm.generate(chosen[part], params[part], use_tqdm=False)
    seconds = time.perf_counter() - started
    after = counters(llm)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    steps, accepted = (after[name] - before[name] for name in COUNTERS)
    return {"seconds": seconds, "steps": steps, "accepted": accepted, "tokens": tokens}


def counters(llm: Any) -> dict[str, float]:
    """vLLM's speculation counters; 0 where it does not speculate."""
    values = dict.fromkeys(COUNTERS, 0.0)
    for metric in llm.get_metrics():
        name = metric.name.removesuffix("_total")
        if name in values:
            values[name] += metric.value
    return values


def read_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Prompts in the target's chat template: of a JSON lines file with "prompt" or "text", or the packaged set."""
    from transformers import AutoTokenizer

    if args.prompts:
        lines = [json.loads(line) for line in Path(args.prompts).read_text(encoding="utf-8").splitlines() if line]
        texts = [line.get("prompt") or line["text"] for line in lines]
    else:
        from dspark.evals import load_dataset

        texts = [prompt.text for prompt in load_dataset("default", 64).prompts]
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in texts
    ]
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]


class Engine:
    """A mode's process."""

    def __init__(self, mode: str, args: argparse.Namespace) -> None:
        self.mode = mode
        environment = os.environ | {"VLLM_PLUGINS": "dspark" if mode.startswith("ours") else ""}
        command = [sys.executable, __file__, "--engine", mode, *args.passed_on]
        self.log = Path(args.logs) / f"{mode}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=environment,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Until the engine answers (SystemExit with the end of its log otherwise)."""
        if "ready" not in self.read():
            self.fail()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """One run."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.fail()
        return json.loads(line)

    def fail(self) -> None:
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:])
        raise SystemExit(f"the engine of mode {self.mode} ended; the end of {self.log}:\n{tail}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def jobs_of(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(mode, job) of the matrix in the order of running; repeat 0 warms up and is not counted."""
    for temperature in args.temperature:
        for concurrency in args.concurrency:
            for repeat in range(args.repeats + 1):
                for mode in args.modes:
                    yield mode, {"concurrency": concurrency, "temperature": temperature, "repeat": repeat}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is not in the file yet; all runs."""
    out = Path(args.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {key_of(run) for run in done}
    todo = [(mode, job) for mode, job in jobs_of(args) if key_of({"mode": mode} | job) not in known]
    engines: dict[str, Engine] = {}
    try:
        for mode in dict.fromkeys(mode for mode, _ in todo):
            engines[mode] = Engine(mode, args)
            if args.start == "serial":
                engines[mode].wait_until_ready()
        if args.start == "parallel":
            for engine in engines.values():
                engine.wait_until_ready()
        print(f"engines ready: {', '.join(engines)}", file=sys.stderr, flush=True)
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.5)
        for mode, job in todo:
            result = engines[mode].run(job)
            count = sum(map(len, result["tokens"]))
            run = {"mode": mode} | job | {"rate": count / result["seconds"], "count": count} | result
            run["tokens_per_step"] = 1 + run["accepted"] / run["steps"] if run["steps"] else 1.0
            engine_steps = (run["steps"] or count) / run["concurrency"]
            run["ms_a_step"] = 1e3 * run["seconds"] / engine_steps
            if run["temperature"] or not run["repeat"] or done_equal(done, run):
                run["tokens"] = None
            done.append(run)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(f"{mode} {job}: {run['rate']:.0f} tokens/s, {run['tokens_per_step']:.2f} a step", file=sys.stderr)
    finally:
        for engine in engines.values():
            engine.close()
    return done


def done_equal(done: Sequence[dict[str, Any]], run: dict[str, Any]) -> bool:
    """Whether an earlier repeat gave the same tokens; they are then not written again.

    Sampled ones never are: every repeat has seeds of its own, so that acceptance is averaged over more texts.
    """
    return any(key_of(other)[:3] == key_of(run)[:3] and other["tokens"] == run["tokens"] for other in done)


def tokens_of(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> list[list[int]] | None:
    """The run's tokens, which stand in the first repeat that gave them; None of sampled and of warming runs."""
    return next((other["tokens"] for other in runs if key_of(other)[:3] == key_of(run)[:3] and other["tokens"]), None)


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a run of the matrix one of a kind."""
    return run["mode"], run["concurrency"], run["temperature"], run["repeat"]


def first_differences(tokens: Sequence[list[int]], reference: Sequence[list[int]]) -> list[int]:
    """Position of the first difference of every request that differs."""
    places = []
    for ours, theirs in zip(tokens, reference, strict=True):
        if ours != theirs:
            places.append(next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1))
    return places


def table(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown: a row for each temperature, concurrency and mode."""
    lines = [
        "| T | concurrency | mode | tokens/s, median (lowest to highest) | vs plain | tokens a step | ms a step "
        "| equal to plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for temperature in args.temperature:
        for concurrency in args.concurrency:
            plain_rate, plain_tokens = None, None
            for mode in args.modes:
                chosen = [r for r in runs if key_of(r)[:3] == (mode, concurrency, temperature) and r["repeat"]]
                if not chosen:
                    continue
                rates = [run["rate"] for run in chosen]
                rate, tokens = statistics.median(rates), tokens_of(runs, chosen[0])
                if mode == "plain":
                    plain_rate, plain_tokens = rate, tokens
                equal = ""
                if temperature == 0 and mode != "plain" and plain_tokens and tokens:
                    places = first_differences(tokens, plain_tokens)
                    equal = f"{len(tokens) - len(places)} of {len(tokens)}"
                    equal += f", first differences at {sorted(places)[:4]}" if places else ""
                ratio = f"{rate / plain_rate:.2f}" if plain_rate else ""
                steps = statistics.mean(run["tokens_per_step"] for run in chosen)
                lines.append(
                    f"| {temperature:g} | {concurrency} | {mode} | {rate:.0f} ({min(rates):.0f} to {max(rates):.0f}) |"
                    f" {ratio} | {steps:.2f} | {statistics.median(r['ms_a_step'] for r in chosen):.2f} | {equal} |"
                )
    return "\n".join(lines)


def gains(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """A line for each temperature, concurrency and adaptive mode: its rate over that of the best fixed mode.

    The best is the one whose median rate is highest; ratios are taken within a repeat, since machines drift.
    """
    lines = []
    for temperature, concurrency in itertools.product(args.temperature, args.concurrency):
        here = [r for r in runs if key_of(r)[1:3] == (concurrency, temperature) and r["repeat"]]
        rates = {mode: {r["repeat"]: r["rate"] for r in here if r["mode"] == mode} for mode in args.modes}
        fixed = [mode for mode in args.modes if "-adaptive" not in mode and rates[mode]]
        best = max(fixed, key=lambda mode: statistics.median(rates[mode].values()), default=None)
        for mode in args.modes:
            if best is None or "-adaptive" not in mode:
                continue
            ratios = [rate / rates[best][repeat] for repeat, rate in rates[mode].items() if repeat in rates[best]]
            if ratios:
                lines.append(
                    f"T={temperature:g}, concurrency {concurrency}: {mode} over the best fixed ({best})"
                    f" {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                )
    return "\n".join(lines)


def export_target(folder: Path) -> None:
    """Write the default target as a Hugging Face folder; the variable DSPARK_TARGET may name the GGUF file."""
    import torch

    from dspark.default import load_target, resolve_default_target

    location = resolve_default_target()
    target = load_target(location, dtype=torch.bfloat16, device="cpu")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    print(f"{location.source} -> {folder}")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--export-target", type=Path, metavar="DIR")
    parser.add_argument("--target", help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter; the embedded one if left out")
    parser.add_argument("--prompts", help='JSON lines with "prompt" or "text"; the packaged set if left out')
    parser.add_argument("--modes", default=DEFAULT_MODES, help=f"of {', '.join(MODES)}; @K behind one sets its drafts")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--drafting", choices=("probabilistic", "greedy"), default="probabilistic")
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-gib", type=int, default=8)
    parser.add_argument("--start", choices=("parallel", "serial"), default="parallel", help="how engines are started")
    parser.add_argument("--wait-for", type=Path, help="start the engines, then measure as soon as this file exists")
    parser.add_argument("--out", default="bench_vllm_gpu.jsonl")
    parser.add_argument("--logs", default="bench_vllm_logs", help="folder for the engines' logs")
    parser.add_argument("--engine", dest="mode", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.passed_on = list(argv)
    args.modes = args.modes.split(",")
    args.concurrency = [int(each) for each in args.concurrency.split(",")]
    args.temperature = [float(each) for each in args.temperature.split(",")]
    if args.export_target is None and args.target is None:
        parser.error("--target is missing (or --export-target, to write one)")
    unknown = [mode for mode in args.modes if not re.fullmatch(rf"({'|'.join(MODES)})(@[1-9]\d*)?", mode)]
    if unknown:
        parser.error(f"--modes {', '.join(unknown)}: expected some of {', '.join(MODES)}, or one with @K behind it")
    if args.drafter is None:
        from dspark.default import default_drafter_path

        args.drafter = str(default_drafter_path())
    return args


def main() -> None:
    """Export, serve one mode (as a child), or measure and print the table."""
    args = parse_args(sys.argv[1:])
    if args.export_target is not None:
        export_target(args.export_target)
    elif args.mode is not None:
        serve_commands(args)
    else:
        started = time.perf_counter()
        runs = measure(args)
        print(table(runs, args))
        print(gains(runs, args))
        print(f"{time.perf_counter() - started:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
