"""The law that scheduled steps emit, by enumeration: the real rules and proposals, no sampling."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dspark.sampling import DenseProposal

Prefix = tuple[int, ...]
Conditional = Callable[[Prefix], torch.Tensor]  # tokens so far -> [V] float64
Confidence = Callable[[int, Prefix], float]  # request, drafts so far -> confidence in the next draft
Rule = Callable[[np.ndarray, Sequence[int]], Sequence[int]]


def conditional(seed: int, vocab_size: int, spread: float = 1.0) -> Conditional:
    """A random model: its own distribution for every prefix."""

    def probs(prefix: Prefix) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 7919 * sum((t + 1) * 31**i for i, t in enumerate(prefix)))
        return (torch.randn(vocab_size, generator=generator, dtype=torch.float64) * spread).softmax(-1)

    return probs


def confidence_table(seed: int) -> Confidence:
    """Random confidences that depend on the whole prefix, spread over (0, 1)."""

    def value(request: int, prefix: Prefix) -> float:
        code = seed + 104_729 * request + 7919 * sum((t + 1) * 31**i for i, t in enumerate(prefix))
        return float(torch.rand((), generator=torch.Generator().manual_seed(code), dtype=torch.float64))

    return value


def path_law(target: Conditional, draft: Conditional, path: Prefix, length: int) -> torch.Tensor:
    """[V] * (K + 1) float64: law of the next K + 1 tokens where `path` was drafted and its first `length` drafts were
    verified; what the step does not emit is continued by the target.
    """
    num_drafts, vocab_size = len(path), len(target(()))
    law = torch.zeros((vocab_size,) * (num_drafts + 1), dtype=torch.float64)
    verified = path[:length]
    p = torch.stack([target(path[:i]) for i in range(num_drafts)])[None]
    q = torch.stack([draft(path[:i]) for i in range(num_drafts)])[None]
    proposal = DenseProposal(torch.tensor([path]), q)
    accept = (p[0].gather(-1, torch.tensor(path)[:, None])[:, 0] / proposal.prob()[0]).clamp_max(1)
    residual = proposal.residual(p)[0]
    weight = 1.0
    for i, token in enumerate(verified):
        add_continued(law, target, path[:i], (1 - accept[i]) * weight * residual[i])
        weight = weight * accept[i]
        assert token == path[i]
    add_continued(law, target, verified, weight * target(verified))
    return law


def add_continued(law: torch.Tensor, target: Conditional, prefix: Prefix, weights: torch.Tensor) -> None:
    """Add the law of `prefix`, a token of weight `weights` [V], and the target's continuation."""
    left = law.ndim - len(prefix) - 1
    for token, weight in enumerate(weights.tolist()):
        for rest in itertools.product(range(len(weights)), repeat=left):
            whole, probability = (*prefix, token), weight
            for next_token in rest:
                probability *= float(target(whole)[next_token])
                whole = (*whole, next_token)
            law[whole] += probability


def target_law(target: Conditional, num_tokens: int) -> torch.Tensor:
    """[V] * num_tokens: the target alone."""
    law = torch.zeros((len(target(())),) * num_tokens, dtype=torch.float64)
    add_continued(law, target, (), target(()))
    return law


def emitted_law(
    rule: Rule, targets: Sequence[Conditional], drafts: Sequence[Conditional], confidence: Confidence, num_drafts: int
) -> torch.Tensor:
    """Joint law of the next num_drafts + 1 tokens of every request, axes of request 0 first, after one scheduled step
    of all of them.
    """
    vocab_size = len(targets[0](()))
    paths = list(itertools.product(range(vocab_size), repeat=num_drafts))
    law: torch.Tensor | float = 0.0
    for drafted in itertools.product(paths, repeat=len(targets)):
        weight = 1.0
        for draft, path in zip(drafts, drafted, strict=True):
            for i, token in enumerate(path):
                weight *= float(draft(path[:i])[token])
        values = np.array([[confidence(r, path[:k]) for k in range(num_drafts)] for r, path in enumerate(drafted)])
        lengths = rule(values, [num_drafts] * len(targets))
        joint = torch.tensor(weight, dtype=torch.float64)
        for target, draft, path, length in zip(targets, drafts, drafted, lengths, strict=True):
            joint = torch.tensordot(joint, path_law(target, draft, path, int(length)), dims=0)
        law = law + joint
    return law
