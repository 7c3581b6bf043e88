"""What happened: one record a step, one a request. All metrics are computed from these."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class StepRecord:
    """One verification step of one request.

    Attributes:
        position: absolute position of the anchor.
        num_offered: drafts really verified, 0..K. Where a stop token ends the request inside the block, the drafts
            after it were not judged and do not count.
        num_accepted: drafts kept, 0..num_offered.
        num_committed: tokens that reached the request: num_accepted + 1, or less where a stop or the length limit cut
            the step.
        accept_probs: per offered draft, the probability that it would be accepted before it was drawn, sum over v of
            min(p, q) = 1 - TV.
        confidence: per offered draft, the drafter's own estimate of the same given all before were accepted; empty
            without a confidence head.
        finish_reason: set on the request's last step.
    """

    position: int
    num_offered: int
    num_accepted: int
    num_committed: int
    accept_probs: tuple[float, ...] = ()
    confidence: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass
class Generation:
    """One request's result. `token_ids` ends with the stop token if one was emitted; the first token comes from
    prefill and belongs to no step.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
