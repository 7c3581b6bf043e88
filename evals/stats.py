"""Bootstrap intervals over requests.

Steps of one request resemble each other, so the unit that is resampled is the request: a resample draws as many
requests as there are, with replacement, and the figure is computed anew from all steps of the drawn requests. The
interval is the central `LEVEL` share of the resampled figures (percentile interval), and always contains the figure
itself. A resample is a row of *weights*, how often each request was drawn, so that sums over a resample are one matrix
product.

A figure is a `Statistic`: a function of such weights. Its value is the statistic at weights of one, its interval comes
from the statistic at the resamples, and differences and means of statistics are statistics again, so that a comparison
of two runs over the same requests keeps their pairing.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 6 and 13.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
NUM_RESAMPLES = 2000
SEED = 0

# Weights [r, num_requests] -> [r, m]: m figures under each row of weights, NaN where they are undefined.
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap interval.

    `value` is None where the data do not define it (nothing was offered, say). `low` and `high` are None then, and
    where there are fewer than two requests, from which no spread can be seen. There is no NaN, which JSON lacks.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


class Bootstrap:
    """One set of resamples, shared by all figures of a report so that they rest on the same draws.

    `weights` is [num_resamples, num_requests]: how often each resample drew each request.

    Args:
        num_requests: number of requests to resample, 0 or more.
        num_resamples: resamples to draw, at least 1.
        seed: seed of the draws; the same numbers give the same intervals.
    """

    def __init__(self, num_requests: int, num_resamples: int = NUM_RESAMPLES, seed: int = SEED):
        self.num_requests = num_requests
        self.weights = np.zeros((num_resamples, num_requests))
        if num_requests:
            shares = np.full(num_requests, 1 / num_requests)
            self.weights += np.random.default_rng(seed).multinomial(num_requests, shares, num_resamples)

    def ratio(self, numerators: np.ndarray, denominators: np.ndarray) -> list[Estimate]:
        """Ratios of sums over requests, one per column.

        Args:
            numerators: [num_requests, m], per-request sums.
            denominators: [num_requests, m], likewise, not negative.

        Returns:
            m estimates of sum(numerators) / sum(denominators). Resamples whose denominator is 0 do not define the
            ratio and are left out.
        """
        return self.estimates(ratio_statistic(numerators, denominators))

    def estimates(self, statistic: Statistic) -> list[Estimate]:
        """The m figures of a statistic over these requests, each with its interval."""
        values = statistic(np.ones((1, self.num_requests)))[0]
        return [self.estimate(*pair) for pair in zip(values, statistic(self.weights).T, strict=True)]

    def mean(self, values: np.ndarray) -> Estimate:
        """Mean over requests of `values` [num_requests]; NaN marks a request without a value, which is left out."""
        return self.estimates(mean_statistic(values))[0]

    def estimate(self, value: float, resampled: np.ndarray) -> Estimate:
        """Pair a figure with the interval of its resampled values.

        Args:
            value: the figure on the data; NaN where undefined.
            resampled: [num_resamples], the figure under each row of `weights`; NaN entries are left out.
        """
        if np.isnan(value):
            return Estimate(None)
        resampled = resampled[~np.isnan(resampled)]
        if self.num_requests < 2 or not len(resampled):
            return Estimate(float(value))
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        # Resampling adds noise, which ECE counts as error: all its resamples can lie above the figure of the data, and
        # an interval that leaves that out would state the noise as the head's. Widening keeps the upper end cautious.
        return Estimate(float(value), min(float(low), float(value)), max(float(high), float(value)))


def ratio_statistic(numerators: np.ndarray, denominators: np.ndarray) -> Statistic:
    """Ratios of sums over requests: both [num_requests, m], denominators not negative."""
    return lambda weights: divide(weights @ numerators, weights @ denominators)


def mean_statistic(values: np.ndarray) -> Statistic:
    """Mean over requests of `values` [num_requests], one figure; NaN marks a request without a value."""
    known = ~np.isnan(values)
    return ratio_statistic(np.where(known, values, 0.0)[:, None], known[:, None].astype(np.float64))


def macro_mean(parts: Sequence[tuple[int, Statistic]]) -> list[Estimate]:
    """Plain means over data sets, whatever their sizes.

    Args:
        parts: number of requests and statistic of each data set; one with fewer than m figures lacks the last ones.

    Returns:
        m estimates. Each set is resampled by itself (a stratified bootstrap); a figure that is undefined on one set is
        undefined.
    """
    draws = [Bootstrap(num_requests, seed=SEED + 1 + i) for i, (num_requests, _) in enumerate(parts)]
    figures = [
        statistic(np.vstack([np.ones((1, draw.num_requests)), draw.weights]))
        for draw, (_, statistic) in zip(draws, parts, strict=True)
    ]
    widest = max(part.shape[1] for part in figures)
    padded = [np.pad(part, ((0, 0), (0, widest - part.shape[1])), constant_values=np.nan) for part in figures]
    values, resampled = np.split(np.mean(padded, axis=0), [1])
    fewest = min(draws, key=lambda draw: draw.num_requests)  # one request in a set: no spread can be seen
    return [fewest.estimate(value, column) for value, column in zip(values[0], resampled.T, strict=True)]


def sum_by(row: np.ndarray, column: np.ndarray | int, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Sum values into cells (row, column) of an array of `shape`; the three are broadcast against each other."""
    cells, values = np.broadcast_arrays(row * shape[1] + column, values)
    return np.bincount(cells.ravel(), values.ravel(), shape[0] * shape[1]).reshape(shape)


def divide(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Elementwise ratio, NaN where the denominator is 0."""
    undefined = np.full(np.shape(numerators), np.nan)
    return np.divide(numerators, denominators, out=undefined, where=np.asarray(denominators) > 0)
