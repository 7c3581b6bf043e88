"""One drafted step followed by the target, by complete enumeration: no sampling, so no false alarms.

With 4 tokens and K = 2 there are 16 drafts. For each one the real drafter gives q along its chain, the real target
gives p along it, and the proposal's own `prob` and `residual` say what is emitted with which probability. Whatever the
step emits (1 to 3 tokens) is continued by the target's law; summed over all drafts and outcomes, the law of the next
three tokens must be the target's, to rounding.
"""

import itertools

import pytest
import torch
from pairs import drafter_config, tiny_drafter, tiny_target

from dspark import SamplingParams
from dspark.sampling import OneHotProposal, SamplingTensors, make_proposal, to_distribution

VOCAB, K = 4, 2
PROMPT, ANCHOR = [1, 3, 0, 2, 2], 1

HEADS = [
    pytest.param({"markov_kind": "vanilla"}, id="vanilla"),
    pytest.param({"markov_kind": "gated"}, id="gated"),
    pytest.param({"markov_kind": "rnn"}, id="rnn"),
    pytest.param({"markov_kind": "rnn", "anchor_first": False}, id="rnn-1pN"),
    pytest.param({"markov_rank": 0, "markov_kind": "none", "confidence": "none"}, id="rank-0"),
    pytest.param({"draft_vocab_size": 3}, id="reduced-vocabulary"),
]
SAMPLING = [
    pytest.param({"temperature": 1.0}, id="plain"),
    pytest.param({"temperature": 0.5}, id="cold"),
    pytest.param({"temperature": 1.5, "top_k": 2}, id="top-k"),
    pytest.param({"top_p": 0.7}, id="top-p"),
    pytest.param({"min_p": 0.3}, id="min-p"),
    pytest.param({"temperature": 0.0}, id="greedy"),
]


def target_laws(target, sampling: SamplingParams) -> torch.Tensor:
    """[VOCAB ** 2, 3, VOCAB] float64: p after the anchor and after each one and two tokens that may follow it."""
    paths = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    cache = target.new_cache(len(paths))
    target.prefill(cache, [PROMPT] * len(paths))
    anchors = torch.full((len(paths), 1), ANCHOR)
    logits = target.verify(cache, torch.cat([anchors, paths], dim=1)).logits
    return to_distribution(logits, SamplingTensors.stack([sampling] * len(paths)))


def draft_laws(target, drafter, sampling: SamplingParams, ids: torch.Tensor) -> list[torch.Tensor]:
    """K times [paths, draft vocabulary]: q of each position along every draft path; `ids` [paths, K] are its target
    ids."""
    target.tap(drafter.config.tap_ids)
    cache, context = target.new_cache(1), drafter.new_cache(1)
    taps = target.prefill(cache, [PROMPT]).taps
    drafter.extend(context, taps, [len(PROMPT)])
    context.keep([0] * len(ids))
    anchors, rows = torch.full((len(ids),), ANCHOR), []

    def pick(i: int, logits: torch.Tensor) -> torch.Tensor:
        rows.append(to_distribution(logits, SamplingTensors.stack([sampling] * len(ids))))
        return ids[:, i]

    with torch.inference_mode():
        drafter.chain(drafter.block_hidden(context, anchors), anchors, K, pick)
    return rows


def law_of_three_tokens(laws: torch.Tensor) -> torch.Tensor:
    """[VOCAB] * 3: the target alone."""
    p = laws.view(VOCAB, VOCAB, 3, VOCAB)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def emitted_law(laws: torch.Tensor, proposal, path_probs: torch.Tensor) -> torch.Tensor:
    """[VOCAB] * 3: one step over all draft paths, continued by the target."""
    p = laws.view(VOCAB, VOCAB, 3, VOCAB)
    after_one, after_two = p[:, 0, 1], p[:, :, 2]  # [x0, x1] and [x0, x1, x2]
    tokens = proposal.tokens
    along = laws[tokens[:, 0] * VOCAB + tokens[:, 1]]  # [paths, 3, VOCAB]
    accept = (along[:, :K].gather(-1, tokens[..., None])[..., 0] / proposal.prob()).clamp_max(1.0)
    residual = proposal.residual(along[:, :K])
    law = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for path, (first, second) in enumerate(tokens.tolist()):
        a, b = accept[path].tolist()
        weight = path_probs[path]
        law += weight * (1 - a) * (residual[path, 0][:, None] * after_one)[:, :, None] * after_two
        law[first] += weight * a * (1 - b) * residual[path, 1][:, None] * after_two[first]
        law[first, second] += weight * a * b * along[path, 2]
    return law


@pytest.mark.parametrize("draft_truncation", [True, False], ids=["draft-cut", "draft-uncut"])
@pytest.mark.parametrize("fields", SAMPLING)
@pytest.mark.parametrize("changes", HEADS)
def test_a_probabilistic_step_emits_the_targets_law(changes, fields, draft_truncation):
    target = tiny_target(VOCAB, spread=0.7)
    drafter = tiny_drafter(drafter_config(VOCAB, **changes), target)
    sampling = SamplingParams(**fields)
    q_sampling = sampling if draft_truncation else SamplingParams(temperature=sampling.temperature)
    ids = drafter.draft_ids()
    columns = torch.tensor(list(itertools.product(range(drafter.config.draft_vocab_size), repeat=K)))
    tokens = columns if ids is None else ids[columns]
    rows = draft_laws(target, drafter, q_sampling, tokens)
    path_probs = torch.stack([q.gather(-1, columns[:, i, None])[:, 0] for i, q in enumerate(rows)]).prod(0)
    assert path_probs.sum().item() == pytest.approx(1, abs=1e-12)
    drawn = path_probs > 0  # a path that cannot be drawn has no acceptance
    proposal = make_proposal(tokens[drawn], [q[drawn] for q in rows], ids)
    laws = target_laws(target, sampling)
    emitted = emitted_law(laws, proposal, path_probs[drawn])
    torch.testing.assert_close(emitted, law_of_three_tokens(laws), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fields", SAMPLING)
@pytest.mark.parametrize("changes", HEADS)
def test_a_greedily_drafted_step_emits_the_targets_law(changes, fields):
    target = tiny_target(VOCAB, spread=0.7)
    drafter = tiny_drafter(drafter_config(VOCAB, **changes), target)
    ids, tokens = drafter.draft_ids(), []
    for _ in range(K):  # the argmax of each position depends on the one before
        known = torch.tensor([tokens + [0] * (K - len(tokens))])
        column = draft_laws(target, drafter, SamplingParams(temperature=0.0), known)[len(tokens)].argmax(-1)
        tokens.append(int(column if ids is None else ids[column]))
    laws = target_laws(target, SamplingParams(**fields))
    emitted = emitted_law(laws, OneHotProposal(torch.tensor([tokens])), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(emitted, law_of_three_tokens(laws), rtol=0, atol=1e-12)


def test_the_enumeration_sees_a_wrong_residual():
    target = tiny_target(VOCAB, spread=0.7)
    drafter = tiny_drafter(drafter_config(VOCAB), target)
    tokens = torch.tensor(list(itertools.product(range(VOCAB), repeat=K)))
    rows = draft_laws(target, drafter, SamplingParams(), tokens)
    path_probs = torch.stack([q.gather(-1, tokens[:, i, None])[:, 0] for i, q in enumerate(rows)]).prod(0)
    laws = target_laws(target, SamplingParams())
    shifted = make_proposal(tokens, [rows[0], rows[1].roll(1, dims=-1)], None)
    assert (emitted_law(laws, shifted, path_probs) - law_of_three_tokens(laws)).abs().sum() > 1e-3
