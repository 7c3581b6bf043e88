"""Bootstrap intervals over requests.

Steps of one request resemble each other, so the unit that is resampled is the request: a resample draws as many
requests as there are, with replacement, and the figure is computed anew from all steps of the drawn requests. The
interval is the central `LEVEL` share of the resampled figures (percentile interval). A resample is a row of
*weights*, how often each request was drawn, so that sums over a resample are one matrix product.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 6 and 13.
"""

from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
NUM_RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap interval.

    `value` is None where the data do not define it (nothing was offered, say). `low` and `high` are None then, and
    where there are fewer than two requests, from which no spread can be seen.
    """

    value: float | None
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """The three numbers under their names, None for what is undefined (JSON has no NaN)."""
        return {"value": self.value, "low": self.low, "high": self.high}


class Bootstrap:
    """One set of resamples, shared by all figures of a report so that they rest on the same draws.

    `weights` is [num_resamples, num_requests]: how often each resample drew each request.

    Args:
        num_requests: number of requests to resample, 0 or more.
        num_resamples: resamples to draw, at least 1.
        seed: seed of the draws; the same numbers give the same intervals.
    """

    def __init__(self, num_requests: int, num_resamples: int = NUM_RESAMPLES, seed: int = SEED):
        if num_requests < 0 or num_resamples < 1:
            raise ValueError(
                f"num_requests must be >= 0 and num_resamples >= 1, got {num_requests} and {num_resamples}"
            )
        self.num_requests = num_requests
        self.num_resamples = num_resamples
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
        numerators, denominators = self._columns(numerators), self._columns(denominators)
        values = divide(numerators.sum(0), denominators.sum(0))
        resampled = divide(self.weights @ numerators, self.weights @ denominators)
        return [self.estimate(value, column) for value, column in zip(values, resampled.T, strict=True)]

    def mean(self, values: np.ndarray) -> Estimate:
        """Mean over requests of `values` [num_requests]; NaN marks a request without a value, which is left out."""
        values = np.asarray(values, dtype=np.float64)
        known = ~np.isnan(values)
        return self.ratio(np.where(known, values, 0.0)[:, None], known[:, None])[0]

    def _columns(self, values: np.ndarray) -> np.ndarray:
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 2 or len(values) != self.num_requests:
            raise ValueError(f"expected [{self.num_requests}, m] per-request sums, got shape {values.shape}")
        return values

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
        return Estimate(float(value), float(low), float(high))


def divide(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Elementwise ratio, NaN where the denominator is 0."""
    undefined = np.full(np.shape(numerators), np.nan)
    return np.divide(numerators, denominators, out=undefined, where=np.asarray(denominators) > 0)
