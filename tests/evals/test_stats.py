"""Bootstrap intervals: exact values, coverage of a known parameter, and what is left undefined."""

import numpy as np
import pytest

from dspark.evals.stats import Bootstrap, Estimate


def test_ratio_is_a_ratio_of_sums_and_not_a_mean_of_ratios():
    estimate = Bootstrap(2).ratio(np.array([[16.0], [40.0]]), np.array([[2.0], [20.0]]))[0]
    assert estimate.value == pytest.approx(56 / 22)
    assert Bootstrap(2).mean(np.array([8.0, 2.0])).value == 5.0


def test_interval_is_the_percentile_range_of_all_resamples():
    """Two requests with means 0 and 1: a resample is 0, 1/2 or 1 with chances 1/4, 1/2, 1/4, so 95% of it is [0,
    1]."""
    estimate = Bootstrap(2).mean(np.array([0.0, 1.0]))
    assert (estimate.low, estimate.high) == (0.0, 1.0)


def test_columns_are_independent_and_share_the_draws():
    numerators, denominators = np.array([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]]), np.ones((3, 2))
    once, twice = Bootstrap(3).ratio(numerators, denominators)
    assert (twice.value, twice.low, twice.high) == pytest.approx((2 * once.value, 2 * once.low, 2 * once.high))


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    values = np.random.default_rng(0).normal(size=20)
    assert Bootstrap(20).mean(values) == Bootstrap(20).mean(values)
    assert Bootstrap(20, seed=1).mean(values) != Bootstrap(20, seed=2).mean(values)


def test_coverage_of_a_known_ratio():
    """500 experiments of 40 requests, true ratio 3.

    A 95% percentile interval at n = 40 covers about 93.5%. The count is binomial: at a true coverage of 93.5%, fewer
    than 90% or more than 97.5% of 500 has a chance below 0.002 for a fresh seed; the seed is fixed.
    """
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(500):
        num_steps = rng.integers(5, 50, size=40).astype(float)
        committed = rng.poisson(3.0 * num_steps).astype(float)
        estimate = Bootstrap(40, num_resamples=400).ratio(committed[:, None], num_steps[:, None])[0]
        covered += estimate.low <= 3.0 <= estimate.high
    assert 450 <= covered <= 487


def test_interval_shrinks_with_the_square_root_of_the_requests():
    rng = np.random.default_rng(3)
    few, many = (Bootstrap(n).mean(rng.normal(size=n)) for n in (100, 1600))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4, rel=0.25)


def test_undefined_figures_are_none():
    nothing = Bootstrap(3).ratio(np.zeros((3, 1)), np.zeros((3, 1)))[0]
    assert nothing == Estimate(None)
    assert Bootstrap(0).mean(np.zeros(0)) == Estimate(None)


def test_one_request_has_a_value_but_no_interval():
    assert Bootstrap(1).mean(np.array([2.0])) == Estimate(2.0)


def test_requests_without_a_value_are_left_out_of_a_mean():
    estimate = Bootstrap(3).mean(np.array([1.0, np.nan, 3.0]))
    assert estimate.value == 2.0
    assert 1.0 <= estimate.low <= estimate.high <= 3.0


def test_an_interval_holds_its_figure_where_resampling_only_adds_error():
    """Signs that cancel on the data, and in no resample."""
    signs = np.array([1.0, -1.0] * 5)
    bootstrap = Bootstrap(10)
    assert bootstrap.estimate(0.0, np.abs(bootstrap.weights @ signs) + 0.5).low == 0.0
    assert bootstrap.estimate(5.0, np.full(2000, 3.0)) == Estimate(5.0, 3.0, 5.0)
