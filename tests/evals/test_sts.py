"""Sequential temperature scaling: a known scaling comes back, and events without a label do not move it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from runs import coin_run
from step_records import coin_steps, step

from dspark.confidence import Scaling
from dspark.evals.acceptance import measure_acceptance
from dspark.evals.sts import MIN_LABELS, TEMPERATURE_RANGE, fit_sts, scale_steps, scaling_effect, undo_scaling
from dspark.evals.sts_runs import measure_scaling

SCALING = Scaling((2.0, 0.6, 1.5), (0.4, -0.8, 0.3))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def temperatures_only(*temperatures):
    return Scaling(temperatures, (0.0,) * len(temperatures))


def assert_close(scaling, expected, tolerance):
    """log T and b of every position within the tolerance."""
    assert np.log(scaling.temperatures) == pytest.approx(np.log(expected.temperatures), abs=tolerance)
    assert scaling.offsets == pytest.approx(expected.offsets, abs=tolerance)


def distance(scaling, expected):
    """The largest difference in log T or b."""
    return max(
        *abs(np.log(scaling.temperatures) - np.log(expected.temperatures)),
        *abs(np.subtract(scaling.offsets, expected.offsets)),
    )


def steps_with(scaling, num_steps, seed, trim=None):
    """Steps of a head that `scaling` would set right: draft i is accepted with sigmoid(z_i / T_i + b_i).

    `trim(rng, chances)` gives how many drafts are verified, from the confidences alone, as a scheduler would.
    """
    rng = np.random.default_rng(seed)
    temperatures, offsets = np.array(scaling)
    steps = []
    for _ in range(num_steps):
        scaled = rng.normal(1.0, 1.5, len(temperatures))
        logits, chances = (scaled - offsets) * temperatures, sigmoid(scaled)
        kept = rng.random(len(temperatures)) < chances
        accepted = len(temperatures) if kept.all() else int(np.argmin(kept))
        offered = len(temperatures) if trim is None else trim(rng, chances)
        accepted = min(accepted, offered)
        steps.append(step(offered, accepted, confidence=sigmoid(logits[:offered]).tolist()))
    return steps


def test_a_known_scaling_is_recovered():
    """20000 steps, prefix survival about 0.7, 0.5 and 0.33.

    Over 16 seeds the standard deviations of log T are 0.011, 0.020 and 0.031, those of b 0.017, 0.022 and 0.036; they
    grow with depth because fewer prefixes are left and the labels carry the luck of the prefix. 0.16 is over four of
    the largest: a false alarm for under 1 of 3000 fresh seeds; the seed is fixed.
    """
    assert_close(fit_sts([steps_with(SCALING, 20000, seed=1)]), SCALING, 0.16)


def test_a_calibrated_head_keeps_its_confidences():
    """Chances reported as they are: T = 1 and b = 0, within four standard deviations (0.05 at position 4)."""
    identity = temperatures_only(*(1.0,) * 4)
    assert_close(fit_sts([steps_with(identity, 20000, seed=2)]), identity, 0.2)


def test_a_scaling_that_was_applied_is_taken_for_none():
    """Fitting what a fit has scaled gives T = 1 and b = 0 at every position, up to the prior."""
    requests = [steps_with(SCALING, 4000, seed=3)]
    again = fit_sts(scale_steps(requests, fit_sts(requests)))
    assert_close(again, temperatures_only(1.0, 1.0, 1.0), 0.01)


def test_requests_and_their_order_do_not_matter():
    steps = steps_with(SCALING, 3000, seed=4)
    assert_close(fit_sts([steps[2000:], [], steps[:2000]]), fit_sts([steps]), 1e-6)


def test_the_fit_is_the_maximum_of_the_likelihood():
    """No step in log T or b from what is found, at any position, makes the events likelier."""
    steps = steps_with(SCALING, 500, seed=12)
    fitted = fit_sts([steps])

    def penalised(scaling):
        """log likelihood of the first position's labels, with the priors."""
        kept = np.array([record.num_accepted > 0 for record in steps])
        chance = np.array([record.confidence[0] for record in scale_steps([steps], scaling)[0]])
        prior = (np.log(scaling.temperatures[0]) / np.log(2)) ** 2 / 2 + scaling.offsets[0] ** 2 / 2
        return np.log(np.where(kept, chance, 1 - chance)).sum() - prior

    best = penalised(fitted)
    for factor, shift in itertools.product((0.97, 1.0, 1.03), (-0.03, 0.0, 0.03)):
        temperatures, offsets = (list(values) for values in fitted)
        temperatures[0], offsets[0] = temperatures[0] * factor, offsets[0] + shift
        assert penalised(Scaling(tuple(temperatures), tuple(offsets))) <= best


def by_confidence(rng, chances):
    """Verify while the survival is above a threshold; what lies behind is trimmed."""
    return int((np.cumprod(chances) > 0.3).sum())


class TestCensoring:
    """A label exists only where a draft was verified, and it is that of the prefix."""

    def test_trimming_by_confidence_leaves_the_fit_unbiased(self):
        """Drafts behind a survival of 0.3 are not verified; the deviations are 0.06 at most, the tolerance four."""
        assert_close(fit_sts([steps_with(SCALING, 20000, seed=5, trim=by_confidence)]), SCALING, 0.25)

    def test_trimmed_drafts_taken_for_rejected_ones_are_another_fit(self):
        """The naive reading: a draft that was not accepted was rejected. Its scaling is wrong by far.

        Lengths are drawn at random here; the deviations of the right fit are 0.05 at most, the tolerance over four.
        """
        whole = steps_with(SCALING, 20000, seed=5)
        trimmed = steps_with(SCALING, 20000, seed=5, trim=lambda rng, chances: int(rng.integers(0, 4)))
        naive = [
            replace(long, num_offered=3, num_accepted=short.num_accepted, num_committed=short.num_accepted + 1)
            for long, short in zip(whole, steps_like(whole, trimmed), strict=True)
        ]
        assert_close(fit_sts([steps_like(whole, trimmed)]), SCALING, 0.28)
        assert distance(fit_sts([naive]), SCALING) > 0.6

    def test_known_failures_of_trimmed_drafts_are_left_out(self):
        """Where an earlier draft was rejected the trimmed prefix has failed for sure; using just those is biased."""
        whole = steps_with(SCALING, 20000, seed=6)
        rng = np.random.default_rng(0)
        lengths = rng.integers(0, 4, len(whole))
        trimmed = [cut(s, int(n)) for s, n in zip(whole, lengths, strict=True)]
        failures_kept = [s if s.num_accepted < n else cut(s, int(n)) for s, n in zip(whole, lengths, strict=True)]
        assert_close(fit_sts([trimmed]), SCALING, 0.28)
        assert distance(fit_sts([failures_kept]), SCALING) > 0.6

    def test_drafts_behind_a_stop_do_not_count(self):
        """A step that ends the request after its first token says nothing of later drafts, whatever it holds."""
        steps = steps_with(temperatures_only(1.5, 1.5), 4000, seed=7)
        ends = [step(2, 2, committed=1, finish="stop", confidence=(0.9, 0.01)) for _ in range(500)]
        cut_short = [step(1, 1, committed=1, finish="stop", confidence=(0.9,)) for _ in range(500)]
        assert fit_sts([steps, ends]) == fit_sts([steps, cut_short])

    def test_the_label_is_that_of_the_prefix_and_not_of_the_slot(self):
        """Comparing position 3 alone with the label of its prefix finds another scaling."""
        whole = steps_with(SCALING, 20000, seed=8)
        slots = [step(1, int(s.num_accepted > 2), confidence=s.confidence[2:]) for s in whole]
        assert distance(fit_sts([slots]), Scaling(SCALING.temperatures[2:], SCALING.offsets[2:])) > 0.6


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
    requests = [steps_with(SCALING, 50, seed=9), []]
    scaled = scale_steps(requests, SCALING)
    back = undo_scaling(scaled, SCALING)
    for before, after, record in zip(requests[0], back[0], scaled[0], strict=True):
        assert after.confidence == pytest.approx(before.confidence, abs=1e-12)
        logit = np.log(before.confidence) - np.log1p(-np.array(before.confidence))
        assert record.confidence == pytest.approx(sigmoid(logit / SCALING.temperatures + SCALING.offsets))
        assert replace(record, confidence=()) == replace(before, confidence=())
    certain = [[step(2, 2, confidence=(1.0, 0.0))]]
    assert scale_steps(certain, Scaling((3.0, 0.5), (1.0, -2.0))) == certain


def test_the_effect_is_measured_as_reports_measure_it():
    """ECE and Brier before and after are those of the calibration figures, and the change is their difference."""
    scaling = Scaling((2.5, 2.5), (0.3, -0.4))
    requests = [steps_with(scaling, 100, seed=seed) for seed in range(20)]
    effect = scaling_effect(requests, scaling)
    for figures, name in (
        (measure_acceptance(requests).calibration, "before"),
        (measure_acceptance(scale_steps(requests, scaling)).calibration, "after"),
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
    scaling = temperatures_only(*(2.0,) * 4)
    halves = [[steps_with(scaling, 100, seed=100 * half + i) for i in range(40)] for half in (0, 1)]
    fitted = fit_sts(halves[0])
    assert_close(fitted, scaling, 0.4)
    effect = scaling_effect(halves[1], fitted)
    assert effect.ece.before.value > 0.05
    assert effect.ece.after.value < 0.02


def test_a_head_without_information_becomes_the_rate():
    """Logits that say nothing, and are wrong on average: flattened, and set to what is accepted.

    The share's deviation is 0.0065; 0.03 is over four of it.
    """
    rng = np.random.default_rng(10)
    steps = [step(1, int(rng.random() < 0.3), confidence=(float(sigmoid(rng.normal(2, 1))),)) for _ in range(5000)]
    (temperature,), (offset,) = fitted = fit_sts([steps])
    assert 4 < temperature <= TEMPERATURE_RANGE[1]
    assert sigmoid(2 / temperature + offset) == pytest.approx(0.3, abs=0.03)
    assert scaling_effect([steps], fitted).ece.after.value < 0.03


def test_few_events_stay_near_the_heads_own():
    """Logits near 0 and few events say little; the priors hold the fit where the likelihood alone would run away."""
    rng = np.random.default_rng(11)
    steps = [step(1, int(rng.random() < 0.5), confidence=(float(sigmoid(rng.normal(0, 0.2))),)) for _ in range(80)]
    (temperature,), (offset,) = fit_sts([steps])
    assert 0.25 < temperature < 4
    assert abs(offset) < 1


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
        pytest.param(
            [coin_steps(np.random.default_rng(0), 60, 4)],
            None,
            r"draft 4 was .* with 8 accepted .*the scarcest of 2 drafts.* some 2\.5 times as many",
            id="the-scarcest",
        ),
    ],
)
def test_too_little_to_fit_on_is_refused(requests, num_positions, message):
    with pytest.raises(ValueError, match=message):
        fit_sts(requests, num_positions)


def test_more_drafts_than_temperatures_are_refused():
    with pytest.raises(ValueError, match="a step has 2 drafts, and there are 1 temperatures"):
        scale_steps([[step(2, 1, confidence=(0.5, 0.5))]], Scaling((1.0,), (0.0,)))


def test_the_interval_of_a_small_ece_holds_it():
    """A calibrated head on few requests, where resampled ECE lies above that of the data for most seeds."""
    for seed in range(8):
        requests = [steps_with(temperatures_only(1.0), 60, seed=100 * seed + i) for i in range(12)]
        effect = scaling_effect(requests, temperatures_only(1.0))
        for estimate in (effect.ece.before, effect.ece.change, measure_acceptance(requests).calibration.ece):
            assert estimate.low <= estimate.value <= estimate.high


def test_checks_of_several_runs_name_theirs():
    runs = [coin_run(name, coins=i, temperatures=(1.0,)) for i, name in enumerate(("warm", "long"))]
    scaling = temperatures_only(1.0, 1.0, 1.0)
    assert [check.name for check in measure_scaling(runs, scaling, half=1)] == [
        "warm: math, other half",
        "long: math, other half",
    ]
    assert [check.name for check in measure_scaling(runs[:1], scaling)] == ["math"]
