"""Drawing one draft token, and handing on what it was drawn from.

The caller passes the logits of one position, Markov bias included. The distribution returned is the very tensor the
token was drawn from, so that no later step can recompute it differently.
"""

from typing import Literal, get_args

import torch

from dspark.sampling.params import SamplingTensors, to_distribution
from dspark.sampling.streams import Purpose, Streams, sample_in_groups

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
        positions: [B] int64, absolute position of the drafted token.
        drafting: "greedy" takes the largest logit whatever the temperature; "probabilistic" draws.
        ids: [D] int64, target id of each column; None if column v is token v.

    Returns:
        Tokens [B] int64, target ids. q [B, D] as drawn from; None if q is one-hot in every row, because drafting is
        greedy or all temperatures are 0.

    Raises:
        ValueError: `drafting` is unknown; logits and params as in `to_distribution`.
    """
    if drafting not in get_args(Drafting):
        raise ValueError(f"drafting must be one of {', '.join(get_args(Drafting))}; got {drafting!r}")
    if drafting == "greedy" or params.all_greedy:
        column = logits.argmax(-1)
        return (column if ids is None else ids[column]), None
    probs = to_distribution(logits, params)
    column = sample_in_groups(probs[:, None], streams, positions[:, None], Purpose.DRAFT)[:, 0]
    return (column if ids is None else ids[column]), probs
