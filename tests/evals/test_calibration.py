"""Calibration scores on labels drawn from known chances, and against brute-force definitions."""

import numpy as np
import pytest
from step_records import coin_steps, step

from dspark.evals.acceptance import judged_positions, measure_acceptance
from dspark.evals.calibration import MAX_RESAMPLED_SCORES, NUM_BINS, calibrate
from dspark.evals.stats import Bootstrap


def outcomes(*columns):
    return np.rec.fromarrays(columns, names=["request", "survival", "accepted"])


def brute_force_auroc(scores, labels):
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels] for n in scores[~labels]]
    return sum(pairs) / len(pairs)


def test_a_calibrated_head_has_an_ece_near_zero():
    """6000 steps of 4 drafts, head = truth: 24000 positions.

    With n positions in a bin its |mean s - mean y| is about sqrt(2 s (1 - s) / (pi n)); summed with the bins' shares
    this stays below sqrt(10 bins * 0.25 * 2 / pi / 24000) = 0.0082 on average. Positions of one step are dependent,
    at most 4 of them, which at worst doubles it. 0.02 is far outside for a fresh seed; the seed is fixed.
    """
    rng = np.random.default_rng(5)
    calibration = measure_acceptance([coin_steps(rng, 200, 4) for _ in range(30)]).calibration
    assert calibration.num_positions == 24000
    assert calibration.ece.value < 0.02
    assert sum(b.num_positions for b in calibration.bins) == 24000
    assert all(abs(b.mean_survival - b.accepted.value) < 0.1 for b in calibration.bins if b.num_positions > 300)


def test_an_overconfident_head_is_seen():
    """The head reports sqrt(c) for c: the gap is E[sqrt s - s], about 0.17 for these chances; both scores must
    worsen."""
    honest, bold = (
        measure_acceptance([coin_steps(np.random.default_rng(6), 500, 4, report)] * 3).calibration
        for report in (lambda c: c, lambda c: c**0.5)
    )
    assert bold.ece.value > 0.1
    assert bold.brier.value > honest.brier.value
    assert bold.auroc.value == pytest.approx(honest.auroc.value, abs=1e-12)  # a monotone change keeps the order


def test_scores_by_hand():
    """Two steps of two drafts: survivals (0.8, 0.4) both accepted, (0.5, 0.25) rejected at once."""
    steps = [step(2, 2, confidence=(0.8, 0.5)), step(2, 0, confidence=(0.5, 0.5))]
    calibration = measure_acceptance([steps]).calibration
    assert calibration.brier.value == pytest.approx((0.2**2 + 0.6**2 + 0.5**2 + 0.25**2) / 4)
    assert calibration.ece.value == pytest.approx((0.2 + 0.6 + 0.5 + 0.25) / 4)  # four bins of one position
    assert calibration.auroc.value == pytest.approx(3 / 4)  # of (0.8, 0.4) x (0.5, 0.25), only 0.4 < 0.5 is lost


@pytest.mark.parametrize("decimals", [pytest.param(1, id="many-ties"), pytest.param(12, id="no-ties")])
def test_auroc_matches_its_definition(decimals):
    rng = np.random.default_rng(decimals)
    scores = rng.random(200).round(decimals)
    labels = rng.random(200) < scores
    calibration = calibrate(outcomes(np.repeat(np.arange(10), 20), scores, labels), Bootstrap(10))
    assert calibration.auroc.value == pytest.approx(brute_force_auroc(scores, labels), abs=1e-12)
    assert calibration.auroc.low < calibration.auroc.value < calibration.auroc.high


def test_auroc_interval_barely_depends_on_grouping_scores():
    """More distinct scores than are kept under resampling: the interval moves by less than a tenth of its width."""
    rng = np.random.default_rng(8)
    scores = rng.random(2 * MAX_RESAMPLED_SCORES)
    labels = rng.random(len(scores)) < scores
    request = np.arange(len(scores)) % 20
    bootstrap = Bootstrap(20, num_resamples=200)
    estimate = calibrate(outcomes(request, scores, labels), bootstrap).auroc
    exact = []
    for weights in bootstrap.weights:
        repeated = np.repeat(np.arange(len(scores)), weights[request].astype(int))
        s, y = scores[repeated], labels[repeated]
        order = np.sort(s[~y])
        below, upto = np.searchsorted(order, s[y], "left"), np.searchsorted(order, s[y], "right")
        exact.append((below + upto).mean() / 2 / len(order))
    low, high = np.quantile(exact, [0.025, 0.975])
    assert estimate.low == pytest.approx(low, abs=0.1 * (high - low))
    assert estimate.high == pytest.approx(high, abs=0.1 * (high - low))


def test_trimmed_positions_and_those_behind_a_stop_are_left_out():
    """Offered 1 of a longer block; and 5 accepted with the stop third: 1 + 3 positions have a label."""
    steps = [step(1, 0, confidence=(0.5,)), step(5, 5, committed=3, finish="stop", confidence=(0.9,) * 5)]
    table = judged_positions([steps])
    assert table.position.tolist() == [0, 0, 1, 2]
    assert table.accepted.tolist() == [False, True, True, True]
    assert measure_acceptance([steps]).calibration.num_positions == 4


def test_the_label_is_the_prefix_and_not_the_slot():
    """Behind the first rejection every position is a failure, however sure the head was of it alone."""
    table = judged_positions([[step(3, 1, confidence=(0.9, 0.2, 0.99))]])
    assert table.accepted.tolist() == [True, False, False]
    assert table.reached.tolist() == [True, True, False]


def test_certain_confidence_falls_in_the_last_bin():
    calibration = measure_acceptance([[step(1, 1, confidence=(1.0,))]]).calibration
    assert calibration.bins[NUM_BINS - 1].num_positions == 1


def test_one_kind_of_label_has_no_auroc():
    calibration = measure_acceptance([[step(2, 2, confidence=(0.9, 0.9))]] * 3).calibration
    assert calibration.auroc.value is None
    assert calibration.brier.value is not None


def test_no_head_no_calibration():
    assert measure_acceptance([[step(2, 2)]]).calibration is None
