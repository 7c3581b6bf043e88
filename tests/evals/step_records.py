"""Step records for tests, and a drafter-and-target pair reduced to coin flips."""

import numpy as np

from dspark.records import StepRecord


def step(offered, accepted, committed=None, finish=None, accept_probs=(), confidence=()) -> StepRecord:
    """One step; commits accepted + 1 tokens unless told."""
    return StepRecord(
        position=10,
        num_offered=offered,
        num_accepted=accepted,
        num_committed=accepted + 1 if committed is None else committed,
        accept_probs=tuple(accept_probs),
        confidence=tuple(confidence),
        finish_reason=finish,
    )


def coin_steps(rng: np.random.Generator, num_steps: int, num_drafts: int, report=lambda c: c) -> list[StepRecord]:
    """Steps whose draft i is accepted with a probability c_i drawn at random; the head reports `report(c_i)`."""
    steps = []
    for _ in range(num_steps):
        chances = rng.uniform(0.3, 1.0, num_drafts)
        kept = rng.random(num_drafts) < chances
        accepted = num_drafts if kept.all() else int(np.argmin(kept))
        confidence = [report(float(c)) for c in chances]
        steps.append(step(num_drafts, accepted, accept_probs=chances.tolist(), confidence=confidence))
    return steps
