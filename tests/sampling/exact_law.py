"""The law that a drafted block emits, by enumeration: no sampling, the real proposals."""

import itertools
from collections.abc import Callable
from functools import cache

import torch

from dspark.sampling import Proposal, SamplingParams, to_distribution

# One position: p of the target, q of the drafter.
P = (0.45, 0.30, 0.15, 0.10, 0.0)
Q = (0.15, 0.10, 0.40, 0.15, 0.20)

# Six tokens, far enough apart that 20000 draws tell a biased sampler from an exact one.
P6 = (30, 25, 20, 15, 7, 3)
Q6 = (20, 24, 6, 25, 15, 10)

Prefix = tuple[int, ...]
Conditional = Callable[[Prefix], torch.Tensor]


def vector(*values: float) -> torch.Tensor:
    out = torch.tensor(values, dtype=torch.float64)
    return out / out.sum()


def logits_model(seed: int, vocab_size: int) -> Conditional:
    """A language model: for each prefix its own logits [V] float64."""

    def logits(prefix: Prefix) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + hash(prefix) % 1_000_003)
        return torch.randn(vocab_size, generator=generator, dtype=torch.float64) * 1.5

    return cache(logits)


def sampled(model: Conditional, params: SamplingParams) -> Conditional:
    """The distributions of a model under sampling parameters."""
    return cache(lambda prefix: to_distribution(model(prefix)[None], params)[0])


def one_step_law(proposal: Proposal, target_probs: torch.Tensor) -> torch.Tensor:
    """Emitted law [B, V] of the first position of each request, given its draft."""
    here = proposal.truncate(1)
    p = target_probs[:, :1]
    drafts = here.tokens[..., None]
    accept = (p.gather(-1, drafts)[..., 0] / here.prob()).clamp_max(1)
    law = (1 - accept)[..., None] * here.residual(p)
    return law.scatter_add(-1, drafts, accept[..., None].to(law.dtype))[:, 0]


def block_law(
    target: Conditional,
    draft: Conditional,
    propose: Callable[[Prefix], Proposal],
    num_draft_tokens: int,
    vocab_size: int,
) -> dict[Prefix, float]:
    """Law of the next K+1 tokens when a block of K drafts is verified and the rest is left to the target.

    `propose(path)` builds the proposal of one drafted path.
    """
    law: dict[Prefix, float] = {}
    length = num_draft_tokens + 1

    def finish(prefix: Prefix, weight: float) -> None:
        if weight == 0:
            return
        if len(prefix) == length:
            law[prefix] = law.get(prefix, 0.0) + weight
            return
        for token, probability in enumerate(target(prefix).tolist()):
            finish((*prefix, token), weight * probability)

    for path in itertools.product(range(vocab_size), repeat=num_draft_tokens):
        weight = 1.0
        for i, token in enumerate(path):
            weight *= float(draft(path[:i])[token])
        if weight == 0:
            continue
        proposal = propose(path)
        p = torch.stack([target(path[:i]) for i in range(num_draft_tokens)])[None]
        accept = (p.gather(-1, proposal.tokens[..., None])[0, :, 0] / proposal.prob()[0]).clamp_max(1).tolist()
        residual = proposal.residual(p)[0].tolist()
        for i in range(num_draft_tokens):
            for token, probability in enumerate(residual[i]):
                finish((*path[:i], token), weight * (1 - accept[i]) * probability)
            weight *= accept[i]
        finish(path, weight)
    return law


def target_law(target: Conditional, length: int, vocab_size: int) -> dict[Prefix, float]:
    """Law of the next tokens from the target alone."""
    law = {}
    for path in itertools.product(range(vocab_size), repeat=length):
        weight = 1.0
        for i, token in enumerate(path):
            weight *= float(target(path[:i])[token])
        law[path] = weight
    return law
