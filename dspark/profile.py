"""Time the generation loop's step against the number of verified drafts: the cost table that schedules read.

What is timed is the whole step of `dspark.generate`: drafting, the target's pass, both distributions, rejection
sampling, commits, and the host between them; a sum of parts measured alone would miss how they overlap. A schedule that
goes through the kinds of steps in random order runs in the loop and looks at the clock between steps, so a slow minute
of the machine meets all kinds alike. Every repeat starts from fresh prompts: contexts stay near the length asked for.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch

from dspark.cost import CostPoint, CostTable
from dspark.drafter import Drafter, check_num_draft_tokens
from dspark.loop import generate
from dspark.sampling import SamplingParams
from dspark.schedule import Plan, Schedule
from dspark.target import HFTarget
from dspark.terminal import count

WARM_UP_STEPS = 2


class Kind(NamedTuple):
    """A kind of step: what is planned (`dspark.schedule.Plan`), and how many of the drafts are verified."""

    num_drafts: int
    choose: bool
    verified: int


PLAIN = Kind(0, choose=False, verified=0)


def step_kinds(longest: int) -> list[Kind]:
    """What is timed: a plain step, those that choose 0..longest, and those settled at powers of two and the longest."""
    settled = sorted({min(1 << i, longest) for i in range(longest.bit_length() + 1)})
    choosing = [Kind(longest, choose=True, verified=k) for k in range(longest + 1)]
    return [PLAIN, *choosing, *(Kind(k, choose=False, verified=k) for k in settled)]


@dataclass(frozen=True)
class ProfileSettings:
    """What to time.

    Attributes:
        batch_sizes: numbers of requests that run together.
        num_draft_tokens: the most drafts per request (`step_kinds`); None is the trained maximum.
        context: tokens in each prompt.
        temperature: of the requests; 0 skips the work of sampling.
        repeats: timed steps of each kind.
        seed: of prompts and order.

    Raises:
        ValueError: a value is below its minimum.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    num_draft_tokens: int | None = None
    context: int = 128
    temperature: float = 1.0
    repeats: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError(f"batch_sizes={self.batch_sizes}: expected different numbers of at least 1")
        for name, least in (("context", 1), ("repeats", 3), ("temperature", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


def profile(
    target: HFTarget,
    drafter: Drafter,
    settings: ProfileSettings,
    report: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure a cost table on this machine.

    Args:
        target: the target.
        drafter: the drafter, with a confidence head (without one nothing could be scheduled).
        settings: what to time.
        report: called with a line of progress per batch size.
        clock: seconds; `time.process_time` on a CPU that others use too, with one thread.

    Raises:
        ValueError: there is no confidence head, K is outside the trained range, or the prompts leave no room within the
            target's positions.
    """
    longest = settings.num_draft_tokens if settings.num_draft_tokens is not None else drafter.config.max_draft_tokens
    if drafter.config.confidence == "none":
        raise ValueError(
            "this drafter has no confidence head, by which a schedule chooses how many drafts to verify: a cost table "
            "would serve nothing"
        )
    check_num_draft_tokens(drafter.config, longest)
    num_steps = WARM_UP_STEPS + len(step_kinds(longest))
    room = min(target.max_positions, drafter.config.max_position_embeddings - drafter.config.block_size)
    if settings.context + num_steps * (longest + 1) > room:
        raise ValueError(
            f"context={settings.context} leaves no room for {num_steps} steps of {longest + 1} tokens within {room} "
            "positions: give a shorter one"
        )
    points = []
    for batch_size in sorted(settings.batch_sizes):
        seconds = time_steps(target, drafter, batch_size, longest, settings, clock)
        points += [_point(batch_size, kind, times) for kind, times in sorted(seconds.items())]
        whole = (Kind(longest, choose, longest) for choose in (False, True))
        plain, full, chosen = (1e3 * np.median(seconds[kind]) for kind in (PLAIN, *whole))
        requests, drafts = count(batch_size, "request"), count(longest, "draft")
        report(f"{requests}: {plain:.1f} ms a plain step, {full:.1f} with {drafts}, {chosen:.1f} if that is chosen")
    return CostTable(tuple(points), asdict(settings) | {"num_draft_tokens": longest})


def time_steps(
    target: HFTarget,
    drafter: Drafter,
    batch_size: int,
    longest: int,
    settings: ProfileSettings,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Kind, list[float]]:
    """Seconds of steps by kind (`step_kinds`), `settings.repeats` of each."""
    rng = random.Random(settings.seed)
    seconds: dict[Kind, list[float]] = defaultdict(list)
    kinds = step_kinds(longest)
    for _ in range(settings.repeats):
        order = rng.sample(kinds, len(kinds))
        sweep = _Sweep([Kind(longest, choose=True, verified=longest), PLAIN, *order], target.device, clock)
        prompts = [[rng.randrange(target.vocab_size) for _ in range(settings.context)] for _ in range(batch_size)]
        params = [
            SamplingParams(
                temperature=settings.temperature,
                seed=rng.getrandbits(63),
                max_new_tokens=target.max_positions,
                ignore_eos=True,
            )
            for _ in prompts
        ]
        with suppress(SweepOver):
            generate(
                target, drafter, prompts, params, num_draft_tokens=longest, schedule=sweep, max_batch_size=batch_size
            )
        for kind, duration in list(sweep.durations())[WARM_UP_STEPS:]:
            seconds[kind].append(duration)
    return seconds


class SweepOver(Exception):
    """All steps were run; the generation is of no further use."""


class _Sweep(Schedule):
    """Runs a list of kinds, one a step, and notes when each step began."""

    def __init__(
        self, order: Sequence[Kind], device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.order, self.device, self.clock = list(order), device, clock
        self.started: list[float] = []

    def plan(self, limits: Sequence[int]) -> Plan:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.started.append(self.clock())
        if len(self.started) > len(self.order):
            raise SweepOver
        return Plan(min(self._now.num_drafts, max(limits)), self._now.choose)

    def __call__(self, confidence: np.ndarray, limits: Sequence[int]) -> list[int]:
        return [min(self._now.verified, limit) for limit in limits]

    @property
    def _now(self) -> Kind:
        return self.order[len(self.started) - 1]

    def durations(self) -> Iterator[tuple[Kind, float]]:
        """(kind, seconds) of every step."""
        for kind, begin, end in zip(self.order, self.started, self.started[1:], strict=False):
            yield kind, end - begin


def _point(batch_size: int, kind: Kind, times: Sequence[float]) -> CostPoint:
    low, median, high = (float(value) for value in np.quantile(times, [0.25, 0.5, 0.75]))
    return CostPoint(
        batch_size, 1 + kind.verified, kind.num_drafts > 0, median, low, high, len(times), chosen=kind.choose
    )
