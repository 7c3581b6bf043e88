"""rejection_sample: single decisions, counts, and the isolation of requests."""

from dataclasses import dataclass

import pytest
import torch
from exact_law import P, Q, vector

from dspark.sampling import (
    DenseProposal,
    OneHotProposal,
    Proposal,
    Purpose,
    SamplingParams,
    SamplingTensors,
    SparseProposal,
    Streams,
    make_proposal,
    rejection_sample,
    sample,
    streams,
    to_distribution,
)


@dataclass(frozen=True)
class FixedUniform(Streams):
    """Streams whose acceptance numbers are given, [B, K]."""

    given: torch.Tensor

    def uniform(self, positions, purpose):
        assert purpose is Purpose.ACCEPT
        return self.given

    def rows(self, index):
        return Streams(self.seeds[index])


def random_case(batch: int, num_draft_tokens: int, vocab_size: int, seed: int = 0):
    """Drafts drawn from a random q, and a random p, float32."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, num_draft_tokens + 1, vocab_size, generator=generator) * 1.5
    noise = torch.randn(batch, num_draft_tokens + 1, vocab_size, generator=generator)
    q, p = logits[:, :-1].softmax(-1), (logits + noise * 0.7).softmax(-1)
    request = Streams(torch.arange(batch) + 100)
    where = torch.arange(batch) * 50
    drafts = sample(q, request, where[:, None] + torch.arange(num_draft_tokens), Purpose.DRAFT)
    return DenseProposal(drafts, q), p, request, where


# One decision


def decide(u: float, p: tuple[float, ...], q: tuple[float, ...], draft: int) -> int:
    """Accepted drafts of one request, beside another whose decision needs its number."""
    probs = torch.tensor([[p, p], [(0.5, 0.5), (0.5, 0.5)]], dtype=torch.float64)
    proposal = DenseProposal(torch.tensor([[draft], [0]]), torch.tensor([[q], [(0.9, 0.1)]], dtype=torch.float64))
    request = FixedUniform(torch.tensor([1, 2]), torch.tensor([[u], [0.3]], dtype=torch.float64))
    return int(rejection_sample(proposal, probs, request, torch.tensor([0, 0])).num_accepted[0])


@pytest.mark.parametrize(
    ("u", "p", "q", "accepted"),
    [
        pytest.param(0.4999, (0.25, 0.75), (0.5, 0.5), 1, id="just-below-the-ratio"),
        pytest.param(0.5, (0.25, 0.75), (0.5, 0.5), 0, id="at-the-ratio"),
        pytest.param(1 - 2**-53, (0.5, 0.5), (0.5, 0.5), 1, id="equal-probabilities-never-reject"),
        pytest.param(1 - 2**-53, (0.75, 0.25), (0.5, 0.5), 1, id="more-likely-in-the-target"),
        pytest.param(0.0, (0.0, 1.0), (0.5, 0.5), 0, id="impossible-in-the-target-even-at-u-zero"),
    ],
)
def test_a_draft_is_accepted_below_the_ratio_of_probabilities(u, p, q, accepted):
    assert decide(u, p, q, draft=0) == accepted


def test_a_worked_step():
    """Drafts (0, 2, 1): the second is rejected, so the third is not looked at although it would pass."""
    q = torch.tensor([[vector(*Q).tolist()] * 3])
    p = torch.tensor([[vector(*P).tolist()] * 4])
    request = FixedUniform(torch.tensor([5]), torch.tensor([[0.99, 0.9, 0.0]], dtype=torch.float64))
    out = rejection_sample(DenseProposal(torch.tensor([[0, 2, 1]]), q), p, request, torch.tensor([10]))
    residual = torch.tensor([[[0.6, 0.4, 0.0, 0.0, 0.0]]])
    recovered = sample(residual, Streams(torch.tensor([5])), torch.tensor([[11]]), Purpose.RECOVERY).item()
    assert out.tokens.tolist() == [[0, recovered, -1, -1]]
    assert (out.num_accepted.item(), out.num_emitted.item()) == (1, 2)
    torch.testing.assert_close(out.accept_probs, torch.full((1, 3), 0.5))


def test_the_added_token_uses_the_noise_of_its_own_position_and_purpose():
    proposal, p, request, where = random_case(batch=300, num_draft_tokens=3, vocab_size=20)
    out = rejection_sample(proposal, p, request, where)
    everything, row = out.num_accepted == 3, torch.arange(300)
    last = p[row, out.num_accepted][:, None]
    at = (where + out.num_accepted)[:, None]
    bonus = sample(last, request, at, Purpose.TARGET)[:, 0]
    cut = proposal.position(out.num_accepted.clamp_max(2))
    recovered = sample(cut.residual(last), request, at, Purpose.RECOVERY)[:, 0]
    added = out.tokens[row, out.num_accepted]
    assert 20 < int(everything.sum()) < 280
    assert torch.equal(added, torch.where(everything, bonus, recovered))
    u = request.uniform(where[:, None] + torch.arange(3), Purpose.ACCEPT)
    judged = u * proposal.prob() < p[:, :3].gather(-1, proposal.tokens[..., None])[..., 0]
    assert torch.equal(out.num_accepted, judged.long().cumprod(-1).sum(-1))


def test_the_expected_acceptance_is_the_mean_of_the_realised_one():
    """Hoeffding: 4000 decisions stray 0.035 from their mean less often than once in 10000."""
    proposal, p, request, where = random_case(batch=4000, num_draft_tokens=1, vocab_size=12, seed=5)
    out = rejection_sample(proposal, p, request, where)
    assert float(out.accept_probs.mean() - out.num_accepted.double().mean()) == pytest.approx(0, abs=0.035)


# Counts


def check_counts(out, num_draft_tokens: int) -> None:
    slot = torch.arange(num_draft_tokens + 1)
    assert torch.equal(out.num_emitted, out.num_accepted + 1)
    assert torch.equal(out.tokens >= 0, slot < out.num_emitted[:, None])


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_tokens_are_a_kept_prefix_one_more_and_padding(num_draft_tokens):
    proposal, p, request, where = random_case(batch=200, num_draft_tokens=num_draft_tokens, vocab_size=9)
    out = rejection_sample(proposal, p, request, where)
    check_counts(out, num_draft_tokens)
    kept = torch.arange(num_draft_tokens) < out.num_accepted[:, None]
    assert torch.equal(out.tokens[:, :-1][kept], proposal.tokens[kept])


def test_trimmed_drafts_are_not_judged_and_what_lies_past_them_is_not_read():
    proposal, p, request, where = random_case(batch=90, num_draft_tokens=4, vocab_size=9)
    num_offered = torch.arange(90) % 5
    unread = torch.arange(5) > num_offered[:, None]
    poisoned = p.masked_fill(unread[..., None], float("nan"))
    out = rejection_sample(proposal, poisoned, request, where, num_offered)
    check_counts(out, 4)
    assert (out.num_accepted <= num_offered).all()
    assert torch.equal(out.accept_probs.isnan(), torch.arange(4) >= num_offered[:, None])
    for row in range(90):
        k = int(num_offered[row])
        index = torch.tensor([row])
        alone = rejection_sample(proposal.rows(index).truncate(k), p[index, : k + 1], request.rows(index), where[index])
        assert torch.equal(alone.tokens[0], out.tokens[row, : k + 1])


def test_a_request_without_drafts_takes_a_plain_step_and_disturbs_no_one():
    proposal, p, request, where = random_case(batch=6, num_draft_tokens=3, vocab_size=30)
    num_offered = torch.tensor([3, 0, 3, 0, 3, 3])
    out = rejection_sample(proposal, p, request, where, num_offered)
    plain = sample(p[:, :1], request, where[:, None], Purpose.TARGET)[:, 0]
    assert out.tokens[[1, 3]].tolist() == [[int(plain[1]), -1, -1, -1], [int(plain[3]), -1, -1, -1]]
    everyone = rejection_sample(proposal, p, request, where)
    assert torch.equal(out.tokens[[0, 2, 4, 5]], everyone.tokens[[0, 2, 4, 5]])


@pytest.mark.parametrize("form", ["one-hot", "dense", "sparse"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_are_never_accepted_nor_indexed(form, temperature):
    """Drafts [3, -1, -1]: token 3 is judged as usual, and what follows it is drawn from p, not from p - q."""
    n = 400
    tokens = torch.tensor([3, -1, -1]).expand(n, 3)
    logits = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2)).expand(n, 4, 6)
    p = to_distribution(logits, SamplingParams(temperature))
    q = torch.full((n, 3, 6), float("nan"))
    q[:, 0] = torch.tensor([0.1, 0.1, 0.1, 0.5, 0.1, 0.1])
    ids = torch.tensor([5, 4, 3, 2, 1, 0]).expand(n, 3, 6)
    proposal: Proposal = {
        "one-hot": OneHotProposal(tokens),
        "dense": DenseProposal(tokens, q),
        "sparse": SparseProposal(tokens, ids, q.gather(-1, ids)),
    }[form]
    request, where = Streams(torch.arange(n)), torch.zeros(n, dtype=torch.int64)
    out = rejection_sample(proposal, p, request, where)
    check_counts(out, 3)
    assert (out.num_accepted <= 1).all()
    assert out.accept_probs[:, 1:].isnan().all()
    offered = rejection_sample(proposal.truncate(1), p[:, :2], request, where)
    assert torch.equal(out.tokens[:, :2], offered.tokens)
    accepted = out.num_accepted == 1
    if temperature:
        assert 0 < int(accepted.sum()) < n
    after = sample(p[:, 1:2], request, where[:, None] + 1, Purpose.TARGET)[:, 0]
    assert torch.equal(out.tokens[accepted, 1], after[accepted])


# Forms and requests


def test_dense_and_sparse_forms_of_one_q_emit_the_same_tokens():
    proposal, p, request, where = random_case(batch=500, num_draft_tokens=4, vocab_size=25)
    ids = torch.rand(500, 4, 25, generator=torch.Generator().manual_seed(3)).argsort(-1)
    sparse = SparseProposal(proposal.tokens, ids, proposal.probs.gather(-1, ids))
    a, b = (rejection_sample(each, p, request, where) for each in (proposal, sparse))
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.accept_probs, b.accept_probs)


def test_a_reduced_draft_vocabulary_is_its_dense_form():
    ids = torch.tensor([1, 4, 6, 7, 11])
    narrow, _, request, where = random_case(batch=300, num_draft_tokens=2, vocab_size=5)
    p = torch.randn(300, 3, 12, generator=torch.Generator().manual_seed(4)).softmax(-1)
    reduced = make_proposal(ids[narrow.tokens], list(narrow.probs.unbind(1)), ids)
    dense = DenseProposal(reduced.tokens, reduced.dense(12))
    a, b = (rejection_sample(each, p, request, where) for each in (reduced, dense))
    assert torch.equal(a.tokens, b.tokens)
    assert (a.tokens == 0).any()  # a token that the drafter cannot propose


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_requests_keep_their_q_when_the_batch_changes_and_the_vocabulary_is_padded(dtype):
    """Drafted together, vocabulary 5 padded to 8; then reordered, one dropped, one joining, and verified."""
    narrow, p, request, where = random_case(batch=3, num_draft_tokens=2, vocab_size=5)
    wide = torch.nn.functional.pad(narrow.probs.to(dtype), (0, 3))
    p = torch.nn.functional.pad(p.to(dtype), (0, 3))
    proposal = DenseProposal(narrow.tokens, wide)
    together = rejection_sample(proposal, p, request, where).tokens
    for order in ([2, 0], [1], [2, 1, 0, 0], [1, 0, 2]):
        rows = torch.tensor(order)
        out = rejection_sample(proposal.rows(rows), p[rows], request.rows(rows), where[rows])
        assert torch.equal(out.tokens, together[rows])


def test_a_seeded_request_emits_the_same_after_other_work():
    """No number comes from a global generator, and nothing that ran before moves a request's stream."""
    proposal, p, request, where = random_case(batch=20, num_draft_tokens=3, vocab_size=40)
    before = rejection_sample(proposal, p, request, where).tokens
    state = torch.get_rng_state()
    for seed in range(3):
        other = random_case(batch=7, num_draft_tokens=5, vocab_size=40, seed=seed)
        rejection_sample(*other)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1000)
    assert torch.equal(rejection_sample(proposal, p, request, where).tokens, before)


def test_equal_prompts_with_other_seeds_emit_other_tokens():
    """The drafts are the same for all 50, so that only acceptance and the added token can differ."""
    proposal, p, _, where = random_case(batch=1, num_draft_tokens=3, vocab_size=1000)
    rows = torch.zeros(50, dtype=torch.int64)
    out = rejection_sample(proposal.rows(rows), p[rows], Streams(torch.arange(50)), where[rows])
    assert len(out.tokens.unique(dim=0)) > 25


def test_temperatures_mixed_in_a_batch_leave_each_other_alone():
    """Rows at 0, 0.7 and 0, the first with ties: the greedy ones emit their lowest argmax whatever was drafted."""
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(6))
    logits[0, :, [8, 2, 5]] = 9.0
    params = [SamplingParams(t, seed=s) for t, s in ((0.0, 1), (0.7, 2), (0.0, 3))]
    p = to_distribution(logits, SamplingTensors.stack(params))
    request, where = Streams.for_params(params), torch.tensor([4, 40, 400])
    drafts = torch.tensor([[2, 2, 5], [1, 3, 9], [0, 0, 0]])
    drafts[2] = logits[2, :3].argmax(-1)
    proposal = OneHotProposal(drafts)
    out = rejection_sample(proposal, p, request, where)
    assert out.tokens[0].tolist() == [2, 2, 2, -1]
    assert out.tokens[2].tolist() == logits[2].argmax(-1).tolist()
    for row in range(3):
        index = torch.tensor([row])
        alone = rejection_sample(proposal.rows(index), p[index], request.rows(index), where[index])
        assert torch.equal(alone.tokens[0], out.tokens[row])


def test_a_greedy_batch_computes_no_noise(monkeypatch):
    def forbidden(*args):
        raise AssertionError("noise for a step that needs none")

    monkeypatch.setattr(streams, "philox_rows", forbidden)
    monkeypatch.setattr(streams, "philox_at", forbidden)
    p = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3], [1, 2, 3]]), 5).float()
    proposal = OneHotProposal(torch.tensor([[1, 2], [1, 4]]))
    out = rejection_sample(proposal, p, Streams(torch.tensor([1, 2])), torch.tensor([0, 0]))
    assert out.tokens.tolist() == [[1, 2, 3], [1, 2, -1]]


# Misuse


def test_a_draft_that_q_cannot_give_is_an_error():
    proposal = DenseProposal(torch.tensor([[1]]), torch.tensor([[[1.0, 0.0]]]))
    with pytest.raises(AssertionError, match="draft 1 of request 0 has q = 0: it was not drawn from the q"):
        rejection_sample(proposal, torch.full((1, 2, 2), 0.5), Streams(torch.tensor([1])), torch.tensor([0]))


@pytest.mark.parametrize(
    ("draft", "shape", "num_offered", "message"),
    [
        pytest.param(0, (1, 1, 4), None, r"target_probs must be \[1, 2, V\], .*got \(1, 1, 4\)", id="no-bonus-row"),
        pytest.param(0, (2, 2, 4), None, r"target_probs must be \[1, 2, V\]", id="other-batch"),
        pytest.param(0, (1, 2, 4), [2], r"num_offered must be in 0..1, got \[2\]", id="offered-too-many"),
        pytest.param(0, (1, 2, 4), [-1], r"num_offered must be in 0..1", id="offered-negative"),
        pytest.param(4, (1, 2, 4), None, "draft token 4 is outside the target's vocabulary of 4", id="unmapped-id"),
    ],
)
def test_bad_inputs_are_named(draft, shape, num_offered, message):
    offered = None if num_offered is None else torch.tensor(num_offered)
    with pytest.raises(ValueError, match=message):
        rejection_sample(
            OneHotProposal(torch.tensor([[draft]])),
            torch.full(shape, 0.25),
            Streams(torch.tensor([1])),
            torch.tensor([0]),
            offered,
        )


def test_a_draft_that_is_not_offered_may_be_no_token_of_the_target():
    """A schedule cuts drafts off, whatever they are; a dense q has no column for such a one."""
    proposal, p, request, where = random_case(2, 3, 6)
    offered = torch.tensor([1, 2])
    unmapped = DenseProposal(proposal.tokens.masked_fill(torch.arange(3) >= offered[:, None], 9), proposal.probs)
    expected = rejection_sample(proposal, p, request, where, offered)
    assert torch.equal(rejection_sample(unmapped, p, request, where, offered).tokens, expected.tokens)
