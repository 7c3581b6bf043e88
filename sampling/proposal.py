"""Proposal distributions: what the draft tokens were drawn from, in three forms behind one interface.

With p the target's and q the draft's distribution at a position, verification needs q at the drafted token and the
residual max(p - q, 0) / sum(max(p - q, 0)). Both must come from the *same* q: the full q in one and a one-hot q in
the other is biased, although either rule alone is exact. That is why they are methods of one object.
Source: Leviathan et al. 2023, arXiv:2211.17192, section 2.3.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch


@dataclass(frozen=True)
class Proposal(ABC):
    """Draft tokens of a batch with their distributions; every tensor field is [B, K, ...].

    Attributes:
        tokens: [B, K] int64 target token ids. -1 marks a slot without a draft: there q is zero everywhere, and the
            residual is p.
    """

    tokens: torch.Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 [B, K], got {self.tokens.dtype} {tuple(self.tokens.shape)}")

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self.tokens.shape[1]

    @property
    def empty(self) -> torch.Tensor:
        """[B, K] bool: the slots without a draft."""
        return self.tokens < 0

    def prob(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """q of one token per slot.

        Args:
            tokens: [B, K] int64 target ids; the drafts themselves if None.

        Returns:
            [B, K]; 0 in a slot without a draft.
        """
        asked = self.tokens if tokens is None else tokens
        return self._prob(asked.clamp_min(0)).masked_fill(self.empty | (asked < 0), 0.0)

    def residual(self, target_probs: torch.Tensor) -> torch.Tensor:
        """What a rejected draft is replaced by a draw from.

        Args:
            target_probs: [B, K, V]; rows sum to 1.

        Returns:
            [B, K, V], max(p - q, 0) normalised; rows sum to 1. p itself where nothing of p exceeds q, because such a
            draft is never rejected, and in a slot without a draft.
        """
        surplus = torch.where(self.empty[..., None], target_probs, self._surplus(target_probs))
        mass = surplus.sum(-1, keepdim=True)
        return torch.where(mass > 0, surplus / mass, target_probs)

    def overlap(self, target_probs: torch.Tensor) -> torch.Tensor:
        """Expected acceptance of each slot, sum(min(p, q)) = 1 - TV(p, q).

        Args:
            target_probs: [B, K, V]; rows sum to 1.

        Returns:
            [B, K]; 0 in a slot without a draft.
        """
        return self._overlap(target_probs).masked_fill(self.empty, 0.0)

    def dense(self, vocab_size: int) -> torch.Tensor:
        """q over the whole vocabulary, [B, K, vocab_size]; zeros in a slot without a draft."""
        return self._dense(vocab_size).masked_fill(self.empty[..., None], 0.0)

    def rows(self, index: torch.Tensor) -> Self:
        """The requests that `index` selects: [n] int64 or a [B] bool mask."""
        return self._map(lambda field: field[index])

    def position(self, slot: torch.Tensor) -> Self:
        """One slot of every request, K = 1: slot [B] int64, each in 0..K-1."""
        request = torch.arange(len(slot), device=slot.device)
        return self._map(lambda field: field[request, slot][:, None])

    def truncate(self, num_draft_tokens: int) -> Self:
        """The first slots of every request."""
        return self._map(lambda field: field[:, :num_draft_tokens])

    def _map(self, select: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return type(self)(*(select(getattr(self, field.name)) for field in fields(self)))

    @abstractmethod
    def _prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """q [B, K] of tokens [B, K], all >= 0. Slots without a draft may hold anything."""

    @abstractmethod
    def _surplus(self, target_probs: torch.Tensor) -> torch.Tensor:
        """max(p - q, 0), [B, K, V]. Slots without a draft may hold anything."""

    @abstractmethod
    def _overlap(self, target_probs: torch.Tensor) -> torch.Tensor:
        """sum(min(p, q)), [B, K]. Slots without a draft may hold anything."""

    @abstractmethod
    def _dense(self, vocab_size: int) -> torch.Tensor:
        """q [B, K, vocab_size]. Slots without a draft may hold anything."""


@dataclass(frozen=True)
class OneHotProposal(Proposal):
    """Drafts that were not drawn: q is 1 at the draft. float32, and float64 wherever it meets a float64 p."""

    def _prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens == self.tokens).float()

    def _surplus(self, target_probs: torch.Tensor) -> torch.Tensor:
        return target_probs.scatter(-1, self.tokens.clamp_min(0)[..., None], 0.0)

    def _overlap(self, target_probs: torch.Tensor) -> torch.Tensor:
        return target_probs.gather(-1, self.tokens.clamp_min(0)[..., None])[..., 0]

    def _dense(self, vocab_size: int) -> torch.Tensor:
        zeros = torch.zeros(*self.tokens.shape, vocab_size, device=self.tokens.device)
        return zeros.scatter_(-1, self.tokens.clamp_min(0)[..., None], 1.0)


@dataclass(frozen=True)
class DenseProposal(Proposal):
    """q over the target's vocabulary.

    Attributes:
        probs: [B, K, V] float32 or float64; rows sum to 1, except in slots without a draft, where they are not read.

    Raises:
        ValueError: `probs` is not [B, K, V] for the B and K of `tokens`.
    """

    probs: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shape("probs", self.probs, self.tokens)

    def _prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.probs.gather(-1, tokens[..., None])[..., 0]

    def _surplus(self, target_probs: torch.Tensor) -> torch.Tensor:
        self._check_width(target_probs.shape[-1])
        return (target_probs - self.probs).clamp_min_(0)

    def _overlap(self, target_probs: torch.Tensor) -> torch.Tensor:
        self._check_width(target_probs.shape[-1])
        return torch.minimum(target_probs, self.probs.to(target_probs.dtype)).sum(-1)

    def _dense(self, vocab_size: int) -> torch.Tensor:
        self._check_width(vocab_size)
        return self.probs

    def _check_width(self, vocab_size: int) -> None:
        if self.probs.shape[-1] != vocab_size:
            raise ValueError(
                f"draft probs cover {self.probs.shape[-1]} tokens, the target {vocab_size}: one is padded, or"
                " the drafter has a reduced vocabulary; cut the padding, or give the target ids of the columns"
                " (SparseProposal)"
            )


@dataclass(frozen=True)
class SparseProposal(Proposal):
    """q over some target ids, zero elsewhere: a top-k list, or a reduced draft vocabulary with its ids expanded.

    Attributes:
        ids: [B, K, k] int64 target ids; those of positive probability are distinct within a slot.
        probs: [B, K, k]; rows sum to 1, except in slots without a draft, where they are not read.

    Raises:
        ValueError: `ids` and `probs` are not both [B, K, k] for the B and K of `tokens`.
    """

    ids: torch.Tensor
    probs: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_shape("probs", self.probs, self.tokens)
        if self.ids.shape != self.probs.shape or self.ids.dtype != torch.int64:
            raise ValueError(
                f"ids must be int64 with the shape of probs, {tuple(self.probs.shape)},"
                f" got {self.ids.dtype} {tuple(self.ids.shape)}"
            )

    def _prob(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.probs.masked_fill(self.ids != tokens[..., None], 0.0).sum(-1)

    def _surplus(self, target_probs: torch.Tensor) -> torch.Tensor:
        return target_probs.scatter_add(-1, self.ids, -self.probs.to(target_probs.dtype)).clamp_min_(0)

    def _overlap(self, target_probs: torch.Tensor) -> torch.Tensor:
        return torch.minimum(target_probs.gather(-1, self.ids), self.probs.to(target_probs.dtype)).sum(-1)

    def _dense(self, vocab_size: int) -> torch.Tensor:
        zeros = self.probs.new_zeros(*self.tokens.shape, vocab_size)
        return zeros.scatter_add_(-1, self.ids, self.probs)


def _check_shape(name: str, value: torch.Tensor, tokens: torch.Tensor) -> None:
    if value.ndim != 3 or value.shape[:2] != tokens.shape:
        batch, num_draft_tokens = tokens.shape
        raise ValueError(f"{name} must be [{batch}, {num_draft_tokens}, n] as tokens are, got {tuple(value.shape)}")


def make_proposal(
    tokens: torch.Tensor, draft_probs: Sequence[torch.Tensor | None], ids: torch.Tensor | None = None
) -> Proposal:
    """Put the positions of a block, as `draft_token` returned them, into one proposal.

    Args:
        tokens: [B, K] int64 target ids.
        draft_probs: K times what each token was drawn from, [B, D], or None where it is the argmax.
        ids: [D] int64, target id of each column; None if column v is token v.

    Returns:
        One-hot without draft_probs, sparse with `ids`, dense otherwise; the numbers of `draft_probs`, bit for bit.

    Raises:
        ValueError: the number of distributions is not K, or only some are None.
    """
    if len(draft_probs) != tokens.shape[1]:
        raise ValueError(
            f"draft_probs has {len(draft_probs)} positions, tokens has {tokens.shape[1]}:"
            " each draft needs its own distribution"
        )
    present = [probs for probs in draft_probs if probs is not None]
    if not present:
        return OneHotProposal(tokens)
    if len(present) < len(draft_probs):
        raise ValueError(
            f"draft_probs is None at {len(draft_probs) - len(present)} of {len(draft_probs)} positions:"
            " a block is drafted in one way"
        )
    probs = torch.stack(present, dim=1)
    if ids is None:
        return DenseProposal(tokens, probs)
    return SparseProposal(tokens, ids.expand_as(probs), probs)
