"""Acceptance figures against cases counted by hand."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from step_records import coin_steps, step

from dspark.evals.acceptance import INCONCLUSIVE, judged_counts, measure_acceptance, tail_repeats


def values(estimates):
    return [estimate.value for estimate in estimates]


def test_pooled_and_macro_tokens_per_step():
    """A: 2 steps of 8 tokens, B: 20 steps of 2. Pooled (16 + 40) / 22, macro (8 + 2) / 2."""
    figures = measure_acceptance([[step(7, 7)] * 2, [step(7, 1)] * 20])
    assert figures.tokens_per_step.value == pytest.approx(2.545, abs=5e-4)
    assert figures.tokens_per_step_macro.value == 5.0
    assert (figures.num_requests, figures.num_steps, figures.num_committed) == (2, 22, 56)
    assert figures.acceptance_rate.value == pytest.approx((14 + 20) / (22 * 7))
    assert figures.accepted_histogram == (0, 20, 0, 0, 0, 0, 0, 2)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(step(5, 5, committed=3, finish="stop"), (3, 3), id="stop-among-accepted-drafts"),
        pytest.param(step(3, 3, committed=3, finish="stop"), (3, 3), id="the-same-step-recorded-without-its-tail"),
        pytest.param(step(5, 2, committed=2, finish="stop"), (2, 2), id="stop-is-the-last-accepted-draft"),
        pytest.param(step(5, 2, committed=3, finish="stop"), (3, 2), id="stop-is-the-recovered-token"),
        pytest.param(step(5, 5, committed=6, finish="stop"), (5, 5), id="stop-is-the-bonus-token"),
        pytest.param(step(5, 4, committed=1, finish="length"), (1, 1), id="length-limit-after-one-token"),
        pytest.param(step(5, 2), (5, 2), id="not-the-end"),
        pytest.param(step(0, 0), (0, 0), id="plain-step"),
    ],
)
def test_drafts_behind_the_end_of_a_request_do_not_count(record, expected):
    assert judged_counts(record) == expected


def test_a_stop_inside_a_block_commits_what_the_request_got():
    """Accepted run a, b, EOS, d, e and a bonus: 3 tokens reach the request, not 6."""
    figures = measure_acceptance([[step(5, 5, committed=3, finish="stop")]])
    assert figures.tokens_per_step.value == 3.0
    assert (figures.num_offered, figures.num_accepted) == (3, 3)
    assert [rates.num_offered for rates in figures.positions] == [1, 1, 1]


def test_per_position_denominators_under_trimming():
    """Steps offer 3, 3, 1 and 0 drafts and accept 3, 1, 1 and 0 of them."""
    figures = measure_acceptance([[step(3, 3), step(3, 1)], [step(1, 1), step(0, 0)]])
    assert [r.num_offered for r in figures.positions] == [3, 2, 2]
    assert [r.num_reached for r in figures.positions] == [3, 2, 1]
    assert [r.num_accepted for r in figures.positions] == [3, 1, 1]
    assert values(r.unconditional for r in figures.positions) == [1.0, 0.5, 0.5]
    assert values(r.conditional for r in figures.positions) == [1.0, 0.5, 1.0]
    assert figures.acceptance_rate.value == 5 / 7  # not 5 / (4 steps * 3)
    assert figures.tokens_per_step.value == 9 / 4
    assert figures.accepted_histogram == (0, 2, 0, 1)  # the plain step drafted nothing


def test_expected_acceptance_is_averaged_where_the_position_was_reached():
    """The second position is reached by the first step only, so the other step's 0.1 is not in its mean."""
    steps = [step(2, 1, accept_probs=(0.9, 0.5)), step(2, 0, accept_probs=(0.7, 0.1))]
    first, second = measure_acceptance([steps]).positions
    assert first.expected.value == pytest.approx(0.8)
    assert second.expected.value == pytest.approx(0.5)


def test_expected_acceptance_matches_the_realised_rate():
    """Coin flips with known chances.

    Position 3 is reached by at least 2500 of 8000 steps; the difference has a standard deviation below 0.5 /
    sqrt(2500) = 0.01, so 0.04 is four of them: a false alarm in under 1 of 4000 seeds over the four positions. The
    seed is fixed.
    """
    rng = np.random.default_rng(11)
    figures = measure_acceptance([coin_steps(rng, 400, 4) for _ in range(20)])
    for rates in figures.positions:
        assert rates.num_reached > 2000
        assert rates.expected.value == pytest.approx(rates.conditional.value, abs=0.04)
        assert rates.confidence.value == pytest.approx(rates.expected.value)


def test_survival_is_the_running_product_of_confidences():
    steps = [step(5, 5, confidence=(0.9, 0.8, 0.5, 0.9, 0.7))]
    from dspark.evals.acceptance import judged_positions

    assert judged_positions([steps]).survival == pytest.approx([0.9, 0.72, 0.36, 0.324, 0.2268])


def test_nothing_drafted_is_inconclusive():
    figures = measure_acceptance([[step(0, 0)] * 3, [step(0, 0)]])
    assert figures.label == INCONCLUSIVE
    assert figures.tokens_per_step.value == 1.0
    assert figures.acceptance_rate.value is None
    assert figures.positions == ()
    assert figures.calibration is None


def test_a_drafter_that_is_always_wrong_is_measured_and_not_inconclusive():
    figures = measure_acceptance([[step(7, 0)] * 4])
    assert figures.label != INCONCLUSIVE
    assert figures.acceptance_rate.value == 0.0
    assert figures.tokens_per_step.value == 1.0


def test_requests_that_end_with_prefill_have_no_part_in_the_ratios():
    figures = measure_acceptance([[], [step(2, 2)], []])
    assert figures.num_requests == 3
    assert figures.tokens_per_step.value == figures.tokens_per_step_macro.value == 3.0


def test_no_requests_at_all():
    figures = measure_acceptance([])
    assert figures.label == INCONCLUSIVE
    assert figures.tokens_per_step.value is None


def test_figures_are_plain_json():
    figures = measure_acceptance([[step(2, 1, accept_probs=(0.5, 0.5), confidence=(0.5, 0.5))], []])
    assert json.loads(json.dumps(asdict(figures), allow_nan=False))["num_steps"] == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        pytest.param(step(2, 3), "num_accepted <= num_offered", id="accepted-more-than-offered"),
        pytest.param(step(2, 1, committed=1), "less only where the request finishes", id="cut-without-an-end"),
        pytest.param(step(2, 1, committed=3, finish="stop"), r"num_committed 3", id="committed-too-many"),
        pytest.param(step(2, 1, committed=0, finish="stop"), "num_committed 0", id="committed-nothing"),
        pytest.param(step(2, 1, accept_probs=(0.5,)), "2 drafts offered, but 1 accept_probs", id="accept-probs"),
        pytest.param(step(2, 1, confidence=(0.5,) * 3), "3 confidences", id="confidence"),
    ],
)
def test_records_that_contradict_themselves_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        measure_acceptance([[record]])


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        pytest.param(list(range(100)), False, id="no-repetition"),
        pytest.param([*range(50), *[7] * 48], True, id="one-token-over-and-over"),
        pytest.param([*range(50), *[7] * 47], False, id="one-token-but-briefly"),
        pytest.param([*range(50), *[1, 2, 3] * 16], True, id="short-span"),
        pytest.param([*range(30), *list(range(20)) * 4], True, id="a-paragraph-four-times"),
        pytest.param([*range(30, 60), *list(range(20)) * 3], False, id="a-paragraph-three-times"),
        pytest.param([*[7] * 60, *range(100, 130)], False, id="a-loop-that-ended"),
        pytest.param([], False, id="empty"),
        pytest.param([5] * 12, False, id="short-answer"),
    ],
)
def test_loops_at_the_end_of_an_output(token_ids, expected):
    assert tail_repeats(token_ids) is expected
