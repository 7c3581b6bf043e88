"""The check of the sampling graph: what it asks for, and what it calls a success."""

import copy
import itertools

import pytest
from check_sampling_graph import LAUNCHED, PARAMS, ROUNDED_APART, differences, is_cut, is_greedy, judge, rounds

TEXTS = [[[1, 2, 3] for _ in batch] for batch in rounds()]
AGAIN = [[[1, 2, 3] if is_greedy(each) else None for each in batch] for batch in rounds()]
GRAPH = {
    "texts": TEXTS, "alone": TEXTS, "again": AGAIN,
    "covered": 90, "left": 4, "recorded": 30, "with_tail": 30, "gave_up": False,
}  # fmt: skip
WITHOUT = {"texts": TEXTS, "alone": TEXTS, "again": AGAIN, "covered": 0, "recorded": 0}


def other_texts(chosen, most=1000):
    """Texts of which those of the first so many chosen requests are others."""
    left = itertools.count(most, -1)
    return [[[1, 2, 4] if chosen(each) and next(left) > 0 else [1, 2, 3] for each in batch] for batch in rounds()]


def test_every_kind_of_parameters_runs_alone_and_mixed():
    batches = rounds()
    for params in PARAMS:
        assert {len(batch) for batch in batches if all(each["params"] == params for each in batch)} >= {1, 4}
        assert any(
            params in [each["params"] for each in batch] and any(each["params"] != params for each in batch)
            for batch in batches
        )
    assert any(LAUNCHED in [each["params"] for each in batch] and len(batch) > 1 for batch in batches)
    lengths = [len(batch[0]["prompt"]) for batch in batches]
    assert all(abs(a - b) > 50 for a, b in itertools.pairwise(lengths)), "slots get shorter prompts"
    assert all(0 <= token < 511 for batch in batches for each in batch for token in each["prompt"])


def test_the_place_of_a_difference():
    other = copy.deepcopy(TEXTS)
    other[3][1] = [1, 2, 9]
    other[5][0] = [1, 2]
    found = differences(other, TEXTS)
    assert len(found) == 2
    assert found[0][0] == rounds()[3][1]
    assert found[0][1].startswith("round 3, request 2 of 4")
    assert found[0][1].endswith("from token 2 on")
    assert found[1][1].endswith("from token 2 on")
    assert not differences(TEXTS, AGAIN), "those without a text are left out"


@pytest.mark.parametrize(
    ("graph", "without", "holds"),
    [
        ({}, {}, True),
        ({"texts": other_texts(lambda each: True)}, {}, False),
        ({"alone": other_texts(is_cut, 1)}, {}, False),
        ({"again": other_texts(is_greedy, 1)}, {}, False),
        ({"with_tail": 29}, {}, False),
        ({"gave_up": True}, {}, False),
        ({"covered": 30}, {}, False),
        ({}, {"covered": 1}, False),
        ({"error": "ended with status 1"}, {}, False),
        ({}, {"error": "ended with status 1"}, False),
    ],
)
def test_success(graph, without, holds):
    assert judge(GRAPH | graph, WITHOUT | without) is holds


@pytest.mark.parametrize(
    ("chosen", "most", "holds"),
    [
        (lambda each: not is_cut(each) and not is_greedy(each), ROUNDED_APART, True),
        (lambda each: not is_cut(each) and not is_greedy(each), ROUNDED_APART + 1, False),
        (lambda each: is_cut(each) and not is_greedy(each), 1000, True),
    ],
)
def test_alone_and_in_batches(chosen, most, holds):
    """Both engines agree, and give other texts alone than in batches."""
    both = {"alone": other_texts(chosen, most)}
    assert judge(GRAPH | both, WITHOUT | both) is holds
