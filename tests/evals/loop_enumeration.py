"""The law of generation on a tiny pair by complete enumeration, for tests of figures that claim to be its expectation.

Every first token, every draft, every outcome of verification and every recovered token is followed with its
probability, by the rules of the loop (offers near the length limit, the cut at a stop) and of `dspark.evals.acceptance`
(what a step counts as offered). No path is assumed and nothing is conditioned on, so it shares no reasoning with the
figures that it checks.
"""

import itertools
from dataclasses import dataclass, field

import torch

from dspark.evals.acceptance import judged_counts
from dspark.records import StepRecord
from dspark.sampling import OneHotProposal, SamplingParams, SamplingTensors, make_proposal, to_distribution

Tokens = tuple[int, ...]


@dataclass
class LoopSums:
    """Expected sums over the steps of one request; the lists are by draft position. `outcomes` has the weight of every
    (position, prefix accepted, cumulative confidence)."""

    num_draft_tokens: int
    steps: float = 0.0
    committed: float = 0.0
    offered: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    outcomes: dict[tuple[int, bool, float], float] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("offered", "reached", "accepted", "overlap"):
            setattr(self, name, [0.0] * self.num_draft_tokens)

    def add(self, weight: float, step: StepRecord):
        offered, accepted = judged_counts(step)
        self.steps += weight
        self.committed += weight * step.num_committed
        survival = 1.0
        for i in range(offered):
            self.offered[i] += weight
            self.reached[i] += weight * (i <= accepted)
            self.accepted[i] += weight * (i < accepted)
            self.overlap[i] += weight * (i <= accepted) * step.accept_probs[i]
            if step.confidence:
                survival *= step.confidence[i]
                key = i, i < accepted, round(survival, 12)
                self.outcomes[key] = self.outcomes.get(key, 0.0) + weight

    def confidence_moment(self, position: int, accepted: bool, power: int) -> float:
        """Weighted sum of a power of the cumulative confidence."""
        return sum(w * s**power for (i, hit, s), w in self.outcomes.items() if (i, hit) == (position, accepted))


class Enumeration:
    """Exact laws of one prompt; `laws(tokens)` and `drafts(tokens)` ask the real models."""

    def __init__(self, target, drafter, prompt, params: SamplingParams, num_draft_tokens, drafting="probabilistic"):
        self.target, self.drafter, self.prompt = target, drafter, list(prompt)
        self.params, self.num_draft_tokens, self.drafting = params, num_draft_tokens, drafting
        self.stops = frozenset(target.stop_token_ids)
        self._p: dict[Tokens, torch.Tensor] = {}

    def p(self, tokens: Tokens) -> torch.Tensor:
        """[V]: the target's law of the token after prompt and tokens."""
        if tokens not in self._p:
            logits = self.target.prefill(self.target.new_cache(1), [self.prompt + list(tokens)]).logits
            self._p[tokens] = to_distribution(logits, self.params)[0]
        return self._p[tokens]

    def paths(self) -> dict[Tokens, float]:
        """Every finished text with its probability under the target."""
        finished, growing = {}, {(): 1.0}
        while growing:
            longer = {}
            for tokens, weight in growing.items():
                for token, chance in enumerate(self.p(tokens).tolist()):
                    if chance > 0:
                        text = (*tokens, token)
                        ended = token in self.stops or len(text) == self.params.max_new_tokens
                        (finished if ended else longer)[text] = weight * chance
            growing = longer
        return finished

    def sums(self) -> LoopSums:
        """Expected sums over all that generation can do."""
        sums = LoopSums(self.num_draft_tokens)
        waiting = {(token,): chance for token, chance in enumerate(self.p(()).tolist()) if chance > 0}
        while waiting:
            tokens = min(waiting, key=len)
            weight = waiting.pop(tokens)
            if tokens[-1] in self.stops or len(tokens) == self.params.max_new_tokens:
                continue
            for chance, step, text in self._outcomes(tokens):
                sums.add(weight * chance, step)
                waiting[text] = waiting.get(text, 0.0) + weight * chance
        return sums

    def _outcomes(self, tokens: Tokens):
        """(probability, record, text) of every outcome of the step behind `tokens`."""
        remaining = self.params.max_new_tokens - len(tokens)
        offered = min(self.num_draft_tokens, remaining - 1)
        drafts, chances, proposal, confidence = self._blocks(tokens, offered)
        for row, (draft, chance) in enumerate(zip(drafts, chances, strict=True)):
            reached, overlaps = chance, []
            for i in range(offered):
                overlaps.append(self._overlap(proposal, row, i, self.p((*tokens, *draft[:i]))))
            for accepted in range(offered + 1):
                p = self.p((*tokens, *draft[:accepted]))
                law, passed = p, 0.0
                if accepted < offered:
                    one = proposal.rows(torch.tensor([row])).position(torch.tensor([accepted]))
                    passed = min(1.0, float(p[draft[accepted]] / one.prob()[0, 0]))
                    law = one.residual(p[None, None])[0, 0]
                for token, share in enumerate(law.tolist()):
                    weight = reached * (1 - passed) * share
                    if weight > 0:
                        emitted = (*draft[:accepted], token)
                        yield weight, *self._commit(tokens, emitted, accepted, offered, overlaps, confidence[row])
                reached *= passed

    def _overlap(self, proposal, row, i, p) -> float:
        return float(proposal.rows(torch.tensor([row])).position(torch.tensor([i])).overlap(p[None, None])[0, 0])

    def _commit(self, tokens, emitted, accepted, offered, overlaps, confidence):
        """The record that the loop keeps, and the text so far."""
        emitted = emitted[: self.params.max_new_tokens - len(tokens)]
        stop = next((i for i, token in enumerate(emitted) if token in self.stops), None)
        committed = emitted if stop is None else emitted[: stop + 1]
        text = (*tokens, *committed)
        reason = "stop" if stop is not None else "length" if len(text) == self.params.max_new_tokens else None
        judged = len(committed) if reason == "stop" and len(committed) <= accepted else offered
        step = StepRecord(
            position=len(self.prompt) + len(tokens) - 1,
            num_offered=judged,
            num_accepted=min(accepted, judged),
            num_committed=len(committed),
            accept_probs=tuple(overlaps[:judged]),
            confidence=tuple(confidence[:judged]),
            finish_reason=reason,
        )
        return step, text

    @torch.inference_mode()
    def _blocks(self, tokens: Tokens, offered: int):
        """Every block of `offered` drafts that can be drawn: tokens, probability, proposal of all, confidences."""
        if offered == 0:
            return [()], [1.0], None, [()]
        self.target.tap(self.drafter.config.tap_ids)
        text = self.prompt + list(tokens[:-1])
        context = self.drafter.new_cache(1)
        taps = self.target.prefill(self.target.new_cache(1), [text]).taps
        self.drafter.extend(context, taps, [len(text)])
        ids = self.drafter.draft_ids()
        columns = torch.tensor(list(itertools.product(range(self.drafter.config.draft_vocab_size), repeat=offered)))
        drafts = columns if ids is None else ids[columns]
        context.keep([0] * len(drafts))
        anchors, rows = torch.full((len(drafts),), tokens[-1]), []
        sampling = SamplingTensors.stack([self.params] * len(drafts))
        greedy = self.drafting == "greedy" or self.params.temperature == 0

        def pick(i, logits):
            one_hot = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
            rows.append(one_hot if greedy else to_distribution(logits, sampling))
            return drafts[:, i]

        logits = self.drafter.chain(self.drafter.block_hidden(context, anchors), anchors, offered, pick)
        confidence = torch.zeros(len(drafts), 0) if logits is None else logits.sigmoid()
        chances = torch.stack([q.gather(-1, columns[:, i, None])[:, 0] for i, q in enumerate(rows)]).prod(0)
        drawn = chances > 0
        kept = drafts[drawn]
        proposal = OneHotProposal(kept) if greedy else make_proposal(kept, [q[drawn] for q in rows], ids)
        as_tuples = [tuple(draft) for draft in kept.tolist()]
        return as_tuples, chances[drawn].tolist(), proposal, confidence[drawn].tolist()
