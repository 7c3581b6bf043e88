"""Requirements: what is read, what is refused, and when a row meets one."""

from dataclasses import replace

import pytest
from pairs import counting_pair
from quality_cases import paths_of, score

from dspark.evals.block_scores import ScoringRule
from dspark.evals.quality import QualityRow
from dspark.evals.quality_figures import measure_quality
from dspark.evals.requirements import check_positions, check_requirements, parse_requirement
from dspark.evals.stats import Bootstrap
from dspark.loop import generate
from dspark.sampling import SamplingParams


@pytest.fixture(scope="module")
def row(tmp_path_factory) -> QualityRow:
    """Four tokens a step, from two equal requests."""
    target, drafter = counting_pair(wrong_after=(7, 15, 23, 31), confidence="none")
    params = SamplingParams(temperature=0.0, max_new_tokens=25)
    paths = paths_of(generate(target, None, [[31], [31]], params), 25)
    scores = score(target, drafter, paths, tmp_path_factory.mktemp("states"), ScoringRule(params, 4))
    return QualityRow("tiny", "", "set", 0.0, 4, {}, measure_quality(scores, 2, 4, Bootstrap(2)), 0.0)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("tokens_per_step>=4", True),
        ("tokens_per_step > 4", False),
        ("tokens_per_step<=4", True),
        ("tokens_per_step<4", False),
        ("tokens_per_step.low>=4", True),
        ("unconditional[1]>=1", True),
        ("conditional[3]>=0.61", False),  # the last block offers two drafts
        ("conditional[3].high<=6.1e-1", True),
        ("teacher_forced_tokens_per_step<5", True),
        ("cross_entropy[2]<0.01", True),
    ],
)
def test_a_row_meets_what_it_should(row, text, met):
    (outcome,) = check_requirements([parse_requirement(text)], [row])
    assert outcome.met is met
    assert outcome.line.startswith(f"{'ok' if met else 'FAILED'} {text}: ")
    assert "tiny, set T=0 K=4" in outcome.line


def test_the_worst_row_decides_and_ablations_do_not_count(row):
    worse = replace(row, dataset="other", quality=replace(row.quality, tokens_per_step=row.quality.positions[2].top1))
    requirement = parse_requirement("tokens_per_step>=2")
    (outcome,) = check_requirements([requirement], [row, worse])
    assert (outcome.met, outcome.worst) == (False, worse.quality.tokens_per_step.value)
    assert outcome.line.endswith("tiny, other T=0 K=4 (1 of 2 rows fail)")
    (outcome,) = check_requirements([requirement], [row, replace(worse, variant="without Markov head")])
    assert outcome.met


def test_what_is_not_defined_is_not_met(row):
    (outcome,) = check_requirements([parse_requirement("ece<=0.05")], [row])
    assert outcome.line == (
        "FAILED ece<=0.05: not defined for tiny, set T=0 K=4 (no confidence head, or too few requests)"
    )
    assert not outcome.met


def test_rows_without_the_position_are_passed_over(row):
    short = replace(row, num_draft_tokens=2, quality=replace(row.quality, positions=row.quality.positions[:2]))
    (outcome,) = check_requirements([parse_requirement("one_minus_tv[3]>=0")], [short, row])
    assert outcome.met
    assert "(of 1 rows)" in outcome.line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens_per_stp>=2", "there is no figure 'tokens_per_stp'; there are tokens_per_step, .*one_minus_tv"),
        ("tokens_per_step", "is no requirement; expected NAME>=NUMBER"),
        ("tokens_per_step=2", "is no requirement"),
        ("tokens_per_step>=two", "'two' is no number"),
        ("tokens_per_step>=nan", "'nan' is no number"),
        ("tokens_per_step[1]>=2", r"is a figure of all drafts; leave \[1\] out"),
        ("one_minus_tv>=0.5", r"needs a draft position, counted from 1, such as one_minus_tv\[1\]"),
        ("one_minus_tv[0]>=0.5", "needs a draft position"),
        ("tokens_per_step.mean>=2", "'mean' is no end of an interval"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_requirement(text)


def test_positions_beyond_the_drafts_are_refused():
    requirements = [parse_requirement("one_minus_tv[5]>=0.5")]
    check_positions(requirements, 5)
    with pytest.raises(ValueError, match=r"there is no draft 5; positions are 1\.\.4"):
        check_positions(requirements, 4)
