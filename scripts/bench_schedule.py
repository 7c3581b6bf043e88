"""What scheduling gains: tokens per second with every fixed number of drafts, without drafter, and scheduled, by load.

    python scripts/bench_schedule.py --device cuda --out schedule.json
    python scripts/bench_schedule.py --batch-size 1 4 --repeats 3 --max-new-tokens 48 --cost cost.json

First steps are profiled (or a table of `dspark profile` on this very machine is given with --cost). Then each load runs
B requests at once, from prompts of a set in the model's chat template; the clock runs from their common first token to
the first request that ends, so that B stays what it is called. All contenders run once in each repeat, in random order
and with the same seeds. Figures are medians over the repeats with the lowest and the highest; the ratio is taken within
each repeat, against the fixed number of drafts (0 is plain decoding) whose median is best.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

from dspark.commands import load_pair
from dspark.commands_tools import device_name, format_cost
from dspark.cost import CostTable
from dspark.evals import format_prompt, load_dataset
from dspark.evals.settings import library_versions, source_commit
from dspark.loop import generate
from dspark.profile import ProfileSettings, profile
from dspark.sampling import SamplingParams
from dspark.schedule import Schedule, StaticThreshold, ThroughputSchedule

WARM_UP_TOKENS = 20


class FirstRequestEnded(Exception):
    """The batch is about to shrink: what follows is another load."""


@dataclass(frozen=True)
class Contender:
    """A way to run: a fixed number of drafts (0: without drafter), or a schedule."""

    name: str
    num_draft_tokens: int
    cost: CostTable | None = None
    threshold: float | None = None
    adaptive: bool = True

    def schedule(self) -> Schedule | None:
        """A new schedule, since one remembers its run."""
        if self.threshold is not None:
            return StaticThreshold(self.threshold)
        return None if self.cost is None else ThroughputSchedule(self.cost, adaptive=self.adaptive)


def tokens_per_s(pair: Any, contender: Contender, prompts: Sequence[list[int]], params: list[SamplingParams]) -> float:
    """Committed tokens per second while all requests run."""
    tokens, seen, whole = 0, 0.0, (0, 0.0)
    started = 0.0

    def on_tokens(index: int, new: list[int], step: Any) -> None:
        nonlocal tokens, seen, whole, started
        if step is None:  # prefill; the last of these calls starts the clock
            started = seen = time.perf_counter()
            return
        if index == 0:  # a step has begun to report: all of the one before it counts
            whole = tokens, seen
        tokens, seen = tokens + len(new), time.perf_counter()

    def on_finish(*_: Any) -> None:
        raise FirstRequestEnded

    with suppress(FirstRequestEnded):
        generate(
            pair.target,
            pair.drafter if contender.num_draft_tokens else None,
            prompts,
            params,
            num_draft_tokens=contender.num_draft_tokens or None,
            schedule=contender.schedule(),
            max_batch_size=len(prompts),
            on_tokens=on_tokens,
            on_finish=on_finish,
        )
    return whole[0] / (whole[1] - started)


def compare(pair: Any, contenders: Sequence[Contender], prompts: Any, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders at one load: tokens per second of every repeat, and the scheduled ones against the best fixed."""
    speeds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for repeat in range(options.repeats + 1):  # the first one warms up
        rng = random.Random(f"{options.seed} {repeat}")
        params = [
            SamplingParams(
                temperature=options.temperature,
                seed=rng.getrandbits(63),
                max_new_tokens=options.max_new_tokens if repeat else WARM_UP_TOKENS,
                ignore_eos=True,
            )
            for _ in prompts
        ]
        for contender in rng.sample(contenders, len(contenders)):
            speed = tokens_per_s(pair, contender, prompts, params)
            if repeat:
                speeds[contender.name].append(speed)
    fixed = [c.name for c in contenders if c.schedule() is None]
    best = max(fixed, key=lambda name: median(speeds[name]))
    ratios = {
        c.name: [mine / theirs for mine, theirs in zip(speeds[c.name], speeds[best], strict=True)]
        for c in contenders
        if c.schedule() is not None
    }
    return {"requests": len(prompts), "tokens_per_s": speeds, "best_fixed": best, "ratio_to_best_fixed": ratios}


def line(result: dict[str, Any]) -> str:
    """A load in words."""
    parts = [f"{name} {median(values):.1f}" for name, values in result["tokens_per_s"].items()]
    against = [
        f"{name} {median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        for name, values in result["ratio_to_best_fixed"].items()
    ]
    return (
        f"{result['requests']} requests, tokens/s: {', '.join(parts)}\n"
        f"    to the best fixed ({result['best_fixed']}): {', '.join(against)}"
    )


def parse_args() -> argparse.Namespace:
    """The command line."""
    missing: Any = argparse.SUPPRESS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "device", "dtype"):
        parser.add_argument(f"--{name}", default=missing, help="as in `dspark eval`")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--num-draft-tokens", nargs="+", type=int, default=[1, 2, 4, 8], help="the fixed numbers")
    parser.add_argument("--dataset", default="default")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", help="a table of `dspark profile`, made on this machine; default: profile first")
    parser.add_argument("--out", help="write all figures here (JSON)")
    return parser.parse_args()


def main(options: argparse.Namespace) -> int:
    """Profile, run, report."""
    pair = load_pair(options)
    longest = max(options.num_draft_tokens)
    if options.cost:
        cost = CostTable.load(options.cost)
    else:
        settings = ProfileSettings(tuple(options.batch_size), longest, temperature=options.temperature)
        cost = profile(pair.target, pair.drafter, settings, print)
    print(format_cost(cost))
    contenders = [Contender(f"K={k}", k) for k in (0, *options.num_draft_tokens)]
    contenders += [
        Contender("scheduled", longest, cost),
        Contender("algorithm 1", longest, cost, adaptive=False),
        Contender("threshold 0.3", longest, threshold=0.3),
    ]
    texts = [format_prompt(pair.target, prompt.text) for prompt in load_dataset(options.dataset).prompts]
    results = []
    for batch_size in options.batch_size:
        results.append(compare(pair, contenders, list(islice(cycle(texts), batch_size)), options))
        print(line(results[-1]), flush=True)
    report = {
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "device": device_name(pair.target.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "versions": library_versions(),
        "commit": source_commit(),
        "cost": [vars(point) for point in cost.points],
        "results": results,
    }
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(json.dumps({key: value for key, value in report.items() if key != "cost"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(parse_args()))
