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

from dataclasses import dataclass

import numpy as np

from dspark.evals.stats import Bootstrap, Estimate, Statistic, divide, ratio_statistic, sum_by

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


def calibrate(outcomes: np.recarray, bootstrap: Bootstrap) -> Calibration | None:
    """Score cumulative confidence against prefix acceptance.

    Args:
        outcomes: [N] verified positions. `request`: int, below `bootstrap.num_requests`; `survival`: in [0, 1], product
            of the step's confidences up to the position, NaN where the drafter has no confidence head; `accepted`:
            whether the draft and all before it in its step were. `weight`, which it may lack: > 0, expected number of
            times that generation meets this outcome; without it each was met once.
        bootstrap: resamples over requests.

    Returns:
        The scores, or None where no position has a confidence.
    """
    outcomes = with_confidence(outcomes)
    if not len(outcomes):
        return None
    number = float if "weight" in outcomes.dtype.names else int
    sums = _bin_sums(outcomes, bootstrap.num_requests)
    count, predicted = (part.sum(0) for part in sums[:2])
    means, shares = divide(predicted, count), bootstrap.ratio(sums[2], sums[0])
    return Calibration(
        num_positions=number(_weight(outcomes).sum()),
        ece=bootstrap.estimates(ece_statistic(outcomes, bootstrap.num_requests))[0],
        auroc=_auroc_estimate(outcomes, bootstrap),
        brier=bootstrap.estimates(brier_statistic(outcomes, bootstrap.num_requests))[0],
        bins=tuple(
            ReliabilityBin(i / NUM_BINS, (i + 1) / NUM_BINS, number(n), float(mean) if n else None, share)
            for i, (n, mean, share) in enumerate(zip(count, means, shares, strict=True))
        ),
    )


def with_confidence(outcomes: np.recarray) -> np.recarray:
    """Those whose drafter said what it expected."""
    return outcomes[~np.isnan(outcomes.survival)]


def brier_statistic(outcomes: np.recarray, num_requests: int) -> Statistic:
    """Brier score, one figure; outcomes as in `calibrate`, without NaN."""
    weight = _weight(outcomes)
    errors = weight * (outcomes.survival - outcomes.accepted) ** 2
    return ratio_statistic(*(sum_by(outcomes.request, 0, values, (num_requests, 1)) for values in (errors, weight)))


def ece_statistic(outcomes: np.recarray, num_requests: int) -> Statistic:
    """ECE, one figure; outcomes as in `calibrate`, without NaN."""
    sums = _bin_sums(outcomes, num_requests)

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


def _auroc_estimate(outcomes: np.recarray, bootstrap: Bootstrap) -> Estimate:
    scores, rank = np.unique(outcomes.survival, return_inverse=True)
    labels = [_weight(outcomes) * hit for hit in (outcomes.accepted, 1 - outcomes.accepted)]
    exact = auroc(*(sum_by(0 * rank, rank, values, (1, len(scores))) for values in labels))[0]
    num_groups = min(len(scores), MAX_RESAMPLED_SCORES)
    group = rank * num_groups // len(scores)  # neighbouring scores become ties; only the interval sees it
    shape = (bootstrap.num_requests, num_groups)
    resampled = auroc(*(bootstrap.weights @ sum_by(outcomes.request, group, values, shape) for values in labels))
    return bootstrap.estimate(exact, resampled)


def _bin_sums(outcomes: np.recarray, num_requests: int) -> list[np.ndarray]:
    """Positions, survival and accepted prefixes per request and bin, each [num_requests, NUM_BINS]."""
    index = np.minimum((outcomes.survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    columns = (_weight(outcomes) * values for values in (1.0, outcomes.survival, outcomes.accepted))
    return [sum_by(outcomes.request, index, values, (num_requests, NUM_BINS)) for values in columns]


def _weight(outcomes: np.recarray) -> np.ndarray:
    return outcomes.weight if "weight" in outcomes.dtype.names else np.ones(len(outcomes))
