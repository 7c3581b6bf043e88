"""Tokens per second of `vllm serve` on the CPU, with the embedded DSpark drafter and without, side by side.

    VLLM_CPU_CI_ENV=1 VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python scripts/bench_vllm_cpu.py
    ... scripts/bench_vllm_cpu.py --dtype bfloat16 --requests 8 --max-tokens 128 --repeats 5

Both servers run all the time, and only one is asked at a time. The runs alternate, plain and drafted, at each
concurrency; each figure is the median of the repeats, with the lowest and the highest. Temperature 0, prompts of the
packaged set `default` in the chat template, every text at its full length. Needs vLLM: `scripts/test_vllm` makes an
environment with it.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from soak_vllm import Job, serving, stream

CONCURRENCIES = (1, 4)
WARM_UP_TOKENS = 16


def measure(url: str, model: str, jobs: Sequence[Job], concurrency: int) -> tuple[float, list[list[int]]]:
    """Tokens per second over all jobs, prefill and HTTP included, and their texts."""
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        texts = list(pool.map(lambda job: stream(url, model, job, job.sampling), jobs))
    return sum(map(len, texts)) / (time.perf_counter() - started), texts


def make_jobs(target: Path, num_requests: int, max_tokens: int) -> list[Job]:
    """The first prompts of the packaged set, as chats."""
    from transformers import AutoTokenizer

    from dspark.evals import format_prompt, load_dataset

    holder = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(target))
    sampling = {"temperature": 0.0, "ignore_eos": True}
    prompts = load_dataset("default", num_requests).prompts
    return [Job(format_prompt(holder, prompt.text), max_tokens, sampling, None) for prompt in prompts]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Print a Markdown table, and everything as one line of JSON."""
    from importlib.metadata import version

    from dspark.default import default_drafter_path, resolve_default_target

    location = resolve_default_target()
    target, drafter = str(location.folder), str(default_drafter_path())
    jobs = make_jobs(location.folder, args.requests, args.max_tokens)
    options = ["--dtype", args.dtype, "--max-model-len", "1024", "--max-num-seqs", str(max(CONCURRENCIES))]
    rates: dict[tuple[str, int], list[float]] = {}
    texts = {}
    with (
        serving(target, None, 0, options) as plain_url,
        serving(target, drafter, args.num_draft_tokens, options) as drafted_url,
    ):
        urls = {"plain": plain_url, "drafted": drafted_url}
        for url in urls.values():
            measure(url, target, [Job(job.prompt, WARM_UP_TOKENS, job.sampling, None) for job in jobs], len(jobs))
        for _ in range(args.repeats):
            for concurrency in CONCURRENCIES:
                for name, url in urls.items():
                    rate, texts[name] = measure(url, target, jobs, concurrency)
                    rates.setdefault((name, concurrency), []).append(rate)
                    print(f"{name} at {concurrency}: {rate:.1f} tokens/s", file=sys.stderr)
    print("| concurrency | vLLM | vLLM with DSpark | ratio of medians |\n| --- | --- | --- | --- |")
    for concurrency in CONCURRENCIES:
        plain, drafted = rates["plain", concurrency], rates["drafted", concurrency]
        cells = [f"{median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in (plain, drafted)]
        print(f"| {concurrency} | {cells[0]} | {cells[1]} | {median(drafted) / median(plain):.2f} |")
    settings = vars(args) | {"target": location.source, "same_texts": texts["plain"] == texts["drafted"]}
    versions = {name: version(name) for name in ("vllm", "torch", "dspark")}
    print(json.dumps({"rates": {f"{n} {c}": r for (n, c), r in rates.items()}, **settings, "versions": versions}))


if __name__ == "__main__":
    main(parse_args())
