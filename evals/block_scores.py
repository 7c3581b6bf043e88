"""Scoring a drafter at every position of a target's text, without generating: `score_paths`.

A block is drafted behind every token of a path x, the target's own continuation, with the very modules that generation
uses. Two walks of its chain:

    along the path   the Markov head sees the path's tokens. Gives, for draft i (1 <= i <= K) of the block at anchor t,
                         accept_i   chance that the draft was accepted, given that all before it were and that x is
                                    what came out: min(1, q_i(x_i) / p_i(x_i))
                         overlap_i  the same before it is known what came out: sum_v min(p_i, q_i) = 1 - TV
                         cross entropy of x_i under q_i, agreement of the two most likely tokens, confidence
    rejected         one block of the drafter's own samples, for the confidences that accompany rejected drafts: its
                     first rejection r is drawn with the chances that the first walk gave, draft r from the law of
                     rejected drafts, max(q_r - p_r, 0) normalised, and those behind it from q

Why accept_i. A step emits x_i by acceptance with probability q_i(x_i) min(1, p_i(x_i) / q_i(x_i)), the smaller of
p_i(x_i) and q_i(x_i), and by recovery with the rest of p_i(x_i): given the emitted token, the ratio is the chance that
it was accepted. Acceptance of draft i uses no random number of the drafts before it, so given the path the chances
multiply. And which draft was rejected is independent of what replaced it, P(draft_r = y rejected, x_r emitted) =
max(q_r - p_r, 0)(y) * max(p_r - q_r, 0)(x_r) / TV. Averaged over paths x ~ p this is the law of generation, whose
output is distributed as p. At temperature 0, and for drafts that are not drawn but the argmax, q or p is one-hot and
the same formulas hold.

Source: Leviathan et al. 2023, arXiv:2211.17192, section 2.3 and appendix A.1 (the law of a step), conditioned on what
it emits. Read next: `dspark.evals.quality_figures`. Two commands that run it:

    dspark quality --dataset default --temperature 1
    dspark quality TARGET DRAFTER --dataset FILE.jsonl --out quality/
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F

from dspark.drafter import Drafter, variant
from dspark.evals.target_states import StateStore, TargetPath
from dspark.evals.text_groups import ScoringRule, TextGroup, budget_bytes, budget_rows, context_at, group_paths
from dspark.sampling import to_distribution
from dspark.target import HFTarget

MAX_CHUNK = 2048


@dataclass(frozen=True)
class AnchorScores:
    """Every anchor of every path, in order; N anchors, K drafts.

    `request` [N]: index into the paths. `left` [N]: tokens of the path behind the anchor, so that draft i is on the
    path if i < left. `room` [N]: drafts that length and position limits let a step offer. `accept`, `overlap`,
    `cross_entropy`, `top1`, `in_vocabulary` [N, K]: see the module, 0 off the path; `cross_entropy` is of the softmax
    at the temperature (1 where that is 0), before truncation, and `in_vocabulary` says where the drafter's vocabulary
    has the token, without which it is 0. `confidence` [N, K]: conditional, along the path; NaN without a head.
    `rejected_at` [N]: draft that the second walk rejected, from 0; K where it was not run, because no head or no
    rejection is possible. `rejected_survival` [N, K]: product of the confidences of that block up to each draft.
    `num_rescored`: tokens of the paths to which the states give no probability (at temperature 0: not the largest),
    which only rounding explains.
    """

    request: np.ndarray
    left: np.ndarray
    room: np.ndarray
    accept: np.ndarray
    overlap: np.ndarray
    cross_entropy: np.ndarray
    top1: np.ndarray
    in_vocabulary: np.ndarray
    confidence: np.ndarray
    rejected_at: np.ndarray
    rejected_survival: np.ndarray
    num_rescored: int


def without_markov(drafter: Drafter) -> Drafter:
    """The same weights with the Markov head off, and the confidence head with it, which may read the Markov head's
    embedding.
    """
    return variant(drafter, markov_head=None, confidence_head=None)


@torch.inference_mode()
def score_paths(
    target: HFTarget,
    drafter: Drafter,
    store: StateStore,
    paths: Sequence[TargetPath],
    rule: ScoringRule,
    on_scored: Callable[[int], None] | None = None,
) -> AnchorScores:
    """Score a drafter at every anchor of every path, or at those that the rule chooses.

    Args:
        target: for its output head and vocabulary; no pass is run.
        drafter: loaded for this target.
        store: states of all paths with the drafter's taps.
        paths: requests with their continuations; those of one token have no anchor.
        rule: sampling, drafting and K.
        on_scored: called with a number of anchors as they are done.

    Returns:
        The scores, the same for every grouping of the work up to rounding, and for every call.
    """
    none, wide = np.zeros(0, dtype=np.int64), np.zeros((0, rule.num_draft_tokens))
    parts = [AnchorScores(none, none, none, wide, wide, wide, wide, wide, wide, none, wide, 0)]
    scored = [(request, path) for request, path in enumerate(paths) if len(rule.anchors_of(path))]
    for group in group_paths(scored, budget_rows(target, 3)):
        texts = TextGroup(target, drafter, store, [path for _, path in group], rule)
        rows = budget_rows(target, 6 + rule.num_draft_tokens)
        for chunk in texts.anchors.split(max(min(MAX_CHUNK, rows, texts.anchors_in(budget_bytes(target))), 1)):
            parts.append(_score_chunk(drafter, texts, chunk, rule, [request for request, _ in group]))
            if on_scored is not None:
                on_scored(len(chunk))
    names = [field.name for field in fields(AnchorScores) if field.name != "num_rescored"]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return AnchorScores(**arrays, num_rescored=sum(part.num_rescored for part in parts))


class _Judge:
    """The two walks over a chunk of A anchors; each `pick_*` is called by `Drafter.chain` position by position."""

    def __init__(self, texts: TextGroup, anchors: torch.Tensor, rule: ScoringRule) -> None:
        device = texts.tokens.device
        self.texts, self.rule = texts, rule
        self.rows, self.offsets = anchors.to(device).unbind(1)
        self.left = torch.tensor([texts.paths[row].num_anchors - t for row, t in anchors.tolist()], device=device)
        self.columns: dict[str, list[torch.Tensor]] = {
            name: [] for name in ("accept", "overlap", "cross_entropy", "top1", "in_vocabulary")
        }
        self.rejected_at = torch.zeros(0)

    def path_token(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token [A] of the path where draft i stands, and the row of `texts.probs` that it was drawn from; off the
        path, those of its last token.
        """
        offset = self.offsets + torch.minimum(torch.full_like(self.left, i), self.left - 1)
        return self.texts.tokens[self.rows, offset + 1], offset

    def draft_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """q [A, D], where it is not one-hot."""
        return to_distribution(logits[None], self.rule.draft_params)[0]  # one request: they share their parameters

    def visible(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [A, D] of ids that the target has."""
        return logits if self.texts.ids is not None else logits[:, : self.texts.vocab_size]

    def target_ids(self, column: torch.Tensor) -> torch.Tensor:
        """Target ids of columns of the drafter's vocabulary."""
        return column if self.texts.ids is None else self.texts.ids[column]

    def pick_path(self, i: int, logits: torch.Tensor) -> torch.Tensor:
        """Score draft i along the path; the path's token."""
        logits = self.visible(logits)
        token, offset = self.path_token(i)
        column = token if self.texts.column is None else self.texts.column[token]
        known, column = column >= 0, column.clamp_min(0)[:, None]
        likeliest = self.target_ids(logits.argmax(-1))
        on_path = i < self.left
        p = None if self.texts.probs is None else self.texts.probs[self.rows, offset]
        if p is None:
            accept = overlap = (likeliest == token).to(logits.dtype)
        else:
            p_token = p.gather(-1, token[:, None])[:, 0]
            if self.rule.one_hot_drafts:
                q_token = (likeliest == token).to(p.dtype)
                overlap = p.gather(-1, likeliest[:, None])[:, 0]
            else:
                q = self.draft_probs(logits)
                q_token = torch.where(known, q.gather(-1, column)[:, 0], 0.0)
                overlap = torch.minimum(p if self.texts.ids is None else p[:, self.texts.ids], q).sum(-1)
            # A token without probability was emitted all the same (rounding): the limit of small p is taken.
            ratio = torch.where(p_token > 0, q_token / p_token, (q_token > 0).to(q_token.dtype))
            accept = ratio.clamp_max(1.0)
        scaled = logits / (1.0 if self.rule.greedy else self.rule.params.temperature)
        entropy = scaled.logsumexp(-1) - scaled.gather(-1, column)[:, 0]
        agrees = likeliest == self.texts.likeliest[self.rows, offset]
        for name, value, where in (
            ("accept", accept, on_path),
            ("overlap", overlap, on_path),
            ("cross_entropy", entropy, on_path & known),
            ("top1", agrees.to(logits.dtype), on_path),
            ("in_vocabulary", known.to(logits.dtype), on_path),
        ):
            self.columns[name].append(torch.where(where, value, 0.0))
        return token

    def draw_rejections(self, room: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """First rejected draft of every anchor, given that one is.

        Args:
            room: [A] int64, drafts that a step may offer.
            uniform: [A] float64 in [0, 1).

        Returns:
            [A] int64 in 0..K; K where no draft can be rejected.
        """
        accept = torch.stack(self.columns["accept"], dim=1).double()
        num_draft_tokens = accept.shape[1]
        slot = torch.arange(num_draft_tokens, device=accept.device)
        judged = slot < torch.minimum(self.left, room)[:, None]
        survival = accept.cumprod(-1)
        lost = F.pad(survival, (1, 0), value=1.0)[:, :-1] - survival
        chances = torch.where(judged, lost, 0.0).cumsum(-1)
        total = chances[:, -1:]
        drawn = torch.searchsorted(chances, uniform[:, None] * total, right=True)[:, 0]
        return torch.where(total[:, 0] > 0, drawn.clamp_max(num_draft_tokens - 1), num_draft_tokens)

    def pick_rejected(self, i: int, logits: torch.Tensor) -> torch.Tensor:
        """Draft i of the second walk: the path before the rejection, from there on the drafter's own samples."""
        token, offset = self.path_token(i)
        own = self.rejected_at <= i
        if i == self.rule.num_draft_tokens - 1 or not own.any():
            return token  # nothing is conditioned on the last draft
        logits = self.visible(logits[own])
        if self.rule.one_hot_drafts:
            column = logits.argmax(-1)
        else:
            mass = self.draft_probs(logits)
            rejected = self.rejected_at[own] == i
            if rejected.any() and self.texts.probs is not None:
                p = self.texts.probs[self.rows[own][rejected], offset[own][rejected]]
                surplus = (mass[rejected] - (p if self.texts.ids is None else p[:, self.texts.ids])).clamp_min_(0)
                # Nothing left is possible by rounding alone: q then equals p, and is the law of any draft.
                mass[rejected] = torch.where(surplus.sum(-1, keepdim=True) > 0, surplus, mass[rejected])
            uniform = self.texts.uniform[self.rows[own], self.offsets[own], i + 1]
            column = _draw(mass, uniform)
        token = token.clone()
        token[own] = self.target_ids(column)
        return token


def _draw(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Columns [n] drawn in proportion to mass [n, D] by inverting its sum, which costs less than noise per column."""
    total = mass.cumsum(-1)
    threshold = uniform[:, None].to(total.dtype) * total[:, -1:]
    return torch.searchsorted(total, threshold, right=True)[:, 0].clamp_max(mass.shape[-1] - 1)


def _score_chunk(
    drafter: Drafter, texts: TextGroup, anchors: torch.Tensor, rule: ScoringRule, requests: Sequence[int]
) -> AnchorScores:
    """Both walks over anchors [A, 2]."""
    judge = _Judge(texts, anchors, rule)
    num_draft_tokens = rule.num_draft_tokens
    rows, offsets = anchors.T.tolist()
    starts = [len(texts.paths[row].prompt_ids) + t for row, t in zip(rows, offsets, strict=True)]
    allowed = [texts.paths[row].max_new_tokens - t - 2 for row, t in zip(rows, offsets, strict=True)]
    last = drafter.config.max_position_embeddings - drafter.config.block_size
    room = [max(left, 0) if start <= last else 0 for start, left in zip(starts, allowed, strict=True)]
    limits = torch.tensor(room, device=judge.left.device)
    anchor_tokens = texts.tokens[judge.rows, judge.offsets]
    hidden = drafter.block_hidden(context_at(texts.context, judge.rows, starts), anchor_tokens)
    confidence = drafter.chain(hidden, anchor_tokens, num_draft_tokens, judge.pick_path)
    along = torch.full((len(anchors), num_draft_tokens), float("nan"))
    rejected_at, rejected = torch.full((len(anchors),), num_draft_tokens), along
    if confidence is not None:
        along = confidence.sigmoid()
        judge.rejected_at = judge.draw_rejections(limits, texts.uniform[judge.rows, judge.offsets, 0])
        rejected_at = judge.rejected_at
        own = drafter.chain(hidden, anchor_tokens, num_draft_tokens, judge.pick_rejected)
        assert own is not None, "the confidence head was there a moment ago"
        rejected = own.sigmoid().cumprod(-1)
    return AnchorScores(
        request=np.array([requests[row] for row in rows]),
        left=_numpy(judge.left),
        room=np.array(room),
        confidence=_numpy(along),
        rejected_at=_numpy(rejected_at),
        rejected_survival=_numpy(rejected),
        num_rescored=texts.num_rescored(judge.rows, judge.offsets),
        **{name: _numpy(torch.stack(values, dim=1)) for name, values in judge.columns.items()},
    )


def _numpy(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.float64 if values.is_floating_point() else torch.int64).cpu().numpy()
