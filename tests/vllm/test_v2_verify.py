"""Verification in vLLM's packed layout emits what the library's rejection sampling emits, number for number.

The steps are made by hand; vLLM's sampler is replaced by one that only divides by the temperature.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dspark.sampling import (
    DenseProposal,
    SamplingParams,
    SamplingTensors,
    SparseProposal,
    Streams,
    rejection_sample,
    to_distribution,
)
from dspark.vllm import v2
from dspark.vllm.v2_verify import Verifier, forbid_drafts

VOCAB, STEPS, SLOTS = 48, 3, 6
# Requests of a step: slot, temperature, seed, position of the newest token, drafts offered.
REQUESTS = [(4, 1.0, 11, 20, 3), (0, 0.7, 12, 31, 2), (5, 0.0, 13, 9, 3), (2, 1.3, 14, 40, 0), (1, 1.0, 15, 17, 1)]


class Case:
    """Logits, drafts and stored proposals of the requests above."""

    def __init__(self, seed, topk=None, requests=REQUESTS):
        generator = torch.Generator().manual_seed(seed)
        self.requests = requests
        slots = [slot for slot, *_ in requests]
        self.draft_logits = torch.randn(SLOTS, STEPS, VOCAB, generator=generator) * 2
        self.logits = torch.randn(len(requests), STEPS + 1, VOCAB, generator=generator) * 2
        # Targets that agree with the drafts in part, so that some are accepted and some rejected.
        self.logits[:, :STEPS] = 0.7 * self.logits[:, :STEPS] + 0.7 * self.draft_logits[slots]
        self.ids = None
        if topk is not None:
            self.ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:topk] for _ in range(SLOTS * STEPS)])
            self.ids = self.ids.view(SLOTS, STEPS, topk).sort(-1).values
        self.temperature = torch.ones(SLOTS)
        self.seeds = torch.zeros(SLOTS, dtype=torch.int64)
        for slot, temperature, key, _, _ in requests:
            self.temperature[slot], self.seeds[slot] = temperature, key
        values = self.draft_logits if self.ids is None else self.draft_logits.gather(-1, self.ids)
        scaled = values / self.temperature.clamp_min(1e-3)[:, None, None]
        self.q = scaled.softmax(-1)
        self.q[self.temperature == 0] = torch.nn.functional.one_hot(
            values[self.temperature == 0].argmax(-1), values.shape[-1]
        ).float()
        drawn = torch.multinomial(self.q.view(SLOTS * STEPS, -1), 1, generator=generator).view(SLOTS, STEPS)
        self.drafts = drawn if self.ids is None else self.ids.gather(-1, drawn[..., None])[..., 0]
        self.store = SimpleNamespace(
            logits=self.draft_logits if self.ids is None else None,
            logsumexp=scaled.logsumexp(-1) if self.ids is None else None,
            ids=self.ids,
            values=None if self.ids is None else values,
        )

    def packed(self):
        """vLLM's rows: logits divided by the temperature, input tokens, positions, starts, slots."""
        rows, tokens, pos, starts, slots = [], [], [], [0], []
        for request, (slot, temperature, _, anchor, offered) in enumerate(self.requests):
            rows.append(self.logits[request, : offered + 1] / (temperature or 1.0))
            tokens += [0, *self.drafts[slot, :offered].tolist()]
            pos += range(anchor, anchor + offered + 1)
            starts.append(starts[-1] + offered + 1)
            slots.append(slot)
        return (
            torch.cat(rows),
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(pos),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(slots, dtype=torch.int32),
        )

    def by_definition(self):
        """Tokens [R, K + 1] of `dspark.sampling.rejection_sample`."""
        slots = [slot for slot, *_ in self.requests]
        sampling = SamplingTensors.stack([SamplingParams(temperature=t) for _, t, *_ in self.requests])
        probs = to_distribution(self.logits, sampling)
        drafts, q = self.drafts[slots], self.q[slots]
        proposal = DenseProposal(drafts, q) if self.ids is None else SparseProposal(drafts, self.ids[slots], q)
        offered = torch.tensor([count for *_, count in self.requests])
        positions = torch.tensor([anchor + 1 for _, _, _, anchor, _ in self.requests])
        return rejection_sample(proposal, probs, Streams(self.seeds[slots]), positions, offered).tokens

    def sampler(self):
        states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=self.temperature), seeds=SimpleNamespace(gpu=self.seeds)
        )
        return SimpleNamespace(sampling_states=states, apply_sampling_params=lambda logits, *rest: logits)


@pytest.mark.parametrize("topk", [None, 16], ids=["dense", "sparse"])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_librarys(seed, topk):
    case = Case(seed, topk)
    logits, tokens, pos, starts, slots = case.packed()
    verifier = Verifier(case.store, case.sampler(), STEPS)
    emitted, counts = verifier.verify(logits, tokens, tokens, pos=pos, row_starts=starts, slots=slots)
    expected = case.by_definition()
    assert emitted.tolist() == expected.tolist()
    assert counts.tolist() == (expected >= 0).sum(-1).tolist()


def test_a_plain_step_is_the_last_row_of_a_speculative_one():
    """Whether a request is sampled by vLLM's plain sampler or verified without drafts depends on its neighbours."""
    case = Case(3, requests=[(slot, t, key, anchor, 0) for slot, t, key, anchor, _ in REQUESTS])
    logits, tokens, pos, starts, slots = case.packed()
    verifier = Verifier(case.store, case.sampler(), STEPS)
    emitted, counts = verifier.verify(logits, tokens, tokens, pos=pos, row_starts=starts, slots=slots)
    plain = verifier._run(logits, tokens, pos, starts, slots, 0).tokens[:, 0]
    assert counts.tolist() == [1] * len(REQUESTS)
    assert emitted[:, 0].tolist() == plain.tolist()


def test_a_placeholder_ends_the_drafts():
    case = Case(1)
    logits, tokens, pos, starts, slots = case.packed()
    tokens[1:4] = -1  # the first request's drafts, as vLLM marks those within a prompt
    verifier = Verifier(case.store, case.sampler(), STEPS)
    emitted, counts = verifier.verify(logits, tokens, tokens, pos=pos, row_starts=starts, slots=slots)
    plain = verifier._run(logits[:1], tokens[:1], pos[:1], starts[:1].new_tensor([0, 1]), slots[:1], 0)
    assert counts[0] == 1
    assert emitted[0, 0] == plain.tokens[0, 0]


def test_a_forbidden_draft_has_the_law_of_the_masked_target():
    """Half of the tokens are forbidden, drafts are not told; 20000 seeds, false alarm 1 in 10000."""
    generator = torch.Generator().manual_seed(0)
    num_seeds, vocab = 20000, 6
    q = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    target = torch.randn(vocab, generator=generator)
    allowed = torch.tensor([True, False, True, True, False, True])
    row = target.masked_fill(~allowed, float("-inf"))
    drafts = torch.multinomial(q.expand(num_seeds, vocab), 1, generator=generator)[:, 0]
    logits = torch.stack([row, target]).repeat(num_seeds, 1)
    tokens = torch.stack([torch.zeros_like(drafts), drafts], 1).flatten()
    valid = torch.where(allowed[drafts], drafts, -1)
    valid_tokens = torch.stack([torch.zeros_like(drafts), valid], 1).flatten()
    store = SimpleNamespace(
        logits=q.log().expand(num_seeds, 1, vocab).contiguous(),
        logsumexp=torch.zeros(num_seeds, 1),
        ids=None,
        values=None,
    )
    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.ones(num_seeds)), seeds=SimpleNamespace(gpu=torch.arange(num_seeds))
    )
    verifier = Verifier(store, SimpleNamespace(sampling_states=states), 1)
    emitted, _ = verifier.verify(
        logits,
        tokens,
        valid_tokens,
        pos=torch.tensor([7, 8]).repeat(num_seeds),
        row_starts=torch.arange(0, 2 * num_seeds + 1, 2),
        slots=torch.arange(num_seeds),
    )
    counts = np.bincount(emitted[:, 0].numpy(), minlength=vocab)
    expected = row.double().softmax(-1).numpy() * num_seeds
    assert counts[~allowed.numpy()].sum() == 0
    assert chisquare(counts[allowed.numpy()], expected[allowed.numpy()]).pvalue > 1e-4


def test_only_forbidden_drafts_lose_their_probability():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    forbid_drafts(logits, torch.tensor([0, 3, 5, 7]), torch.tensor([0, 3, -1, -1]))
    changed = (logits != before).nonzero().tolist()
    assert changed == [[1, 5], [2, 7]]
    assert logits[1, 5] == logits[2, 7] == float("-inf")


def test_vllms_sampler_is_kept_where_ours_does_not_verify(monkeypatch):
    made = []
    monkeypatch.setattr(v2, "Verification", lambda *args, **options: made.append("ours"))
    speculative = SimpleNamespace()
    vllms_own = lambda *args, **options: made.append("vllm")  # noqa: E731
    v2.make_rejection_sampler(vllms_own, None, speculative, None)
    for verification in ("vllm", "kernels"):
        plan = SimpleNamespace(verification=verification)
        holder = SimpleNamespace(plan=plan)
        monkeypatch.setattr(v2, "_speculators", {id(speculative): holder})
        v2.make_rejection_sampler(vllms_own, None, speculative, None)
    assert made == ["vllm", "vllm", "ours"]
