"""How well the confidence head predicts acceptance.

The head says, for each position, how likely its draft is accepted *given that all drafts before it were*. What a
scheduler acts on is the product up to a position, the chance that the prefix survives, and that product is what is
scored here, against whether the prefix was accepted:

    Brier   mean of (s - y)^2 over positions, s the survival, y = 1 if the prefix up to here was accepted.
    ECE     sum over bins of (share of positions in the bin) * |mean s - mean y|, in `NUM_BINS` bins of equal width.
    AUROC   chance that an accepted prefix has a larger s than a rejected one, ties counting one half.

Positions that were never verified (trimmed from the block, or behind a stop) have no y and are left out. ECE of a
perfectly calibrated head is not 0 on finite data: with n positions in a bin it is about sqrt(2 s (1 - s) / (pi n))
there.

Generation observes one outcome a step; offline each draft has several, with a weight each (see `block_scores`).
Counts then become sums of weights, so the scores are those that generation comes to with many steps, without the noise
floor of single outcomes.

Source: Guo et al. 2017, arXiv:1706.04599, section 2 (ECE); Hanley and McNeil 1982 (AUROC as a rank statistic).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.evals.stats import Bootstrap, Estimate, Statistic, divide, ratio_statistic

NUM_BINS = 10
MAX_RESAMPLED_SCORES = 1000  # distinct scores kept under resampling; more than this only cost time


@dataclass(frozen=True)
class ReliabilityBin:
    """One bin of survival: positions in it, their mean survival, and the share whose prefix was accepted."""

    low: float
    high: float
    num_positions: float
    mean_survival: float | None
    accepted: Estimate


@dataclass(frozen=True)
class Calibration:
    """Calibration of cumulative confidence over `num_positions` verified draft positions, or an expected number of
    them.
    """

    num_positions: float
    ece: Estimate
    auroc: Estimate
    brier: Estimate
    bins: tuple[ReliabilityBin, ...]


def calibrate(
    request: np.ndarray,
    survival: np.ndarray,
    accepted: np.ndarray,
    bootstrap: Bootstrap,
    weight: np.ndarray | None = None,
) -> Calibration | None:
    """Score cumulative confidence against prefix acceptance.

    Args:
        request: [N] int, index of the request of each verified position, below `bootstrap.num_requests`.
        survival: [N] float in [0, 1], product of the step's confidences up to the position; NaN where the drafter has
            no confidence head.
        accepted: [N] bool, whether the draft and all before it in its step were accepted.
        bootstrap: resamples over requests.
        weight: [N] > 0, expected number of times that generation meets this outcome; None: each was met once.

    Returns:
        The scores, or None where no position has a confidence.
    """
    scored = ~np.isnan(survival)
    if not scored.any():
        return None
    number = int if weight is None else float
    weight = np.ones(len(survival)) if weight is None else weight
    outcomes = (request[scored], survival[scored], accepted[scored].astype(np.float64))
    options = (bootstrap.num_requests, weight[scored])
    return Calibration(
        num_positions=number(weight[scored].sum()),
        ece=bootstrap.estimates(ece_statistic(*outcomes, *options))[0],
        auroc=_auroc_estimate(*outcomes, weight[scored], bootstrap),
        brier=bootstrap.estimates(brier_statistic(*outcomes, *options))[0],
        bins=_bins(_bin_sums(*outcomes, *options), bootstrap, number),
    )


def brier_statistic(
    request: np.ndarray,
    survival: np.ndarray,
    accepted: np.ndarray,
    num_requests: int,
    weight: np.ndarray | float = 1.0,
) -> Statistic:
    """Brier score, one figure; arguments as in `calibrate`, without NaN."""
    errors = np.bincount(request, weight * (survival - accepted) ** 2, num_requests)
    counts = np.bincount(request, weight * np.ones_like(survival), num_requests)
    return ratio_statistic(errors[:, None], counts[:, None])


def ece_statistic(
    request: np.ndarray,
    survival: np.ndarray,
    accepted: np.ndarray,
    num_requests: int,
    weight: np.ndarray | float = 1.0,
) -> Statistic:
    """ECE, one figure; arguments as in `calibrate`, without NaN."""
    sums = _bin_sums(request, survival, accepted, num_requests, weight)

    def ece(weights: np.ndarray) -> np.ndarray:
        count, predicted, realised = (weights @ part for part in sums)
        return divide(np.abs(predicted - realised).sum(1), count.sum(1))[:, None]

    return ece


def auroc(positives: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """Area under the ROC curve from counts per score.

    Args:
        positives: [r, G], weight of accepted prefixes at each of G scores in ascending order.
        negatives: [r, G], the same of rejected ones.

    Returns:
        [r]; NaN for a row that lacks positives or negatives.
    """
    negatives_below = np.cumsum(negatives, axis=1) - negatives
    won = (positives * (negatives_below + negatives / 2)).sum(1)
    return divide(won, positives.sum(1) * negatives.sum(1))


def _auroc_estimate(
    request: np.ndarray, survival: np.ndarray, accepted: np.ndarray, weight: np.ndarray, bootstrap: Bootstrap
) -> Estimate:
    scores, rank = np.unique(survival, return_inverse=True)

    def area(row: np.ndarray, column: np.ndarray, shape: tuple[int, int], draws: np.ndarray) -> np.ndarray:
        labels = (weight * accepted, weight * (1 - accepted))
        return auroc(*(draws @ _sum_by(row, column, values, shape) for values in labels))

    exact = area(np.zeros_like(rank), rank, (1, len(scores)), np.ones((1, 1)))[0]
    num_groups = min(len(scores), MAX_RESAMPLED_SCORES)
    group = rank * num_groups // len(scores)  # neighbouring scores become ties; only the interval sees it
    resampled = area(request, group, (bootstrap.num_requests, num_groups), bootstrap.weights)
    return bootstrap.estimate(exact, resampled)


def _bin_sums(
    request: np.ndarray,
    survival: np.ndarray,
    accepted: np.ndarray,
    num_requests: int,
    weight: np.ndarray | float,
) -> list[np.ndarray]:
    """Positions, survival and accepted prefixes per request and bin, each [num_requests, NUM_BINS]."""
    index = np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    columns = (np.ones_like(survival), survival, accepted)
    return [_sum_by(request, index, weight * values, (num_requests, NUM_BINS)) for values in columns]


def _bins(
    sums: Sequence[np.ndarray], bootstrap: Bootstrap, number: Callable[[float], float]
) -> tuple[ReliabilityBin, ...]:
    count, predicted, realised = sums
    shares = bootstrap.ratio(realised, count)
    counts, means = count.sum(0), divide(predicted.sum(0), count.sum(0))
    return tuple(
        ReliabilityBin(
            low=i / NUM_BINS,
            high=(i + 1) / NUM_BINS,
            num_positions=number(counts[i]),
            mean_survival=float(means[i]) if counts[i] else None,
            accepted=shares[i],
        )
        for i in range(NUM_BINS)
    )


def _sum_by(row: np.ndarray, column: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Sum `values` [N] into cells (row, column) of an array of `shape`."""
    return np.bincount(row * shape[1] + column, values, shape[0] * shape[1]).reshape(shape)
