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

Pooled and macro figures of one run differ widely when requests differ in length (2 steps of 8 and 20 steps of 2 give
2.545 and 5.0), so both are given.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from dspark.evals.calibration import Calibration, calibrate
from dspark.evals.stats import Bootstrap, Estimate, divide
from dspark.records import StepRecord

INCONCLUSIVE = "INCONCLUSIVE"
MEASURED = "measured"
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
    confidence: Estimate


@dataclass(frozen=True)
class Acceptance:
    """All figures of one run. `accepted_histogram[n]` is the number of steps with drafts that accepted n of them.

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
    calibration: Calibration | None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and None, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class JudgedPositions:
    """Every draft position that counts, flat over requests and steps; N positions.

    `request` [N] and `position` [N] say where; `accepted` [N]: this draft and all before it in its step were
    accepted; `reached` [N]: all before it were; `expected` [N]: 1 - TV; `confidence` [N]: conditional, NaN where the
    drafter has no head; `survival` [N]: product of the step's confidences up to here.
    """

    request: np.ndarray
    position: np.ndarray
    accepted: np.ndarray
    reached: np.ndarray
    expected: np.ndarray
    confidence: np.ndarray
    survival: np.ndarray


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


def judged_positions(requests: Sequence[Sequence[StepRecord]]) -> JudgedPositions:
    """Flatten step records; one row per draft position that counts.

    Args:
        requests: the steps of each request.
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
    columns = zip(*rows, strict=True) if rows else [()] * 7
    dtypes = (np.int64, np.int64, bool, bool, np.float64, np.float64, np.float64)
    return JudgedPositions(*(np.array(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True)))


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
    counts = np.array(
        [[len(steps), sum(s.num_committed for s in steps), *_sum_counts(steps)] for steps in requests], dtype=np.float64
    ).reshape(len(requests), 4)
    num_steps, committed, offered, accepted = counts.T
    table = judged_positions(requests)
    pooled = bootstrap.ratio(np.stack([committed, accepted], 1), np.stack([num_steps, offered], 1))
    return Acceptance(
        label=MEASURED if offered.sum() else INCONCLUSIVE,
        num_requests=len(requests),
        num_steps=int(num_steps.sum()),
        num_committed=int(committed.sum()),
        num_offered=int(offered.sum()),
        num_accepted=int(accepted.sum()),
        tokens_per_step=pooled[0],
        tokens_per_step_macro=bootstrap.mean(divide(committed, num_steps)),
        acceptance_rate=pooled[1],
        positions=_position_rates(table, bootstrap),
        accepted_histogram=_histogram(requests),
        calibration=calibrate(table.request, table.survival, table.accepted, bootstrap),
    )


def _sum_counts(steps: Sequence[StepRecord]) -> tuple[int, int]:
    pairs = [judged_counts(step) for step in steps]
    return sum(offered for offered, _ in pairs), sum(accepted for _, accepted in pairs)


def _histogram(requests: Sequence[Sequence[StepRecord]]) -> tuple[int, ...]:
    accepted = [judged_counts(step)[1] for steps in requests for step in steps if step.num_offered]
    return tuple(np.bincount(accepted).tolist()) if accepted else ()


def _position_rates(table: JudgedPositions, bootstrap: Bootstrap) -> tuple[PositionRates, ...]:
    if not len(table.position):
        return ()
    depth = int(table.position.max()) + 1

    def sums(values: np.ndarray) -> np.ndarray:  # [N] -> [num_requests, depth]
        cells = table.request * depth + table.position
        return np.bincount(cells, values, bootstrap.num_requests * depth).reshape(-1, depth)

    def mean_where_reached(values: np.ndarray) -> list[Estimate]:
        known = table.reached & ~np.isnan(values)
        return bootstrap.ratio(sums(np.where(known, values, 0.0)), sums(known))

    offered, reached, accepted = sums(np.ones(len(table.position))), sums(table.reached), sums(table.accepted)
    unconditional = bootstrap.ratio(accepted, offered)
    conditional = bootstrap.ratio(accepted, reached)
    expected, confidence = mean_where_reached(table.expected), mean_where_reached(table.confidence)
    totals = np.stack([offered.sum(0), reached.sum(0), accepted.sum(0)], 1).astype(int).tolist()
    return tuple(
        PositionRates(i, *totals[i], unconditional[i], conditional[i], expected[i], confidence[i]) for i in range(depth)
    )


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
