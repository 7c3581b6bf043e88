"""Expected figures of draft quality against the law of generation, enumerated completely: no sampling, no false alarms.

All texts of a tiny target (4 tokens, at most 4 long) are scored as paths and weighed by their probability; the sums
must be those of every course that generation can take.
"""

import numpy as np
import pytest
from loop_enumeration import Enumeration
from pairs import drafter_config, tiny_drafter, tiny_target
from quality_cases import PROMPT, VOCAB, score_all_texts

from dspark.evals.quality_figures import loop_law, request_sums
from dspark.sampling import SamplingParams

K = 2

CASES = [
    pytest.param({}, {}, {}, id="plain"),
    pytest.param({}, {"temperature": 0.5}, {}, id="cold"),
    pytest.param({"confidence": "hidden"}, {"top_k": 2}, {}, id="top-k"),
    pytest.param({}, {"top_p": 0.7}, {"draft_truncation": True}, id="top-p"),
    pytest.param({}, {"temperature": 0.0}, {}, id="greedy"),
    pytest.param({}, {}, {"drafting": "greedy"}, id="greedy-drafts"),
    pytest.param({"markov_kind": "rnn", "anchor_first": False}, {}, {}, id="rnn-1pN"),
    pytest.param({"draft_vocab_size": 3}, {}, {}, id="reduced-vocabulary"),
    pytest.param({"draft_vocab_size": 3}, {}, {"drafting": "greedy"}, id="reduced-greedy-drafts"),
    pytest.param({"markov_kind": "none", "markov_rank": 0, "confidence": "none"}, {}, {}, id="no-heads"),
]


@pytest.fixture(scope="module", params=[None, 2], ids=["length", "stop"])
def target(request):
    """Texts end by length alone, or also by a stop token inside a block."""
    target = tiny_target(VOCAB, spread=0.7)
    target.model.generation_config.eos_token_id = request.param
    return target


@pytest.mark.parametrize(("changes", "sampling", "options"), CASES)
def test_expected_sums_are_those_of_the_enumerated_loop(target, tmp_path, changes, sampling, options):
    drafter = tiny_drafter(drafter_config(VOCAB, **changes), target)
    params = SamplingParams(max_new_tokens=4, **sampling)
    enumeration = Enumeration(target, drafter, PROMPT, params, K, options.get("drafting", "probabilistic"))
    expected = enumeration.sums()
    scores, weights = score_all_texts(target, drafter, enumeration, tmp_path, options)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    law = loop_law(scores, len(weights), K)
    sums = request_sums(scores, law, len(weights))
    assert weights @ sums.steps == pytest.approx(expected.steps, abs=1e-10)
    assert weights @ sums.committed == pytest.approx(expected.committed, abs=1e-10)
    for name in ("offered", "reached", "accepted"):
        np.testing.assert_allclose(weights @ getattr(sums, name), getattr(expected, name), atol=1e-10, err_msg=name)
    on_path = np.arange(K) < law.judged[:, None]
    overlap = law.visits[:, None] * law.survival[:, :-1] * np.where(on_path, scores.overlap, 0.0)
    np.testing.assert_allclose(weights[scores.request] @ overlap, expected.overlap, atol=1e-10)
    assert scores.num_rescored == 0
