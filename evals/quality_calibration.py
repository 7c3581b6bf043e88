"""Calibration of confidence in expectation: the scores of `dspark.evals.calibration` over outcomes with chances.

Generation observes one outcome a step; offline each draft has several, with a weight each (`evals/block_scores.py`).
Sums over observations become sums of weights, so ECE, AUROC and Brier are those that generation comes to with many
steps. ECE has no noise floor here but that of the requests.
Two commands that show it:

    dspark quality --dataset default
    dspark quality --dataset default --require "ece<=0.05" "auroc>=0.8"
"""

from dataclasses import dataclass

import numpy as np

from dspark.evals.calibration import MAX_RESAMPLED_SCORES, NUM_BINS, auroc
from dspark.evals.stats import Bootstrap, Estimate, divide


@dataclass(frozen=True)
class ExpectedCalibration:
    """Scores of cumulative confidence over an expected number of draft positions."""

    num_positions: float
    ece: Estimate
    auroc: Estimate
    brier: Estimate


def expected_calibration(
    request: np.ndarray, survival: np.ndarray, accepted: np.ndarray, weight: np.ndarray, bootstrap: Bootstrap
) -> ExpectedCalibration | None:
    """Score cumulative confidence against prefix acceptance.

    Args:
        request: [N] int, request of each outcome.
        survival: [N] in [0, 1], product of the confidences up to the draft; NaN where the drafter has no head.
        accepted: [N] bool, whether the prefix is accepted in this outcome.
        weight: [N] > 0, expected number of times that generation meets it.
        bootstrap: resamples over requests.

    Returns:
        The scores, or None where no outcome has a confidence.
    """
    scored = ~np.isnan(survival)
    if not scored.any():
        return None
    request, survival, weight = request[scored], survival[scored], weight[scored]
    hit = weight * accepted[scored]
    num_requests = bootstrap.num_requests

    def sums(column: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:  # [N] -> [num_requests, width]
        return np.bincount(request * width + column, values, num_requests * width).reshape(num_requests, width)

    def binned(values: np.ndarray) -> np.ndarray:
        return sums(np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1), values, NUM_BINS)

    count, predicted, realised = binned(weight), binned(weight * survival), binned(hit)

    def ece(draws: np.ndarray) -> np.ndarray:  # [r, num_requests] -> [r]
        return divide(np.abs(draws @ (predicted - realised)).sum(1), (draws @ count).sum(1))

    # Neighbouring scores become ties where there are more than enough of them.
    scores, rank = np.unique(survival, return_inverse=True)
    width = min(len(scores), MAX_RESAMPLED_SCORES)
    group = rank * width // len(scores)
    positives, negatives = sums(group, hit, width), sums(group, weight - hit, width)
    everyone = np.ones((1, num_requests))
    error = weight * (survival - accepted[scored]) ** 2
    whole = np.zeros_like(request)
    return ExpectedCalibration(
        num_positions=float(weight.sum()),
        ece=bootstrap.estimate(ece(everyone)[0], ece(bootstrap.weights)),
        auroc=bootstrap.estimate(
            auroc(everyone @ positives, everyone @ negatives)[0],
            auroc(bootstrap.weights @ positives, bootstrap.weights @ negatives),
        ),
        brier=bootstrap.ratio(sums(whole, error, 1), sums(whole, weight, 1))[0],
    )
