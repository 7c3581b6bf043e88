"""Sequential temperature scaling: known temperatures come back, and events without a label do not move them."""

from dataclasses import replace

import numpy as np
import pytest
from step_records import coin_steps, step

from dspark.evals.acceptance import measure_acceptance
from dspark.evals.sts import MIN_LABELS, TEMPERATURE_RANGE, fit_sts, scale_steps, scaling_effect, undo_scaling

TEMPERATURES = (2.0, 0.6, 1.5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def steps_with(temperatures, num_steps, seed, trim=None):
    """Steps of a head whose logits are too large by `temperatures`: draft i is accepted with sigmoid(z_i / T_i).

    `trim(rng, chances)` gives how many drafts are verified, from the confidences alone, as a scheduler would.
    """
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        logits = rng.normal(1.0, 1.5, len(temperatures)) * temperatures
        chances = sigmoid(logits / temperatures)
        kept = rng.random(len(temperatures)) < chances
        accepted = len(temperatures) if kept.all() else int(np.argmin(kept))
        offered = len(temperatures) if trim is None else trim(rng, chances)
        accepted = min(accepted, offered)
        steps.append(step(offered, accepted, confidence=sigmoid(logits[:offered]).tolist()))
    return steps


def test_known_temperatures_are_recovered():
    """20000 steps, prefix survival about 0.7, 0.5 and 0.33.

    Over 40 seeds the standard deviations of log T are 0.013, 0.021 and 0.037, growing with depth because fewer prefixes
    are left and the labels carry the luck of the prefix. 0.15 is four of the largest: a false alarm for under 1 of 5000
    fresh seeds; the seed is fixed.
    """
    fitted = fit_sts([steps_with(TEMPERATURES, 20000, seed=1)])
    assert np.log(fitted) == pytest.approx(np.log(TEMPERATURES), abs=0.15)


def test_a_calibrated_head_keeps_its_confidences():
    """Chances reported as they are: temperatures of 1, within four standard deviations (0.05 at position 4)."""
    fitted = fit_sts([steps_with((1.0,) * 4, 20000, seed=2)])
    assert np.log(fitted) == pytest.approx(np.zeros(4), abs=0.2)


def test_temperatures_that_were_applied_are_taken_for_none():
    """Fitting what a fit has scaled gives 1 at every position, up to the prior and the end of the search."""
    requests = [steps_with(TEMPERATURES, 4000, seed=3)]
    again = fit_sts(scale_steps(requests, fit_sts(requests)))
    assert np.log(again) == pytest.approx(np.zeros(3), abs=0.01)


def test_requests_and_their_order_do_not_matter():
    steps = steps_with(TEMPERATURES, 3000, seed=4)
    whole = fit_sts([steps])
    split = fit_sts([steps[2000:], [], steps[:2000]])
    assert split == pytest.approx(whole, rel=1e-6)


def by_confidence(rng, chances):
    """Verify while the survival is above a threshold; what lies behind is trimmed."""
    return int((np.cumprod(chances) > 0.3).sum())


class TestCensoring:
    """A label exists only where a draft was verified, and it is that of the prefix."""

    def test_trimming_by_confidence_leaves_the_fit_unbiased(self):
        """Drafts behind a survival of 0.3 are not verified; the deviations are 0.04 at most, the tolerance four."""
        fitted = fit_sts([steps_with(TEMPERATURES, 20000, seed=5, trim=by_confidence)])
        assert np.log(fitted) == pytest.approx(np.log(TEMPERATURES), abs=0.16)

    def test_trimmed_drafts_taken_for_rejected_ones_are_another_fit(self):
        """The naive reading: a draft that was not accepted was rejected. Its temperatures are wrong by far.

        Lengths are drawn at random here; the deviations of the right fit are 0.07 at most, the tolerance four.
        """
        whole = steps_with(TEMPERATURES, 20000, seed=5)
        trimmed = steps_with(TEMPERATURES, 20000, seed=5, trim=lambda rng, chances: int(rng.integers(0, 4)))
        naive = [
            replace(long, num_offered=3, num_accepted=short.num_accepted, num_committed=short.num_accepted + 1)
            for long, short in zip(whole, steps_like(whole, trimmed), strict=True)
        ]
        right = fit_sts([steps_like(whole, trimmed)])
        assert np.log(right) == pytest.approx(np.log(TEMPERATURES), abs=0.28)
        wrong = fit_sts([naive])
        assert max(abs(np.log(wrong) - np.log(TEMPERATURES))) > 0.6

    def test_known_failures_of_trimmed_drafts_are_left_out(self):
        """Where an earlier draft was rejected the trimmed prefix has failed for sure; using just those is biased."""
        whole = steps_with(TEMPERATURES, 20000, seed=6)
        rng = np.random.default_rng(0)
        lengths = rng.integers(0, 4, len(whole))
        trimmed = [cut(s, int(n)) for s, n in zip(whole, lengths, strict=True)]
        failures_kept = [s if s.num_accepted < n else cut(s, int(n)) for s, n in zip(whole, lengths, strict=True)]
        assert np.log(fit_sts([trimmed])) == pytest.approx(np.log(TEMPERATURES), abs=0.28)
        assert max(abs(np.log(fit_sts([failures_kept])) - np.log(TEMPERATURES))) > 0.6

    def test_drafts_behind_a_stop_do_not_count(self):
        """A step that ends the request after its first token says nothing of later drafts, whatever it holds."""
        steps = steps_with((1.5, 1.5), 4000, seed=7)
        ends = [step(2, 2, committed=1, finish="stop", confidence=(0.9, 0.01)) for _ in range(500)]
        cut_short = [step(1, 1, committed=1, finish="stop", confidence=(0.9,)) for _ in range(500)]
        assert fit_sts([steps, ends]) == fit_sts([steps, cut_short])

    def test_the_label_is_that_of_the_prefix_and_not_of_the_slot(self):
        """Comparing position 3 alone with the label of its prefix finds a temperature that is far too large."""
        whole = steps_with(TEMPERATURES, 20000, seed=8)
        slots = [step(1, int(s.num_accepted > 2), confidence=s.confidence[2:]) for s in whole]
        assert abs(np.log(fit_sts([slots])[0]) - np.log(TEMPERATURES[2])) > 0.6


def cut(record, offered):
    """The step as if only the first `offered` drafts had been verified."""
    accepted = min(record.num_accepted, offered)
    return replace(
        record,
        num_offered=offered,
        num_accepted=accepted,
        num_committed=accepted + 1,
        confidence=record.confidence[:offered],
    )


def steps_like(whole, trimmed):
    return [cut(w, t.num_offered) for w, t in zip(whole, trimmed, strict=True)]


def test_scaling_and_its_inverse():
    requests = [steps_with(TEMPERATURES, 50, seed=9), []]
    scaled = scale_steps(requests, TEMPERATURES)
    back = undo_scaling(scaled, TEMPERATURES)
    for before, after, record in zip(requests[0], back[0], scaled[0], strict=True):
        assert after.confidence == pytest.approx(before.confidence, abs=1e-12)
        logit = np.log(before.confidence) - np.log1p(-np.array(before.confidence))
        assert record.confidence == pytest.approx(sigmoid(logit / TEMPERATURES))
        assert replace(record, confidence=()) == replace(before, confidence=())
    certain = [[step(2, 2, confidence=(1.0, 0.0))]]
    assert scale_steps(certain, (3.0, 0.5)) == certain


def test_the_effect_is_measured_as_reports_measure_it():
    """ECE and Brier before and after are those of the calibration figures, and the change is their difference."""
    requests = [steps_with((2.5, 2.5), 100, seed=seed) for seed in range(20)]
    effect = scaling_effect(requests, (2.5, 2.5))
    for figures, name in (
        (measure_acceptance(requests).calibration, "before"),
        (measure_acceptance(scale_steps(requests, (2.5, 2.5))).calibration, "after"),
    ):
        assert getattr(effect.ece, name) == figures.ece
        assert getattr(effect.brier, name) == figures.brier
    assert effect.num_positions == 4000
    assert effect.brier.change.value == pytest.approx(effect.brier.after.value - effect.brier.before.value)
    assert effect.ece.change.high < 0
    assert effect.brier.change.high < 0
    assert len(effect.position_ece) == 2


def test_fit_on_one_half_improves_the_other():
    """Overconfident by 2 at every position: ECE falls to what chance leaves, about 0.01 for 4000 steps.

    The deviation of log T is at most 0.13 here (that of 20000 steps, times sqrt(5)); the tolerance is three of it.
    """
    halves = [[steps_with((2.0,) * 4, 100, seed=100 * half + i) for i in range(40)] for half in (0, 1)]
    fitted = fit_sts(halves[0])
    assert np.log(fitted) == pytest.approx(np.full(4, np.log(2)), abs=0.4)
    effect = scaling_effect(halves[1], fitted)
    assert effect.ece.before.value > 0.05
    assert effect.ece.after.value < 0.02


def test_a_head_without_information_ends_at_the_limit():
    """Logits that say nothing, and are wrong on average, are best flattened altogether."""
    rng = np.random.default_rng(10)
    steps = [step(1, int(rng.random() < 0.3), confidence=(float(sigmoid(rng.normal(2, 1))),)) for _ in range(5000)]
    assert fit_sts([steps])[0] == pytest.approx(TEMPERATURE_RANGE[1], rel=0.2)


def test_few_events_stay_near_1():
    """Logits near 0 and few events say little; the prior holds the fit where the likelihood alone would run away."""
    rng = np.random.default_rng(11)
    steps = [step(1, int(rng.random() < 0.5), confidence=(float(sigmoid(rng.normal(0, 0.2))),)) for _ in range(80)]
    assert 0.25 < fit_sts([steps])[0] < 4


@pytest.mark.parametrize(
    ("requests", "num_positions", "message"),
    [
        pytest.param([], None, "no step has both drafts and confidences", id="nothing"),
        pytest.param([[step(2, 1)] * 50], None, "no confidence head", id="no-confidences"),
        pytest.param([[step(1, 1, confidence=(0.5,))] * 99], None, f"draft 1 was .* needs {MIN_LABELS}", id="all-kept"),
        pytest.param([[step(1, 0, confidence=(0.5,))] * 99], None, "0 accepted prefixes and 99", id="none-kept"),
        pytest.param(
            [coin_steps(np.random.default_rng(0), 200, 2)], 3, "draft 3 was verified in 0 steps", id="never-verified"
        ),
    ],
)
def test_too_little_to_fit_on_is_refused(requests, num_positions, message):
    with pytest.raises(ValueError, match=message):
        fit_sts(requests, num_positions)


def test_more_drafts_than_temperatures_are_refused():
    with pytest.raises(ValueError, match="a step has 2 drafts, and there are 1 temperatures"):
        scale_steps([[step(2, 1, confidence=(0.5, 0.5))]], (1.0,))
