"""Speed of a batched evaluation against the usual one-sequence loop: the same pair, prompts and sampling, in one run.

    python scripts/bench_eval.py --dataset gsm8k.jsonl --requests 80 --alone 8 --max-new-tokens 128
    ... scripts/bench_eval.py --device cuda --temperature 1 --repeats 3

Reference implementations evaluate one sequence at a time (DeepSpec: deepspec/eval, batch size 1). Both sides here run
`dspark.generate`, which gives a seeded request the same random numbers alone and in a batch; only `max_batch_size`
differs, so the ratio is that of batching. The one-sequence side takes the first `--alone` prompts, because it is slow:
its rate does not depend on how many there are. The sides alternate; every figure is the median of the repeats with the
lowest and the highest, prefill included.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from dspark.commands import load_pair
from dspark.evals import format_prompt, load_dataset
from dspark.evals.settings import library_versions
from dspark.loop import generate
from dspark.sampling import SamplingParams


@dataclass(frozen=True)
class Rate:
    """What one run of some prompts made; `committed` leaves out the tokens of prefill, which are not steps'."""

    tokens: int
    committed: int
    steps: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def measure(pair: Any, prompts: Sequence[list[int]], params: SamplingParams, batch_size: int) -> Rate:
    """Generate for all prompts, `batch_size` at a time."""
    if pair.target.device.type == "cuda":
        torch.cuda.synchronize(pair.target.device)
    started = time.perf_counter()
    done = generate(pair.target, pair.drafter, prompts, params, max_batch_size=batch_size)
    seconds = time.perf_counter() - started
    steps = [step for generation in done for step in generation.steps]
    tokens = sum(len(generation.token_ids) for generation in done)
    return Rate(tokens, sum(step.num_committed for step in steps), len(steps), seconds)


def summary(rates: Sequence[Rate]) -> dict[str, float]:
    """Median, lowest and highest tokens per second, and tokens per step of the first run."""
    speeds = [rate.tokens_per_s for rate in rates]
    return {
        "tokens_per_s": median(speeds),
        "lowest": min(speeds),
        "highest": max(speeds),
        "tokens_per_step": rates[0].committed / max(1, rates[0].steps),
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--dataset", default="default", help="packaged prompt set or a JSON Lines file")
    parser.add_argument("--requests", type=int, default=80, help="prompts, all run together on the batched side")
    parser.add_argument("--alone", type=int, default=8, help="of these, how many the one-sequence side runs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    for flag in ("--target", "--drafter", "--dtype", "--device"):
        parser.add_argument(flag, help="as for `dspark eval`")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Print both rates and their ratio, and everything as one line of JSON."""
    pair = load_pair(args)
    prompts = [format_prompt(pair.target, p.text) for p in load_dataset(args.dataset, args.requests).prompts]
    params = SamplingParams(temperature=args.temperature, seed=0, max_new_tokens=args.max_new_tokens)
    sides = {"one sequence": (prompts[: args.alone], 1), "batched": (prompts, len(prompts))}
    for some, batch_size in sides.values():  # compilation and allocation are not what is compared
        measure(pair, some[:batch_size], SamplingParams(temperature=1.0, seed=1, max_new_tokens=8), batch_size)
    rates: dict[str, list[Rate]] = {name: [] for name in sides}
    for _ in tqdm(range(args.repeats), desc="repeats", disable=None):
        for name, (some, batch_size) in sides.items():
            rates[name].append(measure(pair, some, params, batch_size))
    results = {name: summary(found) for name, found in rates.items()}
    for name, found in results.items():
        print(
            f"{name:>12}: {found['tokens_per_s']:.1f} tokens/s ({found['lowest']:.1f} to {found['highest']:.1f}),"
            f" {found['tokens_per_step']:.2f} tokens a step",
            file=sys.stderr,
        )
    ratio = results["batched"]["tokens_per_s"] / results["one sequence"]["tokens_per_s"]
    print(f"{'ratio':>12}: {ratio:.1f}", file=sys.stderr)
    settings = {"requests": len(prompts), "alone": args.alone, "temperature": args.temperature}
    print(json.dumps({"ratio": ratio, **results, "settings": settings, "versions": library_versions()}))


if __name__ == "__main__":
    main(parse_args())
