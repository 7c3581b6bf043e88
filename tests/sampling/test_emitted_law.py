"""The law that is emitted through the real draws: draft, accept and recover from one request's streams.

Fixed seeds, so that a test passes or fails always; the rate stated beside each is that of a false alarm over seeds.
"""

from dataclasses import dataclass

import pytest
import torch
from exact_law import P6, Q6, P, Q, vector
from scipy import stats

from dspark.sampling import (
    Purpose,
    SamplingParams,
    SamplingTensors,
    Streams,
    draft_token,
    make_proposal,
    rejection_sample,
    to_distribution,
)

POSITIONS = 20_000


@dataclass(frozen=True)
class SharedNoise(Streams):
    """The mistake: drafts and acceptances read the same number."""

    def uniform(self, positions, purpose):
        return super().uniform(positions, Purpose.DRAFT)


def same_request(n: int, seed: int) -> tuple[SamplingTensors, Streams]:
    """One request at n places of its text."""
    return SamplingTensors.stack([SamplingParams(seed=seed)] * n), Streams(torch.full((n,), seed))


def emitted_by_one_draft(request: Streams, tensors: SamplingTensors) -> torch.Tensor:
    n = len(request)
    where = torch.arange(n)
    p, q = (vector(*weights).expand(n, 6) for weights in (P6, Q6))
    drafts, drawn_from = draft_token(q.log(), tensors, request, where)
    proposal = make_proposal(drafts[:, None], [drawn_from])
    verified = rejection_sample(proposal, p[:, None].expand(n, 2, 6), request, where)
    return torch.bincount(verified.tokens[:, 0], minlength=6)


def test_drafting_and_recovering_do_not_lean_towards_the_drafter():
    """Chi-square over 20000 positions of one seed, 5 degrees of freedom: 20.5 has the false-alarm rate 0.001."""
    tensors, request = same_request(POSITIONS, seed=41)
    counts = emitted_by_one_draft(request, tensors)
    assert stats.chisquare(counts.numpy(), vector(*P6).numpy() * POSITIONS).statistic < 20.5


def test_the_law_notices_a_number_shared_by_draft_and_acceptance():
    tensors, request = same_request(POSITIONS, seed=41)
    counts = emitted_by_one_draft(SharedNoise(request.seeds), tensors)
    assert stats.chisquare(counts.numpy(), vector(*P6).numpy() * POSITIONS).statistic > 40


@pytest.mark.parametrize("form", ["dense", "sparse", "one-hot"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.3}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}],
    ids=["plain", "cool", "hot", "top-k", "top-p", "min-p"],
)
def test_two_tokens_have_the_joint_law_of_the_target_across_steps(form, fields):
    """A block of two, and a second step where only one token came out of the first.

    That step reads the noise of a position whose draft was thrown away before. Chi-square over the pairs, false alarm
    0.001 each.
    """
    n, vocab_size = POSITIONS, 5
    generator = torch.Generator().manual_seed(7)
    target_logits, draft_logits = torch.randn(2, vocab_size + 1, vocab_size, generator=generator, dtype=torch.float64)
    params = SamplingParams(**fields)
    tensors = SamplingTensors.stack([params] * n)
    request, where = Streams(torch.full((n,), 43)), torch.arange(n) * 4
    start = torch.full((n,), vocab_size)  # the last row of the tables belongs to the anchor
    p_table = to_distribution(target_logits, params)
    ids = torch.tensor([4, 1, 0, 2]) if form == "sparse" else None
    table = draft_logits if ids is None else draft_logits[:, ids]

    def draft(previous, offset):
        return draft_token(table[previous], tensors, request, where + offset, drafting(form), ids)

    first, q_first = draft(start, 0)
    second, q_second = draft(first, 1)
    block = make_proposal(torch.stack([first, second], 1), [q_first, q_second], ids)
    step = rejection_sample(block, torch.stack([p_table[start], p_table[first], p_table[second]], 1), request, where)
    token, other = step.tokens[:, 0], step.tokens[:, 1]
    again, q_again = draft(token, 1)
    next_block = make_proposal(again[:, None], [q_again], ids)
    next_step = rejection_sample(next_block, p_table[torch.stack([token, again], 1)], request, where + 1)
    other = torch.where(step.num_emitted == 1, next_step.tokens[:, 0], other)

    counts = torch.bincount(token * vocab_size + other, minlength=vocab_size**2)
    expected = (p_table[vocab_size][:, None] * p_table[:vocab_size]).flatten() * n
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > 1e-3


def drafting(form: str) -> str:
    return "greedy" if form == "one-hot" else "probabilistic"


def test_tokens_cut_by_min_p_are_never_emitted():
    n = 5000
    p = to_distribution(vector(*P).log().expand(n, 2, 5), SamplingParams(min_p=0.5))
    tensors, request = same_request(n, seed=9)
    drafts, q = draft_token(vector(*Q).log().expand(n, 5), tensors, request, torch.arange(n))
    out = rejection_sample(make_proposal(drafts[:, None], [q]), p, request, torch.arange(n))
    assert set(out.tokens.unique().tolist()) == {-1, 0, 1}
