"""Speed of vLLM's V2 runner on a GPU: plainly, with its own DSpark, and with ours; outputs compared.

    python3 scripts/bench_vllm_gpu.py --export-target /tmp/smollm2             # once: the default target as a folder
    python3 scripts/bench_vllm_gpu.py --target /tmp/smollm2 --out runs.jsonl   # the whole matrix
    ... --group plain,stock,ours/0,1/1,16,64/3 --group ours,ours@4,ours-adaptive/1/256/2   # not all modes everywhere

One engine for each mode, with CUDA graphs, each in a process of its own; all stay up, and only one is asked at a time,
so that the modes take turns: for every concurrency and temperature, repeat by repeat, the modes one after the other.
An engine gets as many requests at once as the concurrency says, and when all have ended as many again, 12 requests at
least (the first run of each warms up, with fewer). Prefill, the scheduler and the answer's way back are in the time;
the text is not (token ids are compared). Sampled requests have other seeds in every repeat, the same in all modes.

Modes: plain; stock (vLLM's DSpark, plug-in off), stock-wide (the same with the sizes of CUDA graphs that the plug-in
would choose), stock-topk, stock-adaptive; ours, ours-topk, ours-fp8 (W2 in 8 bits), ours-launched (without the
graph of sampling), ours-adaptive (adaptive verification by the confidence head). MODE@K drafts K tokens whatever
--num-draft-tokens says: `ours@2,ours@4,ours@8,ours-adaptive` sets scheduling against fixed lengths, and the table is
followed by adaptive rates over the best fixed one, medians with 95% intervals (`ratios.py`). An engine that ends is
left out, and the exit status is 1. With VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment an engine's core shares the
process of the calls: fewer hand-overs between threads, and rates that spread less.
Every run is appended to --out as one line of JSON, and is not repeated when the program is started again. Tokens per
step are vLLM's counters, 1 + accepted / steps over the run, and the time of a step is that of the run over its steps,
so that speed and luck in acceptance can be told apart. At temperature 0 outputs are compared with the plain ones;
two runs of one model may differ where two tokens are nearly equal, in bfloat16 above all, so the table says how many
requests are equal and where the others first differ. FlashInfer's autotuning, not used here, is off in all modes.
"""

import argparse
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from side_by_side import COUNTERS, answers, counters
from vllm_tables import done_equal, gains, key_of, table

MODES = (
    *("plain", "stock", "stock-wide", "stock-topk", "stock-adaptive"),
    *("ours", "ours-topk", "ours-fp8", "ours-launched", "ours-adaptive"),
)
DEFAULT_MODES = "plain,stock,ours,ours-topk"
MIN_REQUESTS = 12
RUN_SECONDS = 120.0  # of an engine that does not answer any more


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
    results = answers()
    from vllm import LLM, SamplingParams

    speculative = speculative_config(args)
    options: dict[str, Any] = {}
    ours = {"ours-fp8": {"w2": "fp8"}, "ours-launched": {"sampling_graph": False}}.get(args.mode.partition("@")[0])
    if ours is not None:
        options["additional_config"] = {"dspark": ours}
    if args.mode.startswith("stock-wide"):
        assert speculative is not None
        width = speculative["num_speculative_tokens"] + 1
        options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(width, args.most_requests)}
    llm = LLM(
        model=args.target,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.most_requests,
        kv_cache_memory_bytes=args.kv_cache_gib * 2**30,
        gpu_memory_utilization=0.08,  # only looked at when an engine starts beside others
        enable_prefix_caching=False,  # the same prompts come again and again
        disable_log_stats=False,
        seed=0,
        speculative_config=speculative,
        kernel_config={"enable_flashinfer_autotune": False},
        **options,
    )
    prompts = [{"prompt_token_ids": ids} for ids in read_prompts(args)]
    results.write(json.dumps({"ready": args.mode}) + "\n")
    for line in sys.stdin:
        results.write(json.dumps(run_once(llm, SamplingParams, prompts, json.loads(line), args.max_tokens)) + "\n")


def graph_sizes(width: int, max_num_seqs: int) -> list[int]:
    """Tokens of the CUDA graphs of a step with `width` tokens a request: vLLM's own choice, up to 512, and beyond it
    those that the plug-in adds."""
    from dspark.vllm.patches import wider_graph_sizes

    tokens = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}
    tokens |= {count * width for count in (1, 2, 4, *range(8, max_num_seqs + 1, 8)) if count * width <= 512}
    return sorted(tokens | set(wider_graph_sizes(max(tokens), width, max_num_seqs, 16384)))


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


class EngineEnded(Exception):
    """A mode's process is gone, or doesn't answer; the text is the end of its log."""


class Engine:
    """A mode's process."""

    def __init__(self, mode: str, args: argparse.Namespace) -> None:
        self.mode, self.given_up = mode, time.monotonic() + args.start_seconds
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
            start_new_session=True,  # a group: an engine's core is a process of its own, and outlives its parent
        )

    def wait_until_ready(self) -> None:
        """Until the engine answers (EngineEnded otherwise)."""
        if "ready" not in self.read(max(self.given_up - time.monotonic(), 0.0)):
            self.fail()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """One run."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.read(RUN_SECONDS)

    def read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            self.kill()
            self.fail()
        return json.loads(line)

    def fail(self) -> None:
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:])
        raise EngineEnded(f"the engine of mode {self.mode} ended; the end of {self.log}:\n{tail}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Group(NamedTuple):
    """A part of the matrix, in the order of running; repeat 0 of each cell warms up and is not counted."""

    modes: tuple[str, ...]
    temperatures: tuple[float, ...]
    concurrency: tuple[int, ...]
    repeats: int

    @classmethod
    def parse(cls, text: str) -> "Group":
        """MODES/TEMPERATURES/CONCURRENCY/REPEATS, commas within (ValueError: it is not)."""
        modes, temperatures, concurrency, repeats = text.split("/")
        unknown = [mode for mode in modes.split(",") if not re.fullmatch(rf"({'|'.join(MODES)})(@[1-9]\d*)?", mode)]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: expected some of {', '.join(MODES)}, or one with @K behind it")
        numbers = tuple(map(float, temperatures.split(","))), tuple(map(int, concurrency.split(",")))
        return cls(tuple(modes.split(",")), *numbers, int(repeats))

    def jobs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(mode, job), modes taking turns."""
        for temperature, concurrency in itertools.product(self.temperatures, self.concurrency):
            for repeat, mode in itertools.product(range(self.repeats + 1), self.modes):
                yield mode, {"concurrency": concurrency, "temperature": temperature, "repeat": repeat}


def start_engines(modes: Sequence[str], args: argparse.Namespace) -> dict[str, Engine]:
    """Those that came up, started side by side; of the others it is said."""
    ready = {}
    for mode, engine in [(mode, Engine(mode, args)) for mode in modes]:
        try:
            engine.wait_until_ready()
            ready[mode] = engine
        except EngineEnded as error:
            print(error, file=sys.stderr)
    return ready


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Run what is not in the file yet; all runs, and whether all that was asked for is there."""
    out = Path(args.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {key_of(run) for run in done}
    jobs = [job for group in args.groups for job in group.jobs()]
    todo = [(mode, job) for mode, job in jobs if key_of({"mode": mode} | job) not in known]
    engines: dict[str, Engine] = {}
    complete = True
    try:
        engines = start_engines(list(dict.fromkeys(mode for mode, _ in todo)), args)
        print(f"engines ready: {', '.join(engines)}", file=sys.stderr, flush=True)
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.5)
        started = time.perf_counter()
        for mode, job in todo:
            late = args.seconds is not None and time.perf_counter() - started > args.seconds
            if late or mode not in engines:
                complete = False
                continue
            try:
                run = figures({"mode": mode} | job, engines[mode].run(job))
            except EngineEnded as error:
                print(error, file=sys.stderr)
                del engines[mode]
                continue
            if run["temperature"] or not run["repeat"] or done_equal(done, run):
                run["tokens"] = None
            done.append(run)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(f"{mode} {job}: {run['rate']:.0f} tokens/s, {run['tokens_per_step']:.2f} a step", file=sys.stderr)
    finally:
        for engine in engines.values():
            engine.close()
    return done, complete


def figures(job: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A run with its rate, tokens per step and time of a step."""
    count, steps, seconds = sum(map(len, result["tokens"])), result["steps"], result["seconds"]
    return job | {
        "rate": count / seconds,
        "count": count,
        **result,
        "tokens_per_step": 1 + result["accepted"] / steps if steps else 1.0,
        "ms_a_step": 1e3 * seconds * job["concurrency"] / (steps or count),
    }


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
    parser.add_argument(
        "--group",
        action="append",
        metavar="MODES/T/CONCURRENCY/REPEATS",
        help="a part of the matrix; repeatable, in the order of running, in place of the four flags above",
    )
    parser.add_argument("--start-seconds", type=float, default=600.0, help="leave engines out that take longer")
    parser.add_argument("--seconds", type=float, help="start no run later than this after the engines are up")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--drafting", choices=("probabilistic", "greedy"), default="probabilistic")
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-gib", type=int, default=8)
    parser.add_argument("--wait-for", type=Path, help="start the engines, then measure as soon as this file exists")
    parser.add_argument("--out", default="bench_vllm_gpu.jsonl")
    parser.add_argument("--logs", default="bench_vllm_logs", help="folder for the engines' logs")
    parser.add_argument("--engine", dest="mode", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.passed_on = list(argv)
    whole = "/".join((args.modes, args.temperature, args.concurrency, str(args.repeats)))
    try:
        args.groups = [Group.parse(text) for text in args.group or [whole]]
    except ValueError as error:
        parser.error(f"--modes or --group: {error}")
    args.most_requests = max(max(group.concurrency) for group in args.groups)
    if args.export_target is None and args.target is None:
        parser.error("--target is missing (or --export-target, to write one)")
    if args.drafter is None:
        from dspark.default import default_drafter_path

        args.drafter = str(default_drafter_path())
    return args


def main() -> int:
    """Export, serve one mode (as a child), or measure and print the table."""
    args = parse_args(sys.argv[1:])
    if args.export_target is not None:
        export_target(args.export_target)
    elif args.mode is not None:
        serve_commands(args)
    else:
        started = time.perf_counter()
        runs, complete = measure(args)
        print(table(runs))
        print(gains(runs))
        print(f"{time.perf_counter() - started:.0f} s in all", file=sys.stderr)
        return 0 if complete else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
