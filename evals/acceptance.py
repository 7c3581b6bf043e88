"""Acceptance figures from step records: the definitions that every report of this project uses.

A step verifies `num_offered` drafts, accepts `num_accepted` of them, and commits `num_accepted` + 1 tokens, or fewer
where a stop token or the length limit ends the request inside the block. Drafts behind the last committed token of a
request were judged after its text had ended, so they are *left out of every figure*: a step that offers 5, accepts 5
and meets a stop at its third token counts as 3 offered, 3 accepted, 3 committed. Figures:

    tokens_per_step         committed tokens / verification steps, pooled; the token sampled by prefill is of no step.
    tokens_per_step_macro   the same ratio per request, then its mean over requests.
    acceptance_rate         accepted / offered. Falls with the number of drafts even for the same drafter.
    position, unconditional steps that accepted this position / steps that offered it.
    position, conditional   steps that accepted it / steps that reached it (accepted all positions before it).
    position, expected      mean of 1 - TV(p, q) over the steps that reached it: what `conditional` should be.
    position, gap           mean of accepted - (1 - TV) over those steps: 0 but for chance where verification is right.
    accepted length         share of the steps with drafts that accepted exactly n of them.

Pooled and macro figures of one run differ widely when requests differ in length (2 steps of 8 and 20 steps of 2 give
2.545 and 5.0), so both are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from dspark.evals.calibration import Calibration, calibrate, ece_statistic, with_confidence
from dspark.evals.stats import Bootstrap, Estimate, Statistic, divide, mean_statistic, ratio_statistic, sum_by
from dspark.records import StepRecord

INCONCLUSIVE = "INCONCLUSIVE"
MEASURED = "measured"
JUDGED = [("request", int), ("position", int), ("accepted", bool), ("reached", bool)]
JUDGED += [("expected", float), ("confidence", float), ("survival", float)]
TAIL_TOKENS = 48  # shorter tails repeat in ordinary text: table rules, list markers, digits of a number
TAIL_REPEATS = 4


@dataclass(frozen=True)
class PositionRates:
    """Figures of draft position `position`, counted from 0.

    `confidence` is the mean of the head's conditional confidence over the steps that reached the position.
    """

    position: int
    num_offered: int
    num_reached: int
    num_accepted: int
    unconditional: Estimate
    conditional: Estimate
    expected: Estimate
    gap: Estimate
    confidence: Estimate


@dataclass(frozen=True)
class Acceptance:
    """All figures of one run.

    `accepted_histogram[n]` is the number of steps with drafts that accepted n of them, `accepted_shares[n]` their
    share.

    `label` is INCONCLUSIVE when no draft was offered: such a run says nothing about a drafter, whatever its output
    looks like.
    """

    label: str
    num_requests: int
    num_steps: int
    num_committed: int
    num_offered: int
    num_accepted: int
    tokens_per_step: Estimate
    tokens_per_step_macro: Estimate
    acceptance_rate: Estimate
    positions: tuple[PositionRates, ...]
    accepted_histogram: tuple[int, ...]
    accepted_shares: tuple[Estimate, ...]
    calibration: Calibration | None

    @property
    def ece(self) -> Estimate:
        """That of `calibration`, undefined without confidences."""
        return Estimate(None) if self.calibration is None else self.calibration.ece

    @property
    def conditional(self) -> tuple[Estimate, ...]:
        """By position."""
        return tuple(rates.conditional for rates in self.positions)

    @property
    def expected(self) -> tuple[Estimate, ...]:
        """By position."""
        return tuple(rates.expected for rates in self.positions)


def judged_counts(step: StepRecord) -> tuple[int, int]:
    """Offered and accepted drafts of a step that count: those up to the end of the request.

    Raises:
        ValueError: the record contradicts itself.
    """
    offered, accepted, committed = step.num_offered, step.num_accepted, step.num_committed
    fewest = accepted + 1 if step.finish_reason is None else 1
    if not 0 <= accepted <= offered or not fewest <= committed <= accepted + 1:
        raise ValueError(
            f"step at position {step.position}: need 0 <= num_accepted <= num_offered and num_committed = num_accepted "
            f"+ 1 (less only where the request finishes), got num_offered {offered}, num_accepted {accepted}, "
            f"num_committed {committed}, finish_reason {step.finish_reason}"
        )
    if len(step.accept_probs) not in (0, offered) or len(step.confidence) not in (0, offered):
        raise ValueError(
            f"step at position {step.position}: {offered} drafts offered, but {len(step.accept_probs)} accept_probs "
            f"and {len(step.confidence)} confidences (one for each draft is needed, or none at all)"
        )
    return (offered, accepted) if step.finish_reason is None else (min(offered, committed), min(accepted, committed))


def judged_positions(requests: Sequence[Sequence[StepRecord]]) -> np.recarray:
    """Flatten step records; one row per draft position that counts.

    Args:
        requests: the steps of each request.

    Returns:
        [N] rows of `JUDGED`. `request` and `position` say where; `accepted`: this draft and all before it in its step
        were accepted; `reached`: all before it were; `expected`: 1 - TV; `confidence`: conditional, NaN where the
        drafter has no head; `survival`: product of the step's confidences up to here.
    """
    rows: list[tuple[int, int, bool, bool, float, float, float]] = []
    for request, steps in enumerate(requests):
        for step in steps:
            offered, accepted = judged_counts(step)
            unknown = (float("nan"),) * offered
            expected, confidence = step.accept_probs or unknown, step.confidence or unknown
            survival = list(accumulate(confidence[:offered], mul))
            rows += [
                (request, i, i < accepted, i <= accepted, expected[i], confidence[i], survival[i])
                for i in range(offered)
            ]
    return np.array(rows, dtype=JUDGED).view(np.recarray)


def measure_acceptance(requests: Sequence[Sequence[StepRecord]], bootstrap: Bootstrap | None = None) -> Acceptance:
    """Compute every acceptance figure of a run.

    Args:
        requests: the steps of each request, in request order. A request that ended with its prefill token has no
            steps; it counts as a request and has no part in the ratios.
        bootstrap: resamples over `len(requests)` requests; None draws them.

    Raises:
        ValueError: a record contradicts itself.
    """
    bootstrap = bootstrap or Bootstrap(len(requests))
    table = judged_positions(requests)
    statistics = acceptance_statistics(requests, table)
    estimates = {name: bootstrap.estimates(statistic) for name, statistic in statistics.items()}
    totals = _request_counts(requests).sum(0).astype(int).tolist()
    counts = dict(zip(("num_steps", "num_committed", "num_offered", "num_accepted"), totals, strict=True))
    return Acceptance(
        label=MEASURED if counts["num_offered"] else INCONCLUSIVE,
        num_requests=len(requests),
        **counts,
        **{name: estimates[name][0] for name in ("tokens_per_step", "tokens_per_step_macro", "acceptance_rate")},
        positions=_position_rates(table, estimates),
        accepted_histogram=tuple(_lengths(requests).sum(0).astype(int).tolist()),
        accepted_shares=tuple(estimates["accepted_shares"]),
        calibration=calibrate(table, bootstrap),
    )


def acceptance_statistics(
    requests: Sequence[Sequence[StepRecord]], table: np.recarray | None = None
) -> dict[str, Statistic]:
    """Every figure as a function of how often each request counts, for intervals, differences and means over sets.

    Args:
        requests: the steps of each request.
        table: what `judged_positions` gives for them; None computes it.

    Returns:
        tokens_per_step, tokens_per_step_macro, acceptance_rate and ece, one figure each (ece NaN where there are no
        confidences); unconditional, conditional, expected, gap and confidence, one for each position; accepted_shares,
        one for each accepted length from 0.
    """
    table = judged_positions(requests) if table is None else table
    num_steps, committed, offered, accepted = _request_counts(requests).T
    lengths = _lengths(requests)
    totals = ratio_statistic(np.stack([committed, accepted], 1), np.stack([num_steps, offered], 1))
    return {
        "tokens_per_step": lambda weights: totals(weights)[:, :1],
        "acceptance_rate": lambda weights: totals(weights)[:, 1:],
        "tokens_per_step_macro": mean_statistic(divide(committed, num_steps)),
        "accepted_shares": ratio_statistic(lengths, np.broadcast_to(lengths.sum(1, keepdims=True), lengths.shape)),
        "ece": ece_statistic(with_confidence(table), len(requests)),
        **_position_statistics(table, len(requests)),
    }


def _request_counts(requests: Sequence[Sequence[StepRecord]]) -> np.ndarray:
    """Steps, committed tokens, offered and accepted drafts of each request: [num_requests, 4]."""
    counts = np.zeros((len(requests), 4))
    for row, steps in zip(counts, requests, strict=True):
        for step in steps:
            row += (1, step.num_committed, *judged_counts(step))
    return counts


def _lengths(requests: Sequence[Sequence[StepRecord]]) -> np.ndarray:
    """Steps with drafts of each request, by how many they accepted: [num_requests, longest + 1]."""
    accepted = [[judged_counts(step)[1] for step in steps if step.num_offered] for steps in requests]
    longest = max((max(lengths, default=-1) for lengths in accepted), default=-1)
    rows = [np.bincount(lengths, minlength=longest + 1) for lengths in accepted]
    return np.array(rows, dtype=np.float64).reshape(len(requests), longest + 1)


def _position_statistics(table: np.recarray, num_requests: int) -> dict[str, Statistic]:
    """Figures of each position, over steps that offered or reached it."""
    depth = int(table.position.max()) + 1 if len(table.position) else 0

    def sums(values: np.ndarray) -> np.ndarray:  # [N] -> [num_requests, depth]
        return sum_by(table.request, table.position, values, (num_requests, depth))

    def mean_where_reached(values: np.ndarray) -> Statistic:
        known = table.reached & ~np.isnan(values)
        return ratio_statistic(sums(np.where(known, values, 0.0)), sums(known))

    accepted = sums(table.accepted)
    return {
        "unconditional": ratio_statistic(accepted, sums(np.ones(len(table.position)))),
        "conditional": ratio_statistic(accepted, sums(table.reached)),
        "expected": mean_where_reached(table.expected),
        "gap": mean_where_reached(table.accepted - table.expected),
        "confidence": mean_where_reached(table.confidence),
    }


def _position_rates(table: np.recarray, estimates: dict[str, list[Estimate]]) -> tuple[PositionRates, ...]:
    rates = []
    for position, unconditional in enumerate(estimates["unconditional"]):
        here = table.position == position
        counts = int(here.sum()), int((here & table.reached).sum()), int((here & table.accepted).sum())
        others = (estimates[name][position] for name in ("conditional", "expected", "gap", "confidence"))
        rates.append(PositionRates(position, *counts, unconditional, *others))
    return tuple(rates)


def tail_repeats(token_ids: Sequence[int]) -> bool:
    """Whether an output ends in a loop.

    A loop is one span of tokens at least `TAIL_REPEATS` times in a row, over `TAIL_TOKENS` tokens or more.

    A corrupted state makes a target loop, and loops are easy to draft: a high acceptance with many such outputs is a
    warning, not a success.
    """
    ids = np.asarray(token_ids)
    for period in range(1, len(ids) // TAIL_REPEATS + 1):
        length = max(TAIL_TOKENS, TAIL_REPEATS * period)
        if length <= len(ids) and np.array_equal(ids[-length + period :], ids[-length:-period]):
            return True
    return False
