"""The whole loop draws from the target's distribution: joint law of the first four tokens, against exact enumeration.

Each case generates 3,000 seeded requests in batches of 750, half of them for each of two prompts of different length,
and compares the counts of all four-token continuations with the target's own probabilities by a chi-square test.
False-alarm rate: 1e-4 a test at most, fixed by the seeds; the smallest bias that 1,500 samples show is a total
variation near 0.05, which every wrong rule in `test_the_test_sees_a_biased_loop` exceeds.
"""

import itertools

import numpy as np
import pytest
import torch
from pairs import drafter_config, tiny_drafter, tiny_target
from scipy import stats

import dspark.loop
import dspark.sampling
from dspark import SamplingParams, generate
from dspark.sampling import SamplingTensors, to_distribution

VOCAB = 4
PROMPTS = [[1, 2], [3, 0, 2, 1, 1]]
LENGTH = 4
REQUESTS = 3000
FALSE_ALARM_RATE = 1e-4


def exact_law(target, prompt, params) -> np.ndarray:
    """[VOCAB ** LENGTH] probabilities of all continuations, by teacher forcing in float64."""
    continuations = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    tokens = torch.cat([torch.tensor(prompt).expand(len(continuations), -1), continuations], dim=1)
    with torch.inference_mode():
        logits = target.model(tokens).logits[:, len(prompt) - 1 : -1]
        probs = to_distribution(logits, SamplingTensors.stack([params] * len(tokens), "cpu"))
    return probs.gather(-1, continuations[..., None])[..., 0].prod(-1).numpy()


def counted(target, drafter, params, **options) -> list[np.ndarray]:
    """Counts [VOCAB ** LENGTH] per prompt."""
    prompts = [PROMPTS[i % 2] for i in range(REQUESTS)]
    fields = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    seeded = [SamplingParams(**fields, seed=i, max_new_tokens=params.max_new_tokens) for i in range(REQUESTS)]
    result = generate(target, drafter, prompts, seeded, max_batch_size=750, **options)
    counts = [np.zeros(VOCAB**LENGTH), np.zeros(VOCAB**LENGTH)]
    for i, generation in enumerate(result):
        index = 0
        for token in generation.token_ids[:LENGTH]:
            index = index * VOCAB + token
        counts[i % 2][index] += 1
    if drafter is not None:
        accepted = [step.num_accepted for g in result for step in g.steps if step.num_offered]
        assert np.mean(accepted) > 0, "nothing was accepted: the test would only see recovered tokens"
    return counts


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square p-value, cells expecting fewer than 5 pooled; an impossible continuation makes it 0."""
    if counts[law == 0].sum():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    used = expected > 0
    return stats.chisquare(observed[used], expected[used]).pvalue


def check(drafter_changes, params, **options):
    target = tiny_target(VOCAB, spread=0.7)
    drafter = tiny_drafter(drafter_config(VOCAB, **drafter_changes), target)
    for prompt, counts in zip(PROMPTS, counted(target, drafter, params, **options), strict=True):
        assert p_value(counts, exact_law(target, prompt, params)) > FALSE_ALARM_RATE / 2


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_sampled_tokens_follow_the_target_for_every_k(num_draft_tokens):
    check(
        {"block_size": 8},
        SamplingParams(temperature=1.0, max_new_tokens=max(LENGTH, num_draft_tokens + 2)),
        num_draft_tokens=num_draft_tokens,
    )


VARIANTS = [
    pytest.param({"markov_kind": "gated"}, {}, {}, id="gated"),
    pytest.param({"markov_kind": "rnn", "block_size": 5, "anchor_first": False}, {}, {}, id="rnn-1pN"),
    pytest.param({"markov_rank": 0, "markov_kind": "none", "confidence": "none"}, {}, {}, id="rank-0"),
    pytest.param({"draft_vocab_size": 3}, {}, {}, id="reduced-vocabulary"),
    pytest.param({}, {"temperature": 0.6}, {"drafting": "greedy"}, id="greedy-drafting"),
    pytest.param({}, {"temperature": 1.7, "top_k": 3}, {}, id="top-k"),
    pytest.param({}, {"top_p": 0.8}, {"draft_truncation": False}, id="top-p-draft-uncut"),
    pytest.param({}, {"min_p": 0.2}, {}, id="min-p"),
    pytest.param({"draft_vocab_size": 3}, {"top_k": 2}, {"drafting": "greedy"}, id="reduced-greedy-top-k"),
]


@pytest.mark.parametrize(("drafter_changes", "sampling", "options"), VARIANTS)
def test_sampled_tokens_follow_the_target_for_every_proposal(drafter_changes, sampling, options):
    check(drafter_changes, SamplingParams(**sampling, max_new_tokens=6), **options)


def test_plain_decoding_follows_the_target():
    target = tiny_target(VOCAB, spread=0.7)
    params = SamplingParams(temperature=1.0, max_new_tokens=LENGTH)
    for prompt, counts in zip(PROMPTS, counted(target, None, params), strict=True):
        assert p_value(counts, exact_law(target, prompt, params)) > FALSE_ALARM_RATE / 2


def soft_q_for_an_argmax_draw(proposal, logits, params, *rest):
    """A wrong verifier: treats every draft as if it had been drawn from the target, so it accepts all of them."""
    target_probs = dspark.sampling.to_distribution(logits, params)
    return dspark.sampling.rejection_sample(type(proposal)(proposal.tokens, target_probs[:, :-1]), target_probs, *rest)


def shifted_target(proposal, logits, *rest):
    """A wrong verifier: judges each draft by the row of the position before."""
    return dspark.sampling.verify_logits(proposal, logits.roll(1, dims=1), *rest)


@pytest.mark.parametrize("wrong", [soft_q_for_an_argmax_draw, shifted_target])
def test_the_test_sees_a_biased_loop(wrong, monkeypatch):
    target = tiny_target(VOCAB, spread=0.7)
    drafter = tiny_drafter(drafter_config(VOCAB), target)
    params = SamplingParams(temperature=1.0, max_new_tokens=6)
    monkeypatch.setattr(dspark.loop, "verify_logits", wrong)
    counts = counted(target, drafter, params)
    assert max(p_value(c, exact_law(target, p, params)) for c, p in zip(counts, PROMPTS, strict=True)) < 1e-9
