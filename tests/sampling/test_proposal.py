"""The three forms of q: accepting or recovering emits exactly p, by enumeration of every draft."""

from functools import cache

import pytest
import torch
from exact_law import P, Q, block_law, logits_model, one_step_law, sampled, target_law, vector
from hypothesis import given
from hypothesis import strategies as st

from dspark.sampling import (
    DenseProposal,
    OneHotProposal,
    Proposal,
    SamplingParams,
    SparseProposal,
    make_proposal,
    to_distribution,
)

EXACT = {"rtol": 0, "atol": 1e-12}
REDUCED = torch.tensor([0, 2, 3])  # draft vocabulary of the reduced form

TRUNCATIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.3}, id="cool"),
    pytest.param({"temperature": 2.0}, id="hot"),
    pytest.param({"top_k": 2}, id="top-k"),
    pytest.param({"top_p": 0.7}, id="top-p"),
    pytest.param({"min_p": 0.3}, id="min-p"),
    pytest.param({"temperature": 0.8, "top_k": 3, "top_p": 0.8, "min_p": 0.05}, id="all-of-them"),
    pytest.param({"temperature": 0.0}, id="greedy"),
]
FORMS = {
    "one-hot": lambda logits: logits.argmax(-1, keepdim=True),
    "dense": lambda logits: torch.arange(len(logits)),
    "sparse": lambda logits: logits.topk(3).indices,  # columns in falling order of probability, not of id
    "reduced": lambda logits: REDUCED,
}


def build(form: str, tokens: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> Proposal:
    """The proposal of `form` for tokens [B, K], columns ids [B, K, k] and their probs."""
    if form == "one-hot":
        return OneHotProposal(tokens)
    if form == "dense":
        return DenseProposal(tokens, probs)
    return SparseProposal(tokens, ids, probs)


@pytest.mark.parametrize("fields", TRUNCATIONS)
@pytest.mark.parametrize("draft_truncation", [True, False], ids=["same-truncation", "untruncated-draft"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_draft_tokens", "vocab_size"), [(1, 6), (2, 5), (3, 4)])
def test_a_verified_block_emits_the_joint_law_of_the_target(
    form, fields, draft_truncation, num_draft_tokens, vocab_size
):
    params = SamplingParams(**fields)
    draft_params = params if draft_truncation else SamplingParams(temperature=params.temperature)
    target = sampled(logits_model(1, vocab_size), params)
    drafter = logits_model(2, vocab_size)

    @cache
    def columns(prefix):
        ids = FORMS[form](drafter(prefix))
        return ids, to_distribution(drafter(prefix)[ids][None], draft_params)[0]

    @cache
    def draft(prefix):
        ids, probs = columns(prefix)
        return probs.new_zeros(vocab_size).scatter(0, ids, probs)

    def propose(path):
        ids, probs = zip(*(columns(path[:i]) for i in range(num_draft_tokens)), strict=True)
        return build(form, torch.tensor([path]), torch.stack(ids)[None], torch.stack(probs)[None])

    law = block_law(target, draft, propose, num_draft_tokens, vocab_size)
    expected = target_law(target, num_draft_tokens + 1, vocab_size)
    assert max(abs(law.get(path, 0.0) - probability) for path, probability in expected.items()) < 1e-12


weights = st.lists(st.integers(0, 9), min_size=6, max_size=6).filter(any)


@given(weights, weights, st.sampled_from(["one-hot", "dense", "sparse"]))
def test_accepting_or_recovering_emits_the_target_for_any_p_and_q(p_weights, q_weights, form):
    p, q = vector(*p_weights), vector(*q_weights)
    drafts = q.nonzero()[:, 0]  # every token that can be drafted, one request each
    n = len(drafts)
    ids = q.argsort(descending=True).expand(n, 1, 6)
    probs = q.expand(n, 1, 6) if form == "dense" else q[ids]
    laws = one_step_law(build(form, drafts[:, None], ids, probs), p.expand(n, 1, 6))
    if form == "one-hot":  # exact for each draft by itself
        torch.testing.assert_close(laws, p.expand(n, 6), **EXACT)
    else:
        torch.testing.assert_close(q[drafts] @ laws, p, **EXACT)


# Known numbers


def every_draft(q: torch.Tensor) -> tuple[torch.Tensor, DenseProposal, OneHotProposal]:
    """The drafts q can give, and the two rules for judging them, one request each."""
    drafts = torch.arange(len(q))[:, None]
    return drafts, DenseProposal(drafts, q.expand(len(q), 1, len(q))), OneHotProposal(drafts)


def test_the_full_q_rule_accepts_half_of_a_half_overlapping_draft():
    p, q = vector(*P), vector(*Q)
    _, dense, _ = every_draft(q)
    torch.testing.assert_close(dense.overlap(p.expand(5, 1, 5)), torch.full((5, 1), 0.5, dtype=p.dtype), **EXACT)
    torch.testing.assert_close(dense.residual(p.expand(5, 1, 5))[0, 0], vector(0.6, 0.4, 0, 0, 0), **EXACT)
    torch.testing.assert_close(q @ one_step_law(dense, p.expand(5, 1, 5)), p, **EXACT)


def test_a_lost_q_lowers_the_acceptance_but_not_the_law():
    p, q = vector(*P), vector(*Q)
    _, _, one_hot = every_draft(q)
    accepted = one_hot.overlap(p.expand(5, 1, 5))[:, 0]
    assert float(q @ accepted) == pytest.approx(0.1725, abs=1e-12)
    torch.testing.assert_close(q @ one_step_law(one_hot, p.expand(5, 1, 5)), p, **EXACT)


def test_an_untruncated_draft_costs_acceptance_only():
    p, q = to_distribution(vector(*P).log()[None], SamplingParams(top_k=2))[0], vector(*Q)
    torch.testing.assert_close(p, vector(0.6, 0.4, 0, 0, 0), **EXACT)
    _, dense, _ = every_draft(q)
    assert float(dense.overlap(p.expand(5, 1, 5))[0, 0]) == pytest.approx(0.25, abs=1e-12)
    torch.testing.assert_close(q @ one_step_law(dense, p.expand(5, 1, 5)), p, **EXACT)


@pytest.mark.parametrize(
    ("residual_of", "distance"),
    [pytest.param("one-hot", 0.0875, id="half-lost-q"), pytest.param("target", 0.125, id="residual-is-the-target")],
)
def test_the_law_notices_a_wrong_residual(residual_of, distance):
    """Power of the tests above: two mistakes that have been made, and how far from p they end."""
    p, q = vector(*P), vector(*Q)
    drafts, dense, one_hot = every_draft(q)
    targets = p.expand(5, 1, 5)
    accept = (p / dense.prob()[:, 0]).clamp_max(1)
    wrong = one_hot.residual(targets)[:, 0] if residual_of == "one-hot" else targets[:, 0]
    law = ((1 - accept)[:, None] * wrong).scatter_add(-1, drafts, accept[:, None])
    assert float((q @ law - p).abs().sum() / 2) == pytest.approx(distance, abs=2e-3)


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        pytest.param((0.5, 0.3, 0.2, 0.0), (0.0, 0.3, 0.2, 0.5), (1, 0, 0, 0), id="one-token-uncovered"),
        pytest.param((0.5, 0.3, 0.2, 0.0), (0, 0, 0, 1), (0.5, 0.3, 0.2, 0), id="disjoint"),
        pytest.param((0.5, 0.3, 0.2, 0.0), (0.5, 0.3, 0.2, 0.0), (0.5, 0.3, 0.2, 0), id="draft-equals-target"),
        pytest.param((1, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0), id="both-certain"),
    ],
)
def test_known_residuals(p, q, expected):
    p, q, expected = (torch.tensor([[row]], dtype=torch.float64) for row in (p, q, expected))
    for form in ("dense", "sparse", "one-hot") if q.max() == 1 else ("dense", "sparse"):
        out = build(form, q.argmax(-1), torch.arange(4).expand(1, 1, 4), q).residual(p)
        torch.testing.assert_close(out, expected, **EXACT, msg=lambda text, form=form: f"{form}: {text}")


# One q in three forms


def same_q_in_every_form(vocab_size: int = 7) -> dict[str, Proposal]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[4, 2], [0, 6], [2, -1]])
    one_hot = OneHotProposal(tokens)
    full = one_hot.dense(vocab_size)
    ids = torch.rand(3, 2, vocab_size, generator=generator).argsort(-1)
    return {
        "one-hot": one_hot,
        "dense": DenseProposal(tokens, full),
        "sparse": SparseProposal(tokens, ids, full.gather(-1, ids)),
    }


@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
def test_a_one_hot_q_means_the_same_in_every_form(form):
    forms = same_q_in_every_form()
    p = torch.rand(3, 2, 7, generator=torch.Generator().manual_seed(1)).softmax(-1)
    asked = torch.tensor([[4, 3], [0, -1], [2, 5]])
    for name in ("prob", "residual", "overlap", "dense"):
        argument = {"prob": asked, "residual": p, "overlap": p, "dense": 7}[name]
        expected = getattr(forms["one-hot"], name)(argument)
        torch.testing.assert_close(getattr(forms[form], name)(argument), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
def test_a_slot_without_a_draft_recovers_from_the_target(form):
    proposal = same_q_in_every_form()[form]
    p = torch.rand(3, 2, 7, generator=torch.Generator().manual_seed(1)).softmax(-1)
    assert torch.allclose(proposal.residual(p)[2, 1], p[2, 1])
    assert proposal.prob()[2, 1] == 0
    assert proposal.overlap(p)[2, 1] == 0
    assert (proposal.dense(7)[2, 1] == 0).all()


def test_the_unread_q_of_a_slot_without_a_draft_may_be_anything():
    probs = torch.full((1, 2, 3), float("nan"))
    probs[0, 0] = torch.tensor([0.2, 0.3, 0.5])
    p = torch.full((1, 2, 3), 1 / 3)
    for proposal in (
        DenseProposal(torch.tensor([[1, -1]]), probs),
        SparseProposal(torch.tensor([[1, -1]]), torch.arange(3).expand(1, 2, 3), probs),
    ):
        for out in (proposal.prob(), proposal.residual(p), proposal.overlap(p), proposal.dense(3)):
            assert out.isfinite().all()


@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
def test_cutting_moves_every_request_with_its_own_q(form):
    proposal = same_q_in_every_form()[form]
    whole = proposal.dense(7)
    order = torch.tensor([2, 0])
    assert torch.equal(proposal.rows(order).dense(7), whole[order])
    assert torch.equal(proposal.rows(order).tokens, proposal.tokens[order])
    assert torch.equal(proposal.rows(torch.tensor([False, True, False])).dense(7), whole[1:2])
    assert torch.equal(proposal.truncate(1).dense(7), whole[:, :1])
    slot = torch.tensor([1, 0, 1])
    cut = proposal.position(slot)
    assert torch.equal(cut.dense(7)[:, 0], whole[torch.arange(3), slot])
    assert cut.num_draft_tokens == 1


# Building


def test_a_block_keeps_its_distributions_bit_for_bit():
    rows = list(torch.rand(3, 2, 5, generator=torch.Generator().manual_seed(0)).softmax(-1))
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    dense, ids = make_proposal(tokens, rows), torch.tensor([1, 3, 4, 8, 9])
    sparse = make_proposal(tokens, rows, ids)
    assert isinstance(dense, DenseProposal)
    assert isinstance(sparse, SparseProposal)
    for position in range(3):
        assert torch.equal(dense.probs[:, position], rows[position])
        assert torch.equal(sparse.probs[:, position], rows[position])
        assert torch.equal(sparse.dense(10)[:, position][:, ids], rows[position])
    assert isinstance(make_proposal(tokens, [None] * 3, ids), OneHotProposal)


def test_bad_proposals_are_named():
    tokens = torch.tensor([[0, 1]])
    row = torch.full((1, 3), 1 / 3)
    with pytest.raises(ValueError, match=r"tokens must be int64 \[B, K\], got torch.float32"):
        OneHotProposal(torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"probs must be \[1, 2, n\].*got \(1, 3, 4\)"):
        DenseProposal(tokens, torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match=r"ids must be int64 with the shape of probs, \(1, 2, 4\)"):
        SparseProposal(tokens, torch.zeros(1, 2, 5).long(), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="draft probs cover 4 tokens, the target 5: one is padded"):
        DenseProposal(tokens, torch.zeros(1, 2, 4)).residual(torch.zeros(1, 2, 5))
    with pytest.raises(ValueError, match="draft_probs has 1 positions, tokens has 2"):
        make_proposal(tokens, [row])
    with pytest.raises(ValueError, match="draft_probs is None at 1 of 2 positions"):
        make_proposal(tokens, [row, None])
