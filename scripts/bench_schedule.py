"""What scheduling gains: tokens per second with fixed numbers of drafts and scheduled, by load.

    python scripts/bench_schedule.py --device cuda --batch-size 1 16 64 256 --out schedule.jsonl
    python scripts/bench_schedule.py --batch-size 1 2 4 8 --num-draft-tokens 1 2 4 8 --cost cost.json

First steps are profiled (or a table of `dspark profile` on this very machine is given with --cost; --save-cost keeps
one). Then each load runs B requests at once, from prompts of a set in the model's chat template, others in every round;
the clock runs from their common first token to the first request that ends, so that B stays what it is called.
Contenders take turns, in random order and with the same prompts and seeds within a round; rounds go on for --seconds a
load, at least --rounds. Every run is printed, and written as a line of JSON, as it ends. Figures are medians over the
rounds with the lowest and the highest. Ratios are those within the rounds, each to the fixed number of drafts (0 is
plain decoding) that was best in the *other* half of the rounds: the best of several in the same rounds is partly the
luckiest, and nothing would be as good. Their median comes with its interval of at least 95% confidence (from 6 rounds
on; of fewer the lowest and the highest), exact whatever their law, so that a machine that others slow down for a while
widens it little; their geometric mean with a standard error says whether those slow whiles were the contender's own.

At temperature 0 all contenders emit the same texts, and a ratio shows time alone. Sampled ones have texts of their own:
with few requests acceptance then differs by chance, which the columns "tokens a step" and "ms a step" tell apart.
On a CPU that others use, --cpu-time (with OMP_NUM_THREADS=1) counts the process's own seconds.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import mean, median, stdev
from typing import Any

from ratios import format_ratio, gain

from dspark.commands import load_pair
from dspark.commands_tools import device_name, format_cost
from dspark.cost import CostTable
from dspark.evals import format_prompt, load_dataset
from dspark.evals.settings import library_versions, source_commit
from dspark.loop import generate
from dspark.profile import ProfileSettings, profile
from dspark.sampling import SamplingParams
from dspark.schedule import Schedule, StaticThreshold, ThroughputSchedule

WARM_UP_TOKENS = 12


class FirstRequestEnded(Exception):
    """The batch is about to shrink: what follows is another load."""


@dataclass(frozen=True)
class Contender:
    """A way to run: a fixed number of drafts (0: without drafter), or a schedule."""

    name: str
    num_draft_tokens: int
    cost: CostTable | None = None

    @property
    def scheduled(self) -> bool:
        """Whether lengths are chosen."""
        return self.cost is not None

    def schedule(self) -> Schedule | None:
        """A new schedule; at a load it is kept from run to run, as a serving process would."""
        if self.cost is None:
            return None
        kind, _, value = self.name.partition(":")
        return StaticThreshold(float(value)) if value else ThroughputSchedule(self.cost, adaptive=kind == "scheduled")


@dataclass(frozen=True)
class Pace:
    """One run: committed tokens per second while all requests run, and what makes it up."""

    tokens_per_s: float
    tokens_a_step: float
    ms_a_step: float
    drafts_verified: float


def run(
    pair: Any,
    num_draft_tokens: int,
    schedule: Schedule | None,
    prompts: Sequence[list[int]],
    params: list[SamplingParams],
    clock: Callable[[], float],
) -> Pace:
    """Generate until the first request ends."""
    tokens = drafts = steps = 0
    started, seen, whole = 0.0, 0.0, (0, 0, 0, 0.0)

    def on_tokens(index: int, new: list[int], step: Any) -> None:
        nonlocal tokens, drafts, steps, seen, whole, started
        if step is None:  # prefill; the last of these calls starts the clock
            started = seen = clock()
            return
        if index == 0:  # a step has begun to report: all of the one before it counts
            whole = steps, tokens, drafts, seen
            steps += 1
        tokens, drafts, seen = tokens + len(new), drafts + step.num_offered, clock()

    def on_finish(*_: Any) -> None:
        raise FirstRequestEnded

    with suppress(FirstRequestEnded):
        generate(
            pair.target,
            pair.drafter if num_draft_tokens else None,
            prompts,
            params,
            num_draft_tokens=num_draft_tokens or None,
            schedule=schedule,
            max_batch_size=len(prompts),
            on_tokens=on_tokens,
            on_finish=on_finish,
        )
    steps, tokens, drafts, seen = whole
    rows = steps * len(prompts)
    return Pace(tokens / (seen - started), tokens / rows, 1e3 * (seen - started) / steps, drafts / rows)


def compare(
    pair: Any, contenders: Sequence[Contender], texts: Sequence[list[int]], size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """All contenders with `size` requests at once: every run, and the scheduled ones against the best fixed."""
    paces: dict[str, list[Pace]] = {contender.name: [] for contender in contenders}
    schedules = {contender.name: contender.schedule() for contender in contenders}
    started = time.perf_counter()
    rounds = 0
    while rounds <= options.rounds or time.perf_counter() - started < options.seconds:  # the first one warms up
        rng = random.Random(f"{options.seed} {rounds}")
        prompts = list(islice(cycle(texts), rounds * size, (rounds + 1) * size))
        params = [
            SamplingParams(
                temperature=options.temperature,
                seed=rng.getrandbits(63),
                max_new_tokens=options.max_new_tokens if rounds else WARM_UP_TOKENS,
                ignore_eos=True,
            )
            for _ in prompts
        ]
        for contender in rng.sample(contenders, len(contenders)):
            schedule = schedules[contender.name]
            pace = run(pair, contender.num_draft_tokens, schedule, prompts, params, clock_of(options))
            if rounds:
                paces[contender.name].append(pace)
                here = {"requests": size, "temperature": options.temperature, "round": rounds}
                write(here | {"contender": contender.name} | asdict(pace), options)
        rounds += 1
    logs = {name: [math.log(pace.tokens_per_s) for pace in some] for name, some in paces.items()}
    fixed = [contender.name for contender in contenders if not contender.scheduled]
    gains = {c.name: gain(logs[c.name], [logs[name] for name in fixed]) for c in contenders if c.scheduled}
    best = max(fixed, key=lambda name: median(logs[name]))
    return {"requests": size, "paces": paces, "best_fixed": best, "gain": gains}


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    """What is read before and after."""
    return time.process_time if options.cpu_time else time.perf_counter


def write(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a row, and add it to --out."""
    text = json.dumps(row)
    print(text, flush=True)
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each load and contender."""
    lines = [
        "| requests | contender | tokens/s, median (lowest to highest) | to the best fixed, median (95% interval) "
        "| mean | rounds | tokens a step | ms a step | drafts verified |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for name, paces in result["paces"].items():
            speeds = [pace.tokens_per_s for pace in paces]
            ratio, centre = ("best", "") if name == result["best_fixed"] else ("", "")
            if logs := result["gain"].get(name):
                middle = math.exp(mean(logs))
                ratio, centre = format_ratio(logs), f"{middle:.3f} ± {middle * stdev(logs) / len(logs) ** 0.5:.3f}"
            lines.append(
                f"| {result['requests']} | {name} | {median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f}) "
                f"| {ratio} | {centre} | {len(paces)} | {mean(p.tokens_a_step for p in paces):.2f} "
                f"| {median(p.ms_a_step for p in paces):.1f} | {mean(p.drafts_verified for p in paces):.2f} |"
            )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """The command line."""
    missing: Any = argparse.SUPPRESS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "device", "dtype"):
        parser.add_argument(f"--{name}", default=missing, help="as in `dspark eval`")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--num-draft-tokens", nargs="+", type=int, default=[0, 1, 2, 4, 8], help="the fixed numbers")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["scheduled"],
        help="of scheduled, algorithm-1 (the paper's rule, without memory) and threshold:P",
    )
    parser.add_argument("--dataset", default="default")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3, help="the fewest, besides one that warms up")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on this long at each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", help="a table of `dspark profile`, made on this machine; default: profile first")
    parser.add_argument("--save-cost", help="write the profiled table here")
    parser.add_argument("--profile-repeats", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own seconds")
    parser.add_argument("--out", help="append every run here, a line of JSON each")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: expected 2 or more, since the best fixed number comes from other rounds")
    return args


def main(options: argparse.Namespace) -> int:
    """Profile, run, report."""
    begun = time.perf_counter()
    pair = load_pair(options)
    longest = max(options.num_draft_tokens)
    if options.cost:
        cost = CostTable.load(options.cost)
    else:
        settings = ProfileSettings(
            tuple(options.batch_size), longest, temperature=options.temperature, repeats=options.profile_repeats
        )
        cost = profile(pair.target, pair.drafter, settings, print, clock_of(options))
        if options.save_cost:
            cost.save(options.save_cost)
    print(format_cost(cost), flush=True)
    contenders = [Contender(f"K={k}", k) for k in options.num_draft_tokens]
    contenders += [Contender(name, longest, cost) for name in options.schedules]
    header = {
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "device": device_name(pair.target.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "versions": library_versions(),
        "commit": source_commit(),
    }
    write(header, options)
    texts = [format_prompt(pair.target, prompt.text) for prompt in load_dataset(options.dataset).prompts]
    results = [compare(pair, contenders, texts, size, options) for size in options.batch_size]
    print(table(results))
    print(f"{time.perf_counter() - begun:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(parse_args()))
