"""Figures of draft quality from anchor scores: what generation will show, computed instead of drawn.

Given a path x, a step at anchor t that may offer m drafts accepts exactly a of them with probability

    S_a - S_{a+1},   S_i = accept_1 ... accept_i,   S_0 = 1,   S_{m+1} = 0

and then stands at anchor t + a + 1 (`dspark.evals.block_scores` derives accept_i). So the anchors that generation
visits on its way along x are a Markov chain with known transitions, and v(t), the chance that t is visited, follows by
one sweep from v(0) = 1. With v every figure of `dspark.evals.acceptance` has its exact expectation given the path,
ends of requests included:

    steps                 sum_t v(t)
    tokens_per_step       tokens of the paths / steps, pooled over requests; this is 1 + sum_i unconditional_i, but for
                          steps that a stop or the length limit cuts
    unconditional_i       sum v S_i / sum v over the steps that offered draft i
    conditional_i         sum v S_i / sum v S_{i-1}
    one_minus_tv_i        sum v S_{i-1} overlap_i / sum v S_{i-1}; cross_entropy_i and top1_i likewise

These are *free-running*: draft i is weighed by the chance that generation comes to it, its prefix being the drafter's
own accepted samples. *Teacher-forced* figures weigh every anchor alike and give the drafter the path as its prefix,
whether or not it would have drafted that; they are what training sees, and where the two part, the drafter is good at
places that it does not reach. Averaged over paths that the target samples, free-running figures are those of
generation, whatever the temperature; the intervals say how much the choice of requests and paths matters.

Calibration likewise: a draft is scored with the confidences along the path and weight v S_i where its prefix is
accepted, and with those of a sampled rejected block otherwise.
Read next: `dspark.evals.quality`. Two commands that show these figures:

    dspark quality --dataset default
    dspark quality --dataset default --temperature 0 0.6 1 --num-draft-tokens 2 4 8
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from dspark.evals.block_scores import AnchorScores
from dspark.evals.calibration import Calibration, calibrate
from dspark.evals.stats import Bootstrap, Estimate, divide, sum_by


@dataclass(frozen=True)
class PositionQuality:
    """Free-running figures of draft position `position`, counted from 0, and teacher-forced ones beside them.

    `num_offered`, `num_reached` and `num_accepted` are expected numbers of steps. `confidence` is the mean of the
    head's conditional confidence where the position is reached. `teacher_forced_survival` is the mean of S_i over
    anchors; the other teacher-forced figures are plain means over the anchors whose path reaches the position.
    """

    position: int
    num_offered: float
    num_reached: float
    num_accepted: float
    unconditional: Estimate
    conditional: Estimate
    one_minus_tv: Estimate
    cross_entropy: Estimate
    top1: Estimate
    confidence: Estimate
    teacher_forced_survival: Estimate
    teacher_forced_one_minus_tv: Estimate
    teacher_forced_cross_entropy: Estimate
    teacher_forced_top1: Estimate


@dataclass(frozen=True)
class Quality:
    """All figures of one drafter on one data set, at one temperature and K.

    `tokens_per_step_macro` is the mean over requests of the expected ratio. `accepted_histogram[n]` is the expected
    number of steps with drafts that accept n of them. `teacher_forced_tokens_per_step` is 1 + the sum of teacher-forced
    survival. `in_vocabulary` is the share of path tokens that the drafter's vocabulary has; without them
    `cross_entropy` would be infinite, so they are left out of it. `num_rescored`: see `AnchorScores`.
    """

    num_requests: int
    num_anchors: int
    num_steps: float
    num_committed: int
    tokens_per_step: Estimate
    tokens_per_step_macro: Estimate
    acceptance_rate: Estimate
    positions: tuple[PositionQuality, ...]
    accepted_histogram: tuple[float, ...]
    teacher_forced_tokens_per_step: Estimate
    in_vocabulary: Estimate
    calibration: Calibration | None
    num_rescored: int


@dataclass(frozen=True)
class LoopLaw:
    """What generation does along the paths; N anchors, R requests, K drafts.

    `offered` [N]: drafts of a step there. `judged` [N]: those that lie on the path. `survival` [N, K+1]: S_i, 0 beyond
    the judged. `visits` [N]: v. `steps` [R]: expected steps. `inverse_steps` [R]: expectation of 1 / steps, 0 for a
    request without steps.
    """

    offered: np.ndarray
    judged: np.ndarray
    survival: np.ndarray
    visits: np.ndarray
    steps: np.ndarray
    inverse_steps: np.ndarray

    @property
    def slot(self) -> np.ndarray:
        """[K]: draft positions from 0."""
        return np.arange(self.survival.shape[1] - 1)

    @property
    def on_path(self) -> np.ndarray:
        """[N, K]: whether a draft is judged by the path."""
        return self.slot < self.judged[:, None]


def loop_law(scores: AnchorScores, num_requests: int, num_draft_tokens: int) -> LoopLaw:
    """Chances of every step along the paths with K = `num_draft_tokens`, at most the K that was scored."""
    offered = np.minimum(num_draft_tokens, scores.room)
    judged = np.minimum(offered, scores.left)
    accept = np.where(np.arange(num_draft_tokens) < judged[:, None], scores.accept[:, :num_draft_tokens], 0.0)
    survival = np.concatenate([np.ones((len(accept), 1)), accept.cumprod(axis=1)], axis=1)
    lengths = np.bincount(scores.request, minlength=num_requests)
    dense = np.zeros((num_requests, int(lengths.max(initial=0)), num_draft_tokens + 1))
    offset = np.arange(len(accept)) - (np.cumsum(lengths) - lengths)[scores.request]
    dense[scores.request, offset] = _moves(survival)
    visits, step_law = _walk(dense, lengths)
    counts = np.arange(step_law.shape[1])
    inverse = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)
    return LoopLaw(offered, judged, survival, visits[scores.request, offset], step_law @ counts, step_law @ inverse)


def _moves(survival: np.ndarray) -> np.ndarray:
    """[N, K+1]: chances to accept exactly a drafts, from those to accept at least a."""
    return survival - np.pad(survival[:, 1:], ((0, 0), (0, 1)))


def _walk(moves: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Visit chances and the law of the number of steps.

    Args:
        moves: [R, T, K+1], chance to go a + 1 anchors on.
        lengths: [R], anchors of each request; a walk that goes beyond them has ended.

    Returns:
        visits [R, T]; and [R, T+1], chance that the request takes n steps.
    """
    num_requests, num_anchors, width = moves.shape
    visits, step_law = np.zeros((num_requests, num_anchors)), np.zeros((num_requests, num_anchors + 1))
    blank = np.zeros_like(step_law)
    window = deque([blank.copy() for _ in range(width + 1)])  # by anchor from here on: chance to stand there after n
    window[0][:, 0] = 1.0
    for t in range(num_anchors + width):
        here = window.popleft()
        window.append(blank.copy())
        ended = t >= lengths
        step_law[ended] += here[ended]
        if t < num_anchors:
            here[ended] = 0.0
            visits[:, t] = here.sum(axis=1)
            here[:, 1:] = here[:, :-1].copy()  # one step more; none starts after as many steps as there are anchors
            here[:, 0] = 0.0
            for accepted in range(width):
                window[accepted] += moves[:, t, accepted, None] * here
    return visits, step_law


@dataclass(frozen=True)
class RequestSums:
    """Expected sums of each request, R requests: `steps` and `committed` [R]; the others [R, K] by draft position."""

    steps: np.ndarray
    committed: np.ndarray
    offered: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray


def request_sums(scores: AnchorScores, law: LoopLaw, num_requests: int) -> RequestSums:
    """What the records of generation are expected to sum to, by request.

    A step that ends the request inside its block counts the drafts up to the end only; a step that a rejection stops
    before that counts all it offered.
    """
    before_end = np.take_along_axis(law.survival, np.clip(scores.left - 1, 0, len(law.slot))[:, None], axis=1)
    cut_off = np.where(law.slot < law.offered[:, None], 1 - before_end, 0.0)
    chances = (np.where(law.on_path, 1.0, cut_off), law.on_path * law.survival[:, :-1], law.survival[:, 1:])
    return RequestSums(
        law.steps,
        np.bincount(scores.request, minlength=num_requests).astype(np.float64),
        *(_by_request(scores.request, law.visits[:, None] * chance, num_requests) for chance in chances),
    )


def _by_request(request: np.ndarray, values: np.ndarray, num_requests: int) -> np.ndarray:
    """Sums over anchors: values [N, m] -> [num_requests, m]."""
    return sum_by(request[:, None], np.arange(values.shape[1]), values, (num_requests, values.shape[1]))


def measure_quality(scores: AnchorScores, num_requests: int, num_draft_tokens: int, bootstrap: Bootstrap) -> Quality:
    """All figures for one K.

    Args:
        scores: of at least that many drafts.
        num_requests: R, requests without anchors included.
        num_draft_tokens: K.
        bootstrap: resamples over the R requests.
    """
    law = loop_law(scores, num_requests, num_draft_tokens)
    sums = request_sums(scores, law, num_requests)
    steps, committed = sums.steps[:, None], sums.committed[:, None]
    offered, accepted = sums.offered.sum(1, keepdims=True), sums.accepted.sum(1, keepdims=True)
    pooled = bootstrap.ratio(np.hstack([committed, accepted]), np.hstack([steps, offered]))
    macro = np.where(sums.steps > 0, sums.committed * law.inverse_steps, np.nan)
    known = _by_request(scores.request, scores.in_vocabulary[:, :1], num_requests)
    ends = law.visits[:, None] * _moves(law.survival)
    positions, forced_tokens = _positions(scores, law, sums, bootstrap)
    return Quality(
        num_requests=num_requests,
        num_anchors=len(scores.request),
        num_steps=float(sums.steps.sum()),
        num_committed=int(sums.committed.sum()),
        tokens_per_step=pooled[0],
        tokens_per_step_macro=bootstrap.mean(macro),
        acceptance_rate=pooled[1],
        positions=positions,
        accepted_histogram=tuple(ends[law.offered > 0].sum(0).tolist()),
        teacher_forced_tokens_per_step=forced_tokens,
        in_vocabulary=bootstrap.ratio(known, committed)[0],
        calibration=calibrate(prefix_outcomes(scores, law), bootstrap),
        num_rescored=scores.num_rescored,
    )


def _positions(
    scores: AnchorScores, law: LoopLaw, sums: RequestSums, bootstrap: Bootstrap
) -> tuple[tuple[PositionQuality, ...], Estimate]:
    """Figures of each position, and 1 + the sum of teacher-forced survival."""
    num_draft_tokens = len(law.slot)
    free = law.visits[:, None] * law.survival[:, :-1] * law.on_path
    forced = (law.slot < scores.left[:, None]).astype(np.float64)
    known, confidence = (values[:, :num_draft_tokens] for values in (scores.in_vocabulary, scores.confidence))
    survival = np.where(forced > 0, scores.accept[:, :num_draft_tokens], 0.0).cumprod(axis=1)

    def by_request(values: np.ndarray) -> np.ndarray:
        return _by_request(scores.request, values, bootstrap.num_requests)

    def mean(values: np.ndarray, weight: np.ndarray) -> list[Estimate]:
        weighted = np.where(weight > 0, weight * values[:, :num_draft_tokens], 0.0)
        return bootstrap.ratio(by_request(weighted), by_request(weight))

    figures = {
        "unconditional": bootstrap.ratio(sums.accepted, sums.offered),
        "conditional": bootstrap.ratio(sums.accepted, sums.reached),
        "one_minus_tv": mean(scores.overlap, free),
        "cross_entropy": mean(scores.cross_entropy, free * known),
        "top1": mean(scores.top1, free),
        "confidence": mean(scores.confidence, np.where(np.isnan(confidence), 0.0, free)),
        "teacher_forced_survival": mean(survival, forced),
        "teacher_forced_one_minus_tv": mean(scores.overlap, forced),
        "teacher_forced_cross_entropy": mean(scores.cross_entropy, forced * known),
        "teacher_forced_top1": mean(scores.top1, forced),
    }
    totals = np.stack([sums.offered.sum(0), sums.reached.sum(0), sums.accepted.sum(0)], axis=1).tolist()
    positions = tuple(
        PositionQuality(i, *totals[i], **{name: estimates[i] for name, estimates in figures.items()})
        for i in range(num_draft_tokens)
    )
    survived, count = by_request(survival), by_request(forced)
    tokens = bootstrap.estimates(lambda w: 1 + divide(w @ survived, w @ count).sum(1, keepdims=True))[0]
    return positions, tokens


def prefix_outcomes(scores: AnchorScores, law: LoopLaw) -> np.recarray:
    """Every draft once as accepted, with the confidences along the path, and once in the block that was rejected.

    The chance of a rejected prefix is estimated from the one rejection that was drawn (unbiased over the draws); that
    of an accepted one is exact.

    Returns:
        [n] rows of drafts that count: `request`, `position`; `survival`, product of the confidences of the block up to
        the draft, NaN without a head; `accepted`; `weight` > 0, expected number of times.
    """
    slot, num_draft_tokens = law.slot, len(law.slot)
    accepted = law.visits[:, None] * law.survival[:, 1:]
    # The block that was sampled was rejected somewhere among the drafts scored, which may be more than K.
    widest = np.minimum(scores.accept.shape[1], np.minimum(scores.room, scores.left))
    within = np.arange(scores.accept.shape[1]) < widest[:, None]
    rejected_somewhere = 1 - np.where(within, scores.accept, 1.0).prod(axis=1)
    at = scores.rejected_at[:, None]
    counts = (at <= slot) & (slot < law.offered[:, None]) & (law.on_path | (at < scores.left[:, None] - 1))
    rejected = (law.visits * rejected_somewhere)[:, None] * counts
    along = np.where(law.on_path, scores.confidence[:, :num_draft_tokens], 1.0).cumprod(axis=1)
    # The block along the path, then the rejected one: [2, N, K] each.
    survival = np.stack([along, scores.rejected_survival[:, :num_draft_tokens]])
    hit, weight = np.array([True, False])[:, None, None], np.stack([accepted, rejected])
    columns = np.broadcast_arrays(scores.request[:, None], slot, survival, hit, weight)
    names = ["request", "position", "survival", "accepted", "weight"]
    return np.rec.fromarrays([column.ravel() for column in columns], names=names)[weight.ravel() > 0]
