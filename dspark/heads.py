"""Markov heads and the confidence head.

A block is drafted in one pass, so its rows do not know each other's tokens. The Markov head repairs that: the logits
of row k get a low-rank bias computed from the token sampled just before it. The three kinds differ only in the
features that W2 projects:

    e = W1[prev]                                     prev is a target-vocabulary id
    vanilla   features = e
    gated     features = sigmoid(gate_proj([h ; e])) * e
    rnn       gate, candidate, out = joint_proj([state ; e ; h]) in thirds
              state = sigmoid(gate) * state + (1 - sigmoid(gate)) * tanh(candidate), zero before each block
              features = tanh(out)
    logits    = base + W2 features

Source: DeepSpec, modeling/dspark (note the concatenation orders).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dspark.confidence import scale_logits
from dspark.config import DrafterConfig


class MarkovHead(nn.Module):
    """The vanilla head, and what all kinds share: `markov_w1` [V, rank] and `markov_w2` [draft vocabulary, rank]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """State before the block's first row for hidden [..., H]: [..., rank] zeros (unused by memoryless kinds)."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step along the chain.

        Args:
            embedded: [..., rank], `markov_w1` row of the previous token.
            hidden: [..., H], the row's hidden state after the final norm.
            state: [..., rank].

        Returns:
            features [..., rank], to be projected by `markov_w2`; and the next state.
        """
        return embedded, state


class GatedMarkovHead(MarkovHead):
    """Features scaled by a gate that sees the hidden state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return gate * embedded, state


class RnnMarkovHead(MarkovHead):
    """Features from a small recurrence along the block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * state + (1 - kept) * torch.tanh(candidate)


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


class ConfidenceHead(nn.Module):
    """Logit that a draft token is accepted, given that all before it were; from the row's hidden state and, if
    trained so, `W1[prev]`.

    `forward` gives the head's own logits, as they were trained. What leaves the drafter goes through `calibrated`.
    """

    scaling: torch.Tensor | None  # [2, K] temperatures and offsets

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.register_buffer("scaling", None, persistent=False)  # no part of the checkpoint's tensors
        self.with_markov = config.confidence == "hidden+markov"
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits.

        Args:
            hidden: [..., H] after the final norm.
            embedded: [..., rank], the raw `markov_w1` row of the previous token; None if the head does not use it.

        Returns:
            [...] float32 (float64 for a float64 head): sigmoid of it is the probability.
        """
        return F.linear(*self._operands(hidden, embedded)).squeeze(-1)

    def of_block(self, hidden: Sequence[torch.Tensor], embedded: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, K]: `forward` of K rows, prepared at once but each multiplied alone: K changes no number."""
        tokens = torch.stack(list(embedded)) if embedded else None
        rows, *weights = self._operands(torch.stack(list(hidden)), tokens)
        return torch.stack([F.linear(row, *weights) for row in rows], dim=1).squeeze(-1)

    def _operands(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        features = torch.cat([hidden, embedded], dim=-1) if self.with_markov and embedded is not None else hidden
        dtype = torch.promote_types(features.dtype, torch.float32)
        return features.to(dtype), self.proj.weight.to(dtype), self.proj.bias.to(dtype)

    def calibrated(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of drafts 1..K of a block, [..., K], with the drafter's calibration if it has one."""
        return logits if self.scaling is None else scale_logits(logits, self.scaling)
