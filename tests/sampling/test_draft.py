"""Drafting a token: q is what it was drawn from, with the noise of its own position."""

import pytest
import torch
from exact_law import Q, vector

from dspark.sampling import (
    BlockDraws,
    Purpose,
    SamplingParams,
    SamplingTensors,
    Streams,
    draft_token,
    sample_in_groups,
    streams,
    to_distribution,
)


def batch_of(*params: SamplingParams) -> tuple[SamplingTensors, Streams]:
    return SamplingTensors.stack(params), Streams.for_params(params)


def logits_of(batch: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.01}])
def test_the_returned_q_is_what_the_token_was_drawn_from(fields):
    """Drawing again from the returned q with the same noise gives the same token, and q is that of the parameters."""
    tensors, request = batch_of(*(SamplingParams(**fields, seed=i) for i in range(64)))
    logits, where = logits_of(64, 50), torch.arange(64)
    token, q = draft_token(logits, tensors, request, where)
    assert torch.equal(q, to_distribution(logits, tensors))
    assert torch.equal(token, sample_in_groups(q[:, None], request, where[:, None], Purpose.DRAFT)[:, 0])
    assert (q.gather(-1, token[:, None]) > 0).all()


def test_draws_follow_q_and_not_its_argmax():
    """Chi-square over 20000 positions, 4 degrees of freedom: 18.47 has the false-alarm rate 0.001."""
    n = 20_000
    tensors = SamplingTensors.stack([SamplingParams()] * n)
    request = Streams(torch.full((n,), 31))
    token, _ = draft_token(vector(*Q).log().expand(n, 5), tensors, request, torch.arange(n))
    counts, expected = torch.bincount(token, minlength=5), vector(*Q) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.47


def test_a_reduced_vocabulary_drafts_target_ids():
    tensors, request = batch_of(*(SamplingParams(seed=i) for i in range(200)))
    logits, where = logits_of(200, 40), torch.arange(200)
    ids = torch.arange(40) * 3 + 1
    token, q = draft_token(logits, tensors, request, where, ids=ids)
    assert q.shape == (200, 40)
    column, _ = draft_token(logits, tensors, request, where)
    assert torch.equal(token, ids[column])
    greedy, none = draft_token(logits, tensors, request, where, "greedy", ids)
    assert none is None
    assert torch.equal(greedy, ids[logits.argmax(-1)])


def test_greedy_drafting_needs_no_noise(monkeypatch):
    def forbidden(*args):
        raise AssertionError("noise for a draft that needs none")

    monkeypatch.setattr(streams, "philox_rows", forbidden)
    monkeypatch.setattr(streams, "philox_at", forbidden)
    logits = logits_of(2, 9)
    logits[0, [4, 6]] = 50.0
    for fields, drafting in (({"temperature": 0.0}, "probabilistic"), ({"temperature": 1.0}, "greedy")):
        tensors, request = batch_of(SamplingParams(**fields), SamplingParams(**fields))
        token, q = draft_token(logits, tensors, request, torch.tensor([1, 2]), drafting)
        assert q is None
        assert token.tolist() == [4, int(logits[1].argmax())]


def test_a_mixed_batch_drafts_each_request_as_alone():
    params = [SamplingParams(t, seed=i) for i, t in enumerate([0.0, 0.7, 0.0, 1.3])]
    tensors, request = batch_of(*params)
    logits, where = logits_of(4, 60), torch.tensor([5, 9, 200, 3])
    token, q = draft_token(logits, tensors, request, where)
    for row, each in enumerate(params):
        alone, q_alone = draft_token(logits[row][None], *batch_of(each), where[row : row + 1])
        assert alone.item() == token[row]
        assert q_alone is None or torch.equal(q_alone[0], q[row])
    assert (q[0].max(), q[2].max()) == (1, 1)


def test_an_unknown_way_of_drafting_is_named():
    with pytest.raises(ValueError, match="drafting must be one of greedy, probabilistic; got 'argmax'"):
        draft_token(logits_of(1, 3), *batch_of(SamplingParams()), torch.tensor([0]), "argmax")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parameters_or_positions_of_other_requests_are_refused(count):
    """One row of either would fit three requests without a complaint of torch's."""
    three, other = ([SamplingParams(seed=i) for i in range(n)] for n in (3, count))
    tensors, request = batch_of(*three)
    with pytest.raises(ValueError, match=f"logits has 3 requests, but the sampling parameters have {count} rows"):
        draft_token(logits_of(3, 9), batch_of(*other)[0], request, torch.arange(3))
    with pytest.raises(ValueError, match="positions for"):
        draft_token(logits_of(3, 9), tensors, batch_of(*other)[1], torch.arange(count))


def test_a_block_names_the_row_whose_logits_overflowed():
    """Request 1's second draft is row 3 of 2 requests times 2 positions."""
    tensors, request = batch_of(SamplingParams(seed=0, top_p=0.9), SamplingParams(seed=1, top_k=3))
    block = BlockDraws(tensors, request, torch.tensor([[4, 5], [9, 10]]))
    bad = logits_of(2, 40)
    bad[1] = float("nan")
    for i, logits in enumerate((logits_of(2, 40), bad)):
        assert (block.draw(i, logits) < 40).all()
    with pytest.raises(ValueError, match=r"logits row 3 \(of 4, requests times positions\) has the maximum nan"):
        block.proposal()
