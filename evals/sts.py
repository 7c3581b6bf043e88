"""Sequential temperature scaling: a temperature and an offset per draft position, fitted on real accept events.

The head's logits z_1..z_K of a step become survivals s_k = sigmoid(z_1 / T_1 + b_1) * ... * sigmoid(z_k / T_k + b_k),
the chance that drafts 1..k are all accepted. Position 1 is fitted first, then position 2 with the first kept, and so
on: each T_k and b_k maximise the likelihood

    sum over steps that verified draft k of  y_k log s_k + (1 - y_k) log(1 - s_k)

of the label y_k, whether the prefix up to k was accepted. Fitting the product left to right lets a later position make
up for what the earlier ones leave, which is what counts for whoever acts on survivals. A temperature alone turns the
curve of confidences round one half; a head that is too low or too high there needs the offset. Where few prefixes
reach, or all logits are alike, the likelihood says little; weak priors (log T and b normal around 0, standard
deviations log 2 and 1) then keep the head's own confidences, and are outweighed by some hundred events.

Which events have a label decides whether the fit is unbiased:

* A draft that was not verified (trimmed from the block, or behind the stop that ended the request) has no label. It is
  left out also where an earlier draft of its step was rejected and the prefix is known to have failed: keeping the
  known failures alone would make every survival too small.
* Behind the first rejection y_k is 0, the prefix has failed. Whether draft k by itself would have been accepted stays
  unknown, so y_k is only ever compared with s_k, never with the confidence of position k alone.
* The events are those of rejection sampling at the temperature of the run. Whether a draft equals the target's argmax
  is another event, and wrong under sampling.

Source: the DSpark paper (sequential temperature scaling; there without offsets, and by expected calibration error on a
grid; likelihood is smooth and needs no bins); Guo et al. 2017, arXiv:1706.04599, section 4.2; Fisher scoring: McCullagh
and Nelder, Generalized Linear Models, section 2.5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.confidence import Scaling
from dspark.evals.acceptance import judged_counts, judged_positions
from dspark.evals.calibration import brier_statistic, ece_statistic, with_confidence
from dspark.evals.stats import Bootstrap, Estimate, Statistic
from dspark.records import StepRecord

TEMPERATURE_RANGE = (0.05, 20.0)  # a fit at either end says that the head's logits have no scale worth keeping
MAX_STEPS, SMALL_STEP = 60, 1e-9
MIN_LABELS = 20  # of each kind at a position
PRIOR_DEVIATIONS = np.array([np.log(2.0), 1.0])  # of log T and b
MAX_LOG_SURVIVAL = -1e-7  # a confidence that was rounded to 1 must not make one rejection infinitely unlikely
MAX_LOGIT = 40.0  # nor have an infinite logit


@dataclass(frozen=True)
class Change:
    """A score of the head's own confidences, of the scaled ones, and the difference over the same requests."""

    before: Estimate
    after: Estimate
    change: Estimate


@dataclass(frozen=True)
class ScalingEffect:
    """What a scaling does on requests; scores are those of `dspark.evals.calibration`, `positions` one by one.

    ECE of a position is never smaller than what chance gives it, and a single position has fewer labels than all.
    """

    num_requests: int
    num_steps: int
    num_positions: int
    ece: Change
    brier: Change
    position_ece: tuple[Change, ...]


def fit_sts(requests: Sequence[Sequence[StepRecord]], num_positions: int | None = None) -> Scaling:
    """Fit a temperature and an offset per draft position, left to right.

    Args:
        requests: the steps of each request, with the head's own confidences (`undo_scaling` gives them where a
            calibration was already applied).
        num_positions: K; None takes the longest block that was verified.

    Returns:
        T_1..T_K, each in `TEMPERATURE_RANGE`, and b_1..b_K. Calibrated confidences give about 1 and 0.

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
    _check_labels(accepted, offered, depth)
    fitted: list[tuple[float, float]] = []
    log_survival = np.zeros(len(logits))
    for k in range(depth):
        known = offered > k
        labels = accepted[known] > k
        fitted.append(_fit_position(logits[known, k], log_survival[known], labels))
        log_survival[known] += _log_sigmoid(logits[known, k] / fitted[-1][0] + fitted[-1][1])
    return Scaling(*(tuple(values) for values in zip(*fitted, strict=True)))


def _check_labels(accepted: np.ndarray, offered: np.ndarray, depth: int) -> None:
    """Refuse events in which a position has too few prefixes of either kind (ValueError); of several such positions the
    scarcest is named, since it says how much more is needed.
    """
    verified = np.array([(offered > k).sum() for k in range(depth)])
    kept = np.array([(accepted[offered > k] > k).sum() for k in range(depth)])
    fewer = np.minimum(kept, verified - kept)
    if fewer.min() >= MIN_LABELS:
        return
    k, num_short = int(fewer.argmin()), int((fewer < MIN_LABELS).sum())
    others = f" (the scarcest of {num_short} drafts that have too few)" if num_short > 1 else ""
    raise ValueError(
        f"draft {k + 1} was verified in {verified[k]} steps, with {kept[k]} accepted prefixes and "
        f"{verified[k] - kept[k]} rejected ones{others}: a fit needs {MIN_LABELS} of each. Run "
        f"{'more than' if fewer[k] == 0 else 'some'} {MIN_LABELS / max(fewer[k], 1):.1f} times as many requests, or "
        "longer ones"
    )


def scale_steps(requests: Sequence[Sequence[StepRecord]], scaling: Scaling) -> list[list[StepRecord]]:
    """Records as a drafter with this scaling would have left them.

    Raises:
        ValueError: a step has more drafts than there are temperatures.
    """
    temperatures, offsets = np.array(scaling)
    return [[_rescaled(step, 1 / temperatures, offsets) for step in steps] for steps in requests]


def undo_scaling(requests: Sequence[Sequence[StepRecord]], scaling: Scaling) -> list[list[StepRecord]]:
    """Inverse of `scale_steps`, but for confidences that were rounded to 0 or 1."""
    temperatures, offsets = np.array(scaling)
    return [[_rescaled(step, temperatures, -offsets * temperatures) for step in steps] for steps in requests]


def scaling_effect(requests: Sequence[Sequence[StepRecord]], scaling: Scaling) -> ScalingEffect:
    """Score confidences before and after scaling, on requests that it was not fitted on.

    Args:
        requests: the steps of each request, with the head's own confidences.
        scaling: of every draft position.
    """
    bootstrap = Bootstrap(len(requests))
    tables = [with_confidence(judged_positions(steps)) for steps in (requests, scale_steps(requests, scaling))]

    def change(score: Callable[[np.recarray, int], Statistic], position: int | None = None) -> Change:
        chosen = [table if position is None else table[table.position == position] for table in tables]
        before, after = (score(table, len(requests)) for table in chosen)
        return Change(*(bootstrap.estimates(s)[0] for s in (before, after, lambda w: after(w) - before(w))))

    return ScalingEffect(
        num_requests=len(requests),
        num_steps=sum(1 for steps in requests for step in steps if step.confidence),
        num_positions=len(tables[0]),
        ece=change(ece_statistic),
        brier=change(brier_statistic),
        position_ece=tuple(change(ece_statistic, k) for k in range(len(scaling.temperatures))),
    )


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
    logits[judged] = np.clip(_logit(np.array(confidences, dtype=np.float64)), -MAX_LOGIT, MAX_LOGIT)
    return logits, accepted, offered


def _fit_position(logits: np.ndarray, log_survival: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Temperature and offset of one position, by Fisher scoring in log T and b.

    Args:
        logits: [S], the head's own.
        log_survival: [S], log of the survival up to the position before.
        labels: [S] bool, whether the prefix up to this position was accepted.
    """
    ends = np.stack([np.log(TEMPERATURE_RANGE), (-np.inf, np.inf)], axis=1)

    def loss(point: np.ndarray) -> float:
        log_s = _log_survival(logits, log_survival, point)
        prior = (point**2 / (2 * PRIOR_DEVIATIONS**2)).sum()
        return float(prior - np.where(labels, log_s, np.log(-np.expm1(log_s))).sum())

    point = np.zeros(2)
    for _ in range(MAX_STEPS):
        odds = 1 / np.expm1(-_log_survival(logits, log_survival, point))
        x = logits * np.exp(-point[0]) + point[1]
        slope = np.exp(_log_sigmoid(-x))  # of log s in x
        columns = np.stack([-logits * np.exp(-point[0]), np.ones_like(logits)]) * slope
        gradient = point / PRIOR_DEVIATIONS**2 - columns @ np.where(labels, 1.0, -odds)
        information = np.diag(1 / PRIOR_DEVIATIONS**2) + (columns * odds) @ columns.T
        step, best = -np.linalg.solve(information, gradient), loss(point)
        while loss(np.clip(point + step, *ends)) > best and abs(step).max() > SMALL_STEP:
            step /= 2
        point = np.clip(point + step, *ends)
        if abs(step).max() <= SMALL_STEP:
            break
    return float(np.exp(point[0])), float(point[1])


def _log_survival(logits: np.ndarray, before: np.ndarray, point: np.ndarray) -> np.ndarray:
    """[S] log of the survival with this position, of which `point` holds log T and b."""
    return np.minimum(before + _log_sigmoid(logits * np.exp(-point[0]) + point[1]), MAX_LOG_SURVIVAL)


def _rescaled(step: StepRecord, factors: np.ndarray, offsets: np.ndarray) -> StepRecord:
    """The step with sigmoid(logit(c_i) * factors_i + offsets_i) for its confidences c_i."""
    if not step.confidence:
        return step
    drafts = len(step.confidence)
    if drafts > len(factors):
        raise ValueError(f"a step has {drafts} drafts, and there are {len(factors)} temperatures")
    logits = _logit(np.array(step.confidence)) * factors[:drafts] + offsets[:drafts]
    return replace(step, confidence=tuple(np.exp(_log_sigmoid(logits)).tolist()))


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -x)


def _logit(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-p)
