"""What acceptance says and what it does not: reported faults of measuring, each on a pair whose answer is known."""

import pytest
import torch
from pairs import LAYERS, counting_pair, drafter_config, tiny_drafter, tiny_target

from dspark import SamplingParams, generate
from dspark.evals.acceptance import INCONCLUSIVE, measure_acceptance, tail_repeats
from dspark.target import HFTarget

GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


def test_a_drafter_out_of_positions_is_inconclusive_and_one_that_is_always_wrong_is_not():
    target, drafter = counting_pair(max_position_embeddings=4)
    results = generate(target, drafter, PROMPTS, GREEDY)
    assert measure_acceptance([result.steps for result in results]).label == INCONCLUSIVE
    target, drafter = counting_pair(wrong_after=range(32))
    results = generate(target, drafter, PROMPTS, GREEDY)
    figures = measure_acceptance([result.steps for result in results])
    assert figures.label != INCONCLUSIVE
    assert (figures.acceptance_rate.value, figures.tokens_per_step.value) == (0.0, 1.0)


def test_expected_acceptance_is_that_of_sampled_steps():
    """1 - TV of each judged position against whether its draft was kept, over real rounds.

    The differences are a martingale, so their sum has the variance sum of c (1 - c); 4.5 standard deviations have a
    false-alarm rate of 7e-6.
    """
    target = tiny_target(vocab_size=8, spread=0.5)
    drafter = tiny_drafter(drafter_config(8), target)
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=20) for seed in range(120)]
    chances, kept = [], []
    for result in generate(target, drafter, [[seed % 8, 3] for seed in range(120)], params, max_batch_size=120):
        for step in result.steps:
            reached = min(step.num_accepted + 1, step.num_offered)
            chances += step.accept_probs[:reached]
            kept += [i < step.num_accepted for i in range(reached)]
    chance = torch.tensor(chances, dtype=torch.float64)
    assert len(chance) > 1000
    assert 0.1 < chance.mean() < 0.9
    difference = torch.tensor(kept, dtype=torch.float64).sum() - chance.sum()
    assert abs(difference) < 4.5 * (chance * (1 - chance)).sum().sqrt()


def margins(target, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """By how much each emitted token misses the target's best logit, relative to the row's largest magnitude: one
    teacher-forced pass over the whole text, without any cache. [len(token_ids)], 0 where it is the argmax.
    """
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].double()
    chosen = logits.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
    return (logits.amax(-1) - chosen) / logits.abs().amax(-1)


@pytest.mark.parametrize(
    ("dtype", "margin"),
    [(torch.float64, 0.0), (torch.float32, 2**-18), (torch.bfloat16, 2**-5)],
    ids=["float64", "float32", "bfloat16"],
)
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
def test_every_token_of_a_drafted_greedy_text_is_the_targets_best_within_rounding(num_draft_tokens, dtype, margin):
    """One row and K + 1 rows round differently, so that near-ties may flip; anything more is a fault."""
    target = tiny_target(vocab_size=64, dtype=dtype)
    drafter = tiny_drafter(drafter_config(64, block_size=8), target, dtype=dtype)
    params = SamplingParams(temperature=0, max_new_tokens=60)
    results = generate(target, drafter, PROMPTS, params, num_draft_tokens=num_draft_tokens)
    assert sum(step.num_offered for result in results for step in result.steps) > 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        missed = margins(target, prompt, result.token_ids)
        assert missed.max() <= margin
        wrong = [*result.token_ids[:30], (result.token_ids[30] + 1) % 64, *result.token_ids[31:]]
        assert margins(target, prompt, wrong)[30] > margin


def test_a_damaged_cache_may_raise_acceptance_and_only_the_text_itself_shows_it(monkeypatch):
    """One committed element is overwritten after a rollback: the target says 8 for ever, and a drafter that repeats the
    last token is then always right.
    """
    target, drafter = counting_pair(block_size=8)
    drafter.markov_head.markov_w2.weight.copy_(20 * torch.eye(32))
    attention = target.layers[LAYERS - 1].self_attn
    with torch.no_grad():  # even weights over values that are 0: nothing is added until a value is damaged
        for weight in (attention.q_proj.weight, attention.v_proj.weight):
            weight.zero_()
        attention.o_proj.weight[7, 0] = 1
    healthy_commit = HFTarget.commit

    @torch.inference_mode()
    def damaging_commit(self, cache, num_rows):
        healthy_commit(self, cache, num_rows)
        cache.values[LAYERS - 1][0, 0, 0, 0] = 1e6 if cache.lengths[0] > 6 else 0

    params = SamplingParams(temperature=0, max_new_tokens=80)
    (healthy,) = generate(target, drafter, [PROMPTS[0]], params)
    monkeypatch.setattr(HFTarget, "commit", damaging_commit)
    (damaged,) = generate(target, drafter, [PROMPTS[0]], params)
    rates = [measure_acceptance([result.steps]).acceptance_rate.value for result in (healthy, damaged)]
    assert rates[0] == 0
    assert rates[1] > 0.5
    assert [tail_repeats(result.token_ids) for result in (healthy, damaged)] == [False, True]
    assert margins(target, PROMPTS[0], healthy.token_ids).max() == 0
    assert margins(target, PROMPTS[0], damaged.token_ids).max() > 0.5
