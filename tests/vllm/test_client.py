"""vLLM as a backend of the evaluation: the same records as the library's own loop, and the same figures.

The engine's per-request metrics, its Prometheus counters and the library's records are three accounts of one run.
"""

import pytest
import torch
from test_requests import LONG
from transformers import LlamaForCausalLM

from dspark import HFTarget, SamplingParams, generate, load_drafter
from dspark.evals.acceptance import measure_acceptance
from dspark.vllm.client import generate_in_engine, make_generation, steps_from_counters

SPECULATIVE = {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def counters(llm):
    values = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics() if "spec_decode" in m.name}
    per_position = list(values["num_accepted_tokens_per_pos"].values)
    return [values[name].value for name in COUNTERS] + per_position


def test_records_are_the_librarys(engine, drafter, target):
    llm, model = engine(drafter(), speculative=SPECULATIVE), HFTarget(LlamaForCausalLM.from_pretrained(target).eval())
    params = [SamplingParams(temperature=0, max_new_tokens=30 + i) for i in range(len(LONG))]
    expected = generate(model, load_drafter(drafter(), target=model, dtype=torch.float32), LONG, params)
    before = counters(llm)
    served = generate_in_engine(llm, LONG, params)
    grown = [after - earlier for after, earlier in zip(counters(llm), before, strict=True)]

    for mine, library in zip(served, expected, strict=True):
        assert mine.token_ids == library.token_ids
        assert mine.finish_reason == library.finish_reason
        assert [step.position for step in mine.steps] == [step.position for step in library.steps]
        assert [step.num_committed for step in mine.steps] == [step.num_committed for step in library.steps]
        assert [step.num_accepted for step in mine.steps[:-1]] == [step.num_accepted for step in library.steps[:-1]]
    figures = measure_acceptance([g.steps for g in served]), measure_acceptance([g.steps for g in expected])
    assert figures[0].tokens_per_step == figures[1].tokens_per_step

    steps = [step for generation in served for step in generation.steps]
    accepted = [step.num_accepted for step in steps]
    assert grown == [
        len(steps),
        sum(step.num_offered for step in steps),
        sum(accepted),
        *(sum(count > i for count in accepted) for i in range(4)),
    ]
    # Our tokens per step from vLLM's counters alone: text without the first tokens, over steps.
    committed = sum(len(generation.token_ids) - 1 for generation in served)
    assert committed / grown[0] == pytest.approx(sum(step.num_committed for step in steps) / len(steps))


def test_sampled_tokens_per_step_agree(engine, drafter, target):
    """At temperature 1 the two loops draw other numbers: their means agree within five standard errors (false alarms
    below 1e-5)."""
    llm, model = engine(drafter(), speculative=SPECULATIVE), HFTarget(LlamaForCausalLM.from_pretrained(target).eval())
    prompts = [LONG[i % len(LONG)][:12] for i in range(120)]
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=32, ignore_eos=True) for i in range(len(prompts))]
    library = generate(model, load_drafter(drafter(), target=model, dtype=torch.float32), prompts, params)
    means = []
    for generations in (library, generate_in_engine(llm, prompts, params)):
        per_request = torch.tensor([sum(s.num_committed for s in g.steps) / len(g.steps) for g in generations])
        means.append((per_request.mean(), per_request.var() / len(prompts)))
    (first, first_variance), (second, second_variance) = means
    assert abs(first - second) < 5 * (first_variance + second_variance).sqrt()


@pytest.mark.parametrize(
    ("num_tokens", "steps", "committed", "positions"),
    [
        pytest.param(8, [(4, 2), (4, 3)], [3, 4], [10, 13], id="whole-steps"),
        pytest.param(6, [(4, 2), (4, 3)], [3, 2], [10, 13], id="last-step-cut"),
        pytest.param(6, [(4, 2)], [3, 1, 1], [10, 13, 14], id="plain-steps"),
        pytest.param(1, [(4, 0)], [], [], id="ended-by-prefill"),
        pytest.param(4, [], [1, 1, 1], [10, 11, 12], id="without-speculation"),
    ],
)
def test_make_generation(num_tokens, steps, committed, positions):
    generation = make_generation([0] * 10, list(range(num_tokens)), steps, "length")
    assert [step.num_committed for step in generation.steps] == committed
    assert [step.position for step in generation.steps] == positions
    assert [step.finish_reason for step in generation.steps[:-1]] == [None] * max(len(committed) - 1, 0)
    assert sum(committed) == num_tokens - 1


@pytest.mark.parametrize("reason", [None, "abort", "error"])
def test_an_unfinished_request_is_no_result(reason):
    with pytest.raises(ValueError, match="expected 'stop' or 'length'"):
        make_generation([0], [1], [], reason)


def test_steps_from_counters():
    """Accepted 0, 2, 4 and 4 drafts; what the text lacks was cut from the last step."""
    assert steps_from_counters(4, 16, [3, 3, 2, 2], 15) == [(4, 0), (4, 2), (4, 4), (4, 4)]
    steps = steps_from_counters(4, 16, [3, 3, 2, 2], 13)
    assert sorted(steps) == [(4, 0), (4, 2), (4, 4), (4, 4)]
    assert steps[-1][1] >= 2  # 14 tokens were verified and 12 kept, so the last step lost 2
    assert steps_from_counters(3, 10, [2, 1, 0, 0], 7) == [(2, 0), (4, 1), (4, 2)]
    assert steps_from_counters(0, 0, [], 5) == []
