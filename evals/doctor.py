"""Find the faults of a checkpoint that nothing fails on: `diagnose`, behind `dspark doctor`.

    inspect        what loading refuses: names, shapes, tables, non-finite values
    weights        all zero, or an own matrix that has nothing to do with the target's
    readings       does the checkpoint draft better when it is read otherwise than it says?

A reading's score is the expected number of accepted drafts of a block behind the tokens of a text that the target
itself wrote, sum over k of the product of (1 - TV) up to draft k at temperature 1, as `dspark quality` scores it
(`dspark.evals.block_scores`). Readings are compared on the same anchors, so that what a text makes easy or hard for all
of them cancels; the interval of a difference is a bootstrap over requests. A reading counts as better if the whole
interval lies above 0 and the gain is at least `LEAST_GAIN` of the score. If one is, the search goes on from it, since a
checkpoint may have two faults.

Two commands:

    dspark doctor
    dspark doctor TARGET DRAFTER --prompts 24
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dspark.drafter import Drafter, variant
from dspark.evals.block_scores import score_paths
from dspark.evals.readings import Reading, alternatives, tap_ids_tried
from dspark.evals.report import number
from dspark.evals.stats import Bootstrap, Estimate
from dspark.evals.target_states import HIDDEN, StateStore, TargetPath, compute_states, target_logits
from dspark.evals.text_groups import ScoringRule
from dspark.loop import generate
from dspark.sampling import SamplingParams
from dspark.target import HFTarget
from dspark.terminal import align, count

MAX_FAULTS = 3
LEAST_GAIN = 0.05
LEAST_LOSS = 1e-4  # drafts; differences below it are rounding
# Readings that score less than this share of the best one on a few anchors are not scored on the rest.
SCREEN_SHARE = 0.8
SCREEN_ANCHORS = 2  # of each text
VERDICTS = {
    "declared": "the declared one is better",
    "open": "no difference can be seen",
    "wrong": "better than declared (all faults together)",
}
ALIKE = 0.5  # mean cosine of an own matrix's rows with the target's, below which they are strangers


@dataclass(frozen=True)
class DoctorSettings:
    """How much text to judge on.

    `prompts`: requests. `new_tokens`: length of each continuation. `anchors`: blocks drafted in each. `seed`: of the
    continuations.

    Raises:
        ValueError: fewer than two prompts, from which no spread can be seen, or another count below its minimum.
    """

    prompts: int = 12
    new_tokens: int = 24
    anchors: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompts", 2), ("new_tokens", 4), ("anchors", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True)
class TopicFinding:
    """The best alternative of one topic against the reading that was kept.

    `difference` is alternative minus kept, in accepted drafts per block. `verdict`: "declared" (the alternative is
    worse for certain), "open" (no difference can be seen), or "wrong" (the alternative is right; `remedy` says what to
    change).
    """

    topic: str
    alternative: str
    difference: Estimate
    verdict: str
    remedy: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `faults` are sentences with what to do, `remarks` worth knowing; no faults means healthy.

    `score` and `best_score`: accepted drafts per block of the declared reading and of the best one. `acceptance`: of
    each draft position under the best one, given the text before it.
    """

    faults: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    findings: tuple[TopicFinding, ...] = ()
    score: Estimate | None = None
    best_score: Estimate | None = None
    acceptance: tuple[float, ...] = ()
    num_anchors: int = 0
    num_readings: int = 0

    @property
    def healthy(self) -> bool:
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"healthy": self.healthy, **asdict(self)}


def diagnose(
    drafter: Drafter,
    target: HFTarget,
    raw: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    settings: DoctorSettings,
    report: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Examine a drafter that loads.

    Args:
        drafter: as it is declared.
        target: its target; taps are changed.
        raw: the checkpoint's config.json.
        prompts: token ids, `settings.prompts` of them.
        settings: how much text.
        report: called with lines of progress.
    """
    with TemporaryDirectory() as scratch:
        search = _Search(Path(scratch), target, drafter, prompts, settings, report)
        faults, remarks = check_weights(drafter, target)
        declared = search.score(drafter)
        if np.isnan(declared).any():
            return Diagnosis((*faults, "the drafter's logits are not finite on ordinary text: its weights are damaged"))
        kept, kept_scores, found, better = drafter, declared, [], []
        while True:
            search.report(f"readings beside {'the declared one' if not found else found[-1].value}")
            candidates = list(alternatives(kept, target, raw))
            scored = search.compare(kept_scores, candidates)
            best = max(scored, key=lambda pair: pair[1].mean(), default=None)
            if best is None or len(found) == MAX_FAULTS or not search.is_better(best[1], kept_scores):
                break
            found.append(best[0])
            better.append(search.describe(best, scored))
            kept, kept_scores = best[0].drafter, best[1]
        findings = search.findings(kept_scores, scored, found, declared)
        _, overlap = search.overlaps(kept, search.max_anchors)
        acceptance = overlap.mean(0)
        if search.knows_nothing(kept_scores):
            faults.append(
                f"under no reading does it draft better than the mere frequency of tokens ({acceptance[0]:.0%} of "
                "first drafts accepted): it was trained for another target, revision or tokenizer, or its weights are "
                "damaged"
            )
            remarks += [f"less bad all the same: {line}" for line in better]
        else:
            faults += better
        return Diagnosis(
            faults=tuple(faults),
            remarks=tuple(remarks),
            findings=tuple(findings),
            score=search.bootstrap.mean(declared),
            best_score=search.bootstrap.mean(kept_scores),
            acceptance=tuple(float(value) for value in acceptance),
            num_anchors=len(overlap),
            num_readings=search.num_readings,
        )


class _Search:
    """Scores of readings on one text of the target's own; `num_readings` counts them.

    Args:
        scratch: folder for the target's states.
        target: the target; its taps are changed.
        drafter: the declared reading.
        prompts: token ids that the target continues.
        settings: how much text.
        report: called with lines of progress.
    """

    def __init__(
        self,
        scratch: Path,
        target: HFTarget,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        settings: DoctorSettings,
        report: Callable[[str], None],
    ) -> None:
        config = drafter.config
        num_drafts = max(config.block_size - 1, 1)  # what both layouts have
        num_tokens = max(settings.new_tokens, num_drafts + 2)
        report(f"the target continues {len(prompts)} prompts by {num_tokens} tokens")
        params = [
            SamplingParams(seed=settings.seed + i, max_new_tokens=num_tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        texts = generate(target, None, prompts, params, max_batch_size=len(prompts))
        self.paths = [
            TargetPath(i, tuple(text.prompt_ids), tuple(text.token_ids), num_tokens) for i, text in enumerate(texts)
        ]
        self.target, self.report, self.store = target, report, StateStore(scratch, {})
        compute_states(target, self.store, self.paths, tap_ids_tried(config, target.num_layers, MAX_FAULTS), False)
        self.rule, self.max_anchors = ScoringRule(SamplingParams(), num_drafts), settings.anchors
        self.bootstrap, self.num_readings = Bootstrap(len(prompts)), 0

    def overlaps(self, drafter: Drafter, max_anchors: int) -> tuple[np.ndarray, np.ndarray]:
        """Requests [N] of the anchors, and [N, K] 1 - TV of each draft behind the text's tokens.

        Raises:
            ValueError: the drafter's logits are not finite.
        """
        bare = variant(drafter, confidence_head=None)  # confidences are not judged here
        rule = replace(self.rule, max_anchors=max_anchors)
        scores = score_paths(self.target, bare, self.store, self.paths, rule)
        return scores.request, scores.overlap

    def score(self, drafter: Drafter, max_anchors: int | None = None) -> np.ndarray:
        """[R] accepted drafts per block of each request, NaN where the logits are not finite; None: on all anchors."""
        self.num_readings += max_anchors is None
        try:
            request, overlap = self.overlaps(drafter, max_anchors or self.max_anchors)
        except ValueError:
            return np.full(len(self.paths), np.nan)
        sums = np.bincount(request, overlap.cumprod(axis=1).sum(1), len(self.paths))
        return sums / np.maximum(np.bincount(request, minlength=len(self.paths)), 1)

    @torch.inference_mode()
    def knows_nothing(self, scores: np.ndarray) -> bool:
        """Whether a reading is not certainly better than drafting by the frequency of tokens in these texts."""
        states = self.store.load([path.index for path in self.paths], [HIDDEN])
        laws = [target_logits(self.target, hidden.to(self.target.device)).float().softmax(-1) for (hidden,) in states]
        frequency = torch.cat(laws).mean(0)
        constant = []
        for law in laws:
            overlap = torch.minimum(law, frequency).sum(-1).double().cpu()
            constant.append(float(overlap.unfold(0, self.rule.num_draft_tokens, 1).cumprod(1).sum(1).mean()))
        low = self.bootstrap.mean(scores - np.array(constant)).low
        return low is None or low <= 0

    def compare(self, kept: np.ndarray, candidates: Sequence[Reading]) -> list[tuple[Reading, np.ndarray]]:
        """Candidates with their scores. Of each topic at least the best on a few anchors is scored on all; the others
        are if they come near it or near the reading kept.
        """
        few = min(SCREEN_ANCHORS, self.max_anchors)
        screened = [(reading, self.score(reading.drafter, few).mean()) for reading in candidates]
        screened = [(reading, value) for reading, value in screened if np.isfinite(value)]
        bar = SCREEN_SHARE * max([kept.mean(), *(value for _, value in screened)])
        chosen = {max(group, key=lambda pair: pair[1])[0].value for group in _by_topic(screened).values()}
        return [
            (reading, self.score(reading.drafter))
            for reading, value in screened
            if value >= bar or reading.value in chosen
        ]

    def is_better(self, scores: np.ndarray, kept: np.ndarray) -> bool:
        """Whether a reading beats the one kept: for certain, and by enough to matter."""
        difference = self.bootstrap.mean(scores - kept)
        assert difference.value is not None
        return (difference.low or 0.0) > 0 and difference.value > LEAST_GAIN * scores.mean()

    def describe(self, best: tuple[Reading, np.ndarray], scored: Sequence[tuple[Reading, np.ndarray]]) -> str:
        """What is better than the reading kept, with others of its topic that may be as good, and what to do."""
        reading, scores = best
        shared = reading.value.rsplit(" ", 1)[0] + " "
        alike = [
            other.value.removeprefix(shared)
            for other, theirs in scored
            if other.topic == reading.topic and other.value != reading.value and not self.is_better(scores, theirs)
        ]
        better = f"{reading.topic}: {reading.value} drafts better"
        if not alike:
            return f"{better}; {reading.remedy}"
        return (
            f"{better} (nothing in these texts tells it from {', '.join(alike)}); {reading.remedy}, or the one that "
            "training used if it is among them"
        )

    def findings(
        self,
        kept: np.ndarray,
        scored: Sequence[tuple[Reading, np.ndarray]],
        found: Sequence[Reading],
        declared: np.ndarray,
    ) -> list[TopicFinding]:
        """One line a topic: the wrong ones first, then the best alternative of each other topic."""
        gain = self.bootstrap.mean(kept - declared)
        lines = [TopicFinding(reading.topic, reading.value, gain, "wrong", reading.remedy) for reading in found]
        wrong = {reading.topic for reading in found}
        for topic, group in _by_topic(scored).items():
            reading, scores = max(group, key=lambda pair: pair[1].mean())
            difference = self.bootstrap.mean(scores - kept)
            if topic not in wrong:
                is_worse = difference.high is not None and difference.high < -LEAST_LOSS
                lines.append(TopicFinding(topic, reading.value, difference, "declared" if is_worse else "open"))
        return lines


def _by_topic(scored: Sequence[tuple[Reading, Any]]) -> dict[str, list[tuple[Reading, Any]]]:
    groups: dict[str, list[tuple[Reading, Any]]] = {}
    for reading, value in scored:
        groups.setdefault(reading.topic, []).append((reading, value))
    return groups


def check_weights(drafter: Drafter, target: HFTarget) -> tuple[list[str], list[str]]:
    """Faults and remarks that the weights alone show."""
    faults, remarks = [], []
    for name, weight in drafter.named_parameters():
        if weight.numel() and not weight.any() and not name.endswith(".bias"):
            faults.append(
                f"{name} {list(weight.shape)} is zero everywhere: it was never trained or not saved; fetch or export "
                "the checkpoint again"
            )
    pairs = {
        "embed_tokens.weight": (drafter.embed_tokens, target.input_embedding),
        "lm_head.weight": (drafter.lm_head, target.output_head),
    }
    for name, (own, theirs) in pairs.items():
        if own is None or own.weight.shape[1] != theirs.shape[1]:
            continue
        rows = min(len(own.weight), len(theirs))
        reduced = name == "lm_head.weight" and drafter.d2t is not None
        other = theirs.detach()[drafter.draft_ids()] if reduced else theirs.detach()[:rows]
        mine = own.weight if reduced else own.weight[:rows]
        if torch.equal(mine, other.to(mine)):
            size = f"{own.weight.nbytes / 1e6:.0f} MB"
            remarks.append(f"{name} is a copy of the target's: leaving it out would save {size}")
            continue
        alike = float(F.cosine_similarity(mine.float(), other.float(), dim=-1).mean())
        kind = "resembles" if alike >= ALIKE else "has little in common with"
        remarks.append(f"{name} is the checkpoint's own and {kind} the target's (mean cosine of the rows {alike:.2f})")
    return faults, remarks


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """For people: verdict, faults, then what was compared."""
    lines = ["healthy: the declared reading is the best of those tried" if diagnosis.healthy else "faults:"]
    lines += [f"  - {fault}" for fault in diagnosis.faults]
    if diagnosis.score is not None and diagnosis.best_score is not None:
        declared, best = (number(score, 3, interval=True) for score in (diagnosis.score, diagnosis.best_score))
        lines.append(
            f"accepted drafts per block behind the target's own text, {diagnosis.num_anchors} blocks: {declared} as "
            "declared" + ("" if declared == best else f", {best} read best")
        )
        shown = " ".join(f"{value:.2f}" for value in diagnosis.acceptance)
        drafts = count(len(diagnosis.acceptance), "draft")
        lines.append(f"acceptance by position (1 - TV; {drafts}, as many as a block has in either layout): {shown}")
    rows = [
        (found.topic, found.alternative, number(found.difference, 3, interval=True, sign="+"), VERDICTS[found.verdict])
        for found in diagnosis.findings
    ]
    if rows:
        lines.append(
            f"best alternative of each topic ({diagnosis.num_readings} readings scored), difference to the best:"
        )
        lines.append(align(rows, indent="  "))
    lines += [f"remark: {remark}" for remark in diagnosis.remarks]
    return "\n".join(lines)
