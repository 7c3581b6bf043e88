"""Ratios of rates that were taken in turns: of something that chooses to the best of several fixed ones."""

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median


def gain(scheduled: Sequence[float], fixed: Sequence[Sequence[float]]) -> list[float]:
    """By round, the logarithm of what a contender made over what the fixed number made that was best in the other half.

    Args:
        scheduled: logarithms of its rates by round, at least two.
        fixed: the same of each fixed number.
    """
    best = [max(fixed, key=lambda rates: sum(rates[1 - half :: 2])) for half in (0, 1)]
    return [mine - best[i % 2][i] for i, mine in enumerate(scheduled)]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values, between which the median of their law lies with at least this confidence.

    A law's median has as many draws of n below it as a fair coin has heads, so the j-th lowest and the j-th highest
    hold it but for twice the chance of fewer than j heads. Of too few values (5 for 95%) they are the lowest and the
    highest.
    """
    ordered = sorted(values)
    heads = list(accumulate(math.comb(len(ordered), j) / 2 ** len(ordered) for j in range(len(ordered))))
    j = sum(2 * chance <= 1 - confidence for chance in heads) or 1
    return ordered[j - 1], ordered[-j]


def format_ratio(logs: Sequence[float]) -> str:
    """The median of ratios, given by their logarithms, with its 95% interval."""
    low, high = (math.exp(end) for end in median_interval(logs))
    return f"{math.exp(median(logs)):.3f} ({low:.3f} to {high:.3f})"
