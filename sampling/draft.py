"""Drawing draft tokens, and handing on what they were drawn from.

The caller passes the logits of one position, Markov bias included. The distribution returned is the very tensor the
token was drawn from, so that no later step can recompute it differently.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from dspark.sampling.params import SamplingTensors, Softening, widened
from dspark.sampling.proposal import Proposal, make_proposal
from dspark.sampling.streams import GROUP, Purpose, Streams, draw_in_groups

Drafting = Literal["greedy", "probabilistic"]


def draft_token(
    logits: torch.Tensor,
    params: SamplingTensors,
    streams: Streams,
    positions: torch.Tensor,
    drafting: Drafting = "probabilistic",
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft the token of one position for every request.

    Args:
        logits: [B, D] of the draft vocabulary.
        params: one row per request; what the draft is to apply of the request's parameters.
        streams: the requests' random numbers.
        positions: [B] int64, by which the draft looks up its noise: its absolute position, or another number of its
            own.
        drafting: "greedy" takes the largest logit whatever the temperature; "probabilistic" draws.
        ids: [D] int64, target id of each column; None if column v is token v.

    Returns:
        Tokens [B] int64, target ids. q [B, D] as drawn from; None if q is one-hot in every row, because drafting is
        greedy or all temperatures are 0.

    Raises:
        ValueError: `drafting` is unknown; logits and params as in `to_distribution`; the requests of `positions` are
            others.
    """
    block = BlockDraws(params, streams, positions[:, None], drafting, ids)
    token = block.draw(0, logits)
    block.check()
    return token, block.probs[0] if block.probs else None


@dataclass
class BlockDraws:
    """The draws of a block, position after position. What they have in common is computed once, and but for top-p
    nothing waits for the device before `check`. Arguments as in `draft_token`, but positions [B, K], of all drafts.
    """

    params: SamplingTensors
    streams: Streams
    positions: torch.Tensor
    drafting: Drafting = "probabilistic"
    ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.drafting not in get_args(Drafting):
            raise ValueError(f"drafting must be one of {', '.join(get_args(Drafting))}; got {self.drafting!r}")
        self.one_hot = self.drafting == "greedy" or self.params.all_greedy
        self.tokens: list[torch.Tensor] = []
        self.probs: list[torch.Tensor] = []

    def draw(self, i: int, logits: torch.Tensor) -> torch.Tensor:
        """Token [B] of draft i, a target id, from logits [B, D]; i counts from 0."""
        if self.one_hot:
            column = logits.argmax(-1)
        else:
            logits = widened(logits)
            if i == 0:
                at, width, dtype = (self.positions, Purpose.DRAFT), logits.shape[-1], logits.dtype
                self.soften = Softening(self.params, width, dtype, len(logits))
                self.noise = self.streams.exponential_of_groups(*at, -(-width // GROUP), dtype).unbind(1)
                self.uniform = self.streams.uniform(*at).unbind(1)
            self.probs.append(self.soften(logits))
            column = draw_in_groups(self.probs[i], self.noise[i], self.uniform[i])
        self.tokens.append(column if self.ids is None else self.ids[column])
        return self.tokens[i]

    def check(self) -> None:
        """Refuse what was drawn if it came from logits that `to_distribution` refuses (ValueError)."""
        if self.probs:
            self.soften.check()

    def proposal(self) -> Proposal:
        """The tokens drawn so far, and what from; refuses as `check` does."""
        self.check()
        return make_proposal(torch.stack(self.tokens, 1), self.probs or [None] * len(self.tokens), self.ids)
