"""Sequential temperature scaling: one temperature per draft position, fitted on real accept events.

The head's logits z_1..z_K of a step become survivals s_k = sigmoid(z_1 / T_1) * ... * sigmoid(z_k / T_k), the chance
that drafts 1..k are all accepted. T_1 is fitted first, then T_2 with T_1 kept, and so on: each T_k maximises the
likelihood

    sum over steps that verified draft k of  y_k log s_k + (1 - y_k) log(1 - s_k)

of the label y_k, whether the prefix up to k was accepted. Fitting the product left to right lets a later temperature
make up for what the earlier ones leave, which is what counts for whoever acts on survivals. Where few prefixes reach,
or all logits are near 0, the likelihood says little about T_k; a weak prior (log T normal around 0, standard deviation
log 2) then keeps it near 1, and is outweighed by some hundred events.

Which events have a label decides whether the fit is unbiased:

* A draft that was not verified (trimmed from the block, or behind the stop that ended the request) has no label. It is
  left out also where an earlier draft of its step was rejected and the prefix is known to have failed: keeping the
  known failures alone would make every survival too small.
* Behind the first rejection y_k is 0, the prefix has failed. Whether draft k by itself would have been accepted stays
  unknown, so y_k is only ever compared with s_k, never with the confidence of position k alone.
* The events are those of rejection sampling at the temperature of the run. Whether a draft equals the target's argmax
  is another event, and wrong under sampling.

Source: the DSpark paper (sequential temperature scaling; there by expected calibration error on a grid, here by
likelihood, which is smooth and needs no bins); Guo et al. 2017, arXiv:1706.04599, section 4.2.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dspark.evals.acceptance import judged_counts, judged_positions
from dspark.evals.calibration import brier_statistic, ece_statistic
from dspark.evals.stats import Bootstrap, Estimate, Statistic
from dspark.records import StepRecord

TEMPERATURE_RANGE = (0.05, 20.0)  # a fit at either end says that the head's logits have no scale worth keeping
GRID_POINTS = 61
REFINEMENTS = 40  # golden sections; each shrinks the bracket to 0.618
MIN_LABELS = 20  # of each kind at a position
PRIOR_DEVIATION = np.log(2.0)  # of log T
MAX_LOG_SURVIVAL = -1e-7  # a confidence that was rounded to 1 must not make one rejection infinitely unlikely
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Change:
    """A score of the head's own confidences, of the scaled ones, and the difference over the same requests."""

    before: Estimate
    after: Estimate
    change: Estimate


@dataclass(frozen=True)
class ScalingEffect:
    """What temperatures do on requests; scores are those of `dspark.evals.calibration`, `positions` one by one.

    ECE of a position is never smaller than what chance gives it, and a single position has fewer labels than all.
    """

    num_requests: int
    num_steps: int
    num_positions: int
    ece: Change
    brier: Change
    position_ece: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def fit_sts(requests: Sequence[Sequence[StepRecord]], num_positions: int | None = None) -> list[float]:
    """Fit one temperature per draft position, left to right.

    Args:
        requests: the steps of each request, with the head's own confidences (`undo_scaling` gives them where a
            calibration was already applied).
        num_positions: K; None takes the longest block that was verified.

    Returns:
        T_1..T_K, each in `TEMPERATURE_RANGE`. Calibrated confidences give about 1, overconfident ones more.

    Raises:
        ValueError: there are no confidences, or a position has too few accepted or rejected prefixes to fit on.
    """
    logits, accepted, offered = _events(requests)
    if not len(logits):
        raise ValueError(
            "no step has both drafts and confidences: the drafter has no confidence head, or the records come from a "
            "server, which does not report it"
        )
    depth = int(offered.max()) if num_positions is None else num_positions
    temperatures: list[float] = []
    log_survival = np.zeros(len(logits))
    for k in range(depth):
        known = offered > k
        labels = accepted[known] > k
        _check_labels(labels, k)
        temperatures.append(_fit_position(logits[known, k], log_survival[known], labels))
        log_survival[known] += _log_sigmoid(logits[known, k] / temperatures[-1])
    return temperatures


def scale_steps(requests: Sequence[Sequence[StepRecord]], temperatures: Sequence[float]) -> list[list[StepRecord]]:
    """Records as a drafter with these temperatures would have left them.

    Raises:
        ValueError: a step has more drafts than there are temperatures.
    """
    scales = np.asarray(temperatures, dtype=np.float64)
    return [[_rescaled(step, 1 / scales) for step in steps] for steps in requests]


def undo_scaling(requests: Sequence[Sequence[StepRecord]], temperatures: Sequence[float]) -> list[list[StepRecord]]:
    """Inverse of `scale_steps`, but for confidences that were rounded to 0 or 1."""
    scales = np.asarray(temperatures, dtype=np.float64)
    return [[_rescaled(step, scales) for step in steps] for steps in requests]


def scaling_effect(
    requests: Sequence[Sequence[StepRecord]], temperatures: Sequence[float], bootstrap: Bootstrap | None = None
) -> ScalingEffect:
    """Score confidences before and after scaling, on requests that the temperatures were not fitted on.

    Args:
        requests: the steps of each request, with the head's own confidences.
        temperatures: one per draft position.
        bootstrap: resamples over these requests; None draws them.
    """
    bootstrap = bootstrap or Bootstrap(len(requests))
    tables = [judged_positions(steps) for steps in (requests, scale_steps(requests, temperatures))]
    scored = ~np.isnan(tables[0].survival)
    columns = [(t.request[scored], t.survival[scored], t.accepted[scored].astype(np.float64)) for t in tables]
    positions = tables[0].position[scored]

    def change(score: Any, chosen: np.ndarray) -> Change:
        before, after = (score(*(values[chosen] for values in column), bootstrap.num_requests) for column in columns)
        return _change(before, after, bootstrap)

    every = np.ones(len(positions), dtype=bool)
    return ScalingEffect(
        num_requests=len(requests),
        num_steps=sum(1 for steps in requests for step in steps if step.confidence),
        num_positions=len(positions),
        ece=change(ece_statistic, every),
        brier=change(brier_statistic, every),
        position_ece=tuple(change(ece_statistic, positions == k) for k in range(len(temperatures))),
    )


def _change(before: Statistic, after: Statistic, bootstrap: Bootstrap) -> Change:
    estimates = (bootstrap.estimates(s)[0] for s in (before, after, lambda w: after(w) - before(w)))
    return Change(*estimates)


def _events(requests: Sequence[Sequence[StepRecord]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [S, K] of the S steps with confidences, and [S] how many drafts of each were accepted and judged.

    Entries of the logits at drafts that were not judged are 0 and mean nothing.
    """
    steps = [step for request in requests for step in request if step.confidence]
    counts = np.array([judged_counts(step) for step in steps], dtype=np.int64).reshape(-1, 2)
    offered, accepted = counts.T
    logits = np.zeros((len(steps), int(offered.max(initial=0))))
    judged = np.arange(logits.shape[1]) < offered[:, None]
    confidences = [
        value for step, count in zip(steps, offered.tolist(), strict=True) for value in step.confidence[:count]
    ]
    logits[judged] = _logit(np.array(confidences, dtype=np.float64))
    return logits, accepted, offered


def _check_labels(labels: np.ndarray, k: int) -> None:
    kept = int(labels.sum())
    if min(kept, len(labels) - kept) < MIN_LABELS:
        raise ValueError(
            f"draft {k + 1} was verified in {len(labels)} steps, with {kept} accepted prefixes and "
            f"{len(labels) - kept} rejected ones: a temperature needs {MIN_LABELS} of each. Run more requests"
        )


def _fit_position(logits: np.ndarray, log_survival: np.ndarray, labels: np.ndarray) -> float:
    """Temperature of one position: the best point of a grid in log T, then golden sections around it.

    Args:
        logits: [S], the head's own.
        log_survival: [S], log of the survival up to the position before.
        labels: [S] bool, whether the prefix up to this position was accepted.
    """

    def loss(log_temperature: float) -> float:
        log_s = np.minimum(log_survival + _log_sigmoid(logits * np.exp(-log_temperature)), MAX_LOG_SURVIVAL)
        prior = log_temperature**2 / (2 * PRIOR_DEVIATION**2)
        return float(prior - np.where(labels, log_s, np.log(-np.expm1(log_s))).sum())

    grid = np.linspace(*np.log(TEMPERATURE_RANGE), GRID_POINTS)
    best = int(np.argmin([loss(value) for value in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID_POINTS - 1)]
    for _ in range(REFINEMENTS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return float(np.exp((low + high) / 2))


def _rescaled(step: StepRecord, scales: np.ndarray) -> StepRecord:
    """The step with sigmoid(logit(c_i) * scales_i) for its confidences c_i."""
    if not step.confidence:
        return step
    if len(step.confidence) > len(scales):
        raise ValueError(f"a step has {len(step.confidence)} drafts, and there are {len(scales)} temperatures")
    logits = _logit(np.array(step.confidence)) * scales[: len(step.confidence)]
    return replace(step, confidence=tuple(np.exp(_log_sigmoid(logits)).tolist()))


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -x)


def _logit(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-p)
