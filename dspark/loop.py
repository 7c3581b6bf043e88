"""Speculative generation: draft, verify, commit, for a batch of requests that come and go.

    prefill                      first token from the target; its taps become draft context
    each step, for all requests at once:
        plan      = schedule.plan(limits)                     how many drafts; by default all, and all are verified
        draft     = drafter.propose(anchor)                   tokens and the q they were drawn from
        lengths   = schedule(confidence)                      how many of them to verify, if the plan leaves that open
        output    = target.verify([anchor, drafts])           nothing committed
        verified  = verify_logits(q, p)                       exactly the target's distribution
        target.commit, drafter.extend                         accepted rows only

Without a drafter the same loop verifies the anchor alone: plain decoding through the same class, with the same random
numbers per position.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.cache import RaggedKV
from dspark.drafter import Draft, Drafter, check_num_draft_tokens
from dspark.records import FinishReason, Generation, StepRecord
from dspark.sampling import (
    Drafting,
    OneHotProposal,
    Purpose,
    SamplingParams,
    SamplingTensors,
    Streams,
    Verification,
    sample,
    to_distribution,
    verify_logits,
)
from dspark.schedule import Plan, Schedule, step_positions
from dspark.target import Target

OnTokens = Callable[[int, list[int], StepRecord | None], None]
OnFinish = Callable[[int, Generation], None]

MOST_UNREAD = 64  # plain steps whose taps are kept before the drafter's context takes them in


@torch.inference_mode()
def generate(  # noqa: PLR0913 (options are keyword-only, and every one has a default)
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    num_draft_tokens: int | None = None,
    drafting: Drafting = "probabilistic",
    draft_truncation: bool = True,
    schedule: Schedule | None = None,
    max_batch_size: int = 32,
    on_tokens: OnTokens | None = None,
    on_finish: OnFinish | None = None,
) -> list[Generation]:
    """Generate for every prompt; the output distribution is the target's alone, whatever the drafter.

    Args:
        target: the model to sample from; its taps are set to the drafter's.
        drafter: None decodes plainly.
        prompts: texts (tokenised as they are, without chat template) or lists of token ids.
        params: one for all prompts, or one per prompt.
        num_draft_tokens: K; default the drafter's trained maximum. Near a limit a request is offered fewer.
        drafting: "probabilistic" draws drafts from q, "greedy" takes their argmax with a one-hot q. Both are lossless.
        draft_truncation: whether q is cut by top_k, top_p and min_p as the target is. Lossless either way; uncut
            drafts are rejected more.
        schedule: chooses how many drafts are verified, in each step by the drafter's confidences or beforehand by those
            of earlier steps (`dspark.schedule`); None verifies all. Drafts that it trims count as never offered.
        max_batch_size: requests run together; others wait and join as places become free.
        on_tokens: called with (prompt index, new token ids, step) whenever tokens are committed; step is None for the
            prefill token.
        on_finish: called with (prompt index, generation) when a request ends.

    Returns:
        One `Generation` per prompt, in the order of the prompts.

    Raises:
        ValueError: a prompt is empty, out of vocabulary or too long; K is outside the trained range; K or a schedule
            is given without a drafter, or a schedule to one without confidence head; drafter and target do not fit.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one text; expected a list of prompts: each of its characters would be a prompt")
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(all_params) != len(prompts):
        raise ValueError(
            f"{len(all_params)} sampling params for {len(prompts)} prompts: give one for all, or one per prompt"
        )
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
    if drafter is None and num_draft_tokens is not None:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} without a drafter: nothing would be drafted; pass a drafter, or leave"
            " num_draft_tokens out"
        )
    check_schedule(schedule, drafter)
    if drafter is not None:
        num_draft_tokens = drafter.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
        check_num_draft_tokens(drafter.config, num_draft_tokens)
        check_pair(target, drafter)
    target.tap(drafter.config.tap_ids if drafter is not None else ())
    requests = [_open(i, target, p, q) for i, (p, q) in enumerate(zip(prompts, all_params, strict=True))]
    batch = _Batch(target, drafter, num_draft_tokens or 0, drafting, draft_truncation, schedule)
    waiting = deque(requests)
    while waiting or batch.requests:
        free = max_batch_size - len(batch.requests)
        joining = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        events = batch.admit(joining) if joining else batch.step()
        for request, tokens, step in events:
            if on_tokens is not None:
                on_tokens(request.index, tokens, step)
            if on_finish is not None and request.generation.finish_reason is not None:
                on_finish(request.index, request.generation)
        batch.drop_finished()
    return [request.generation for request in requests]


def check_schedule(schedule: Schedule | None, drafter: Drafter | None) -> None:
    """Refuse a schedule that has nothing to go by (ValueError)."""
    if schedule is None or (drafter is not None and drafter.config.confidence != "none"):
        return
    lacking = "without a drafter" if drafter is None else "for a drafter without confidence head"
    raise ValueError(
        f"--schedule (schedule= in Python) {lacking}: it chooses by the confidence of each draft how many to verify, "
        "and there is none; leave it out"
    )


def check_pair(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter that was resolved for another target (ValueError)."""
    if drafter.target_vocab_size != target.vocab_size:
        raise ValueError(
            f"the drafter was loaded for a vocabulary of {drafter.target_vocab_size}, the target has "
            f"{target.vocab_size}: draft ids would mean other tokens. Load it with load_drafter(..., target=target)"
        )
    if drafter.config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"the drafter reads target states of width {drafter.config.target_hidden_size}, this target's are "
            f"{target.hidden_size} wide: it was trained for another target"
        )
    if drafter.device != target.device:
        raise ValueError(f"the drafter is on {drafter.device}, the target on {target.device}: load both on one device")


@dataclass
class _Request:
    """A request while it runs."""

    index: int
    params: SamplingParams
    stop_ids: frozenset[int]
    max_new_tokens: int
    generation: Generation

    @property
    def position(self) -> int:
        """Of its last token, the next step's anchor."""
        return len(self.generation.prompt_ids) + len(self.generation.token_ids) - 1

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.generation.token_ids)

    def commit(self, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append emitted tokens up to the first stop or the length limit, whichever comes first; a stop at the limit
        counts as a stop.
        """
        emitted = emitted[: self.remaining]
        stop = next((i for i, token in enumerate(emitted) if token in self.stop_ids), None)
        committed = emitted if stop is None else emitted[: stop + 1]
        self.generation.token_ids += committed
        if stop is not None:
            self.generation.finish_reason = "stop"
        elif self.remaining == 0:
            self.generation.finish_reason = "length"
        return committed, self.generation.finish_reason


_Event = tuple[_Request, list[int], StepRecord | None]


class _Batch:
    """The running requests and everything that is indexed by their row."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        num_draft_tokens: int,
        drafting: Drafting,
        draft_truncation: bool,
        schedule: Schedule | None,
    ) -> None:
        self.target, self.drafter, self.schedule = target, drafter, schedule
        self.num_draft_tokens, self.drafting, self.draft_truncation = num_draft_tokens, drafting, draft_truncation
        self.requests: list[_Request] = []
        self.unread: list[torch.Tensor] = []  # taps [B, 1, ...] of plain steps, not in the drafter's context yet
        self.cache: RaggedKV
        self.draft_cache: RaggedKV | None
        self.streams: Streams
        self.sampling: SamplingTensors

    def admit(self, joining: list[_Request]) -> list[_Event]:
        """Prefill new requests, sample their first token, and put them behind the running ones."""
        prompts = [request.generation.prompt_ids for request in joining]
        cache, draft_cache = self.target.new_cache(len(joining)), None
        output = self.target.prefill(cache, prompts)
        if self.drafter is not None:
            draft_cache = self.drafter.new_cache(len(joining))
            self.drafter.extend(draft_cache, output.taps, [len(prompt) for prompt in prompts])
        streams = Streams.for_params([request.params for request in joining], self.target.device)
        sampling = SamplingTensors.stack([request.params for request in joining], self.target.device)
        probs = to_distribution(output.logits[:, None], sampling)
        first = sample(probs, streams, cache.lengths[:, None], Purpose.TARGET)[:, 0].tolist()
        self._append(joining, cache, draft_cache, streams, sampling)
        return [(request, request.commit([token])[0], None) for request, token in zip(joining, first, strict=True)]

    def _append(
        self,
        joining: list[_Request],
        cache: RaggedKV,
        draft_cache: RaggedKV | None,
        streams: Streams,
        sampling: SamplingTensors,
    ) -> None:
        if self.requests:
            self._read_taps()
            self.cache.append(cache)
            self.streams, self.sampling = self.streams.concat(streams), self.sampling.concat(sampling)
            if self.draft_cache is not None and draft_cache is not None:
                self.draft_cache.append(draft_cache)
        else:
            self.unread = []
            self.cache, self.draft_cache, self.streams, self.sampling = cache, draft_cache, streams, sampling
        self.requests = self.requests + joining

    def step(self) -> list[_Event]:
        """One round for every running request."""
        anchors = self._to_device([request.generation.token_ids[-1] for request in self.requests])
        offered = [self._offered(request) for request in self.requests]
        plan = Plan(max(offered), choose=False) if self.schedule is None else self.schedule.plan(offered)
        assert 0 <= plan.num_drafts <= max(offered), f"schedule plans {plan.num_drafts} of {max(offered)} drafts"
        draft = self._propose(anchors, plan.num_drafts)
        offered = self._lengths(plan, draft, offered)
        proposal = draft.proposal if draft is not None else OneHotProposal(anchors[:, None])
        proposal = proposal.truncate(max(offered))
        output = self.target.verify(self.cache, torch.cat([anchors[:, None], proposal.tokens], dim=1))
        verified = verify_logits(
            proposal,
            output.logits,
            self.sampling,
            self.streams,
            self.cache.lengths + 1,
            self._to_device(offered),
        )
        events, accepted, confidence = self._record(offered, draft, verified)
        kept = [drafts + 1 for drafts in accepted]  # rows of the pass: the anchor and the accepted drafts
        if self.schedule is not None and draft is not None:
            self.schedule.observe(accepted, confidence)
        self.target.commit(self.cache, kept)
        if draft is None and self.drafter is not None:
            self.unread.append(output.taps)
            if len(self.unread) == MOST_UNREAD:
                self._read_taps()
        elif self.drafter is not None and self.draft_cache is not None:
            self.drafter.extend(self.draft_cache, output.taps, kept)
        return events

    def _read_taps(self) -> None:
        """Bring the drafter's context up to the target's. While a schedule pauses drafting nobody looks at it."""
        if self.unread and self.drafter is not None and self.draft_cache is not None:
            rows = [len(self.unread)] * len(self.requests)
            self.drafter.extend(self.draft_cache, torch.cat(self.unread, dim=1), rows)
        self.unread = []

    def _offered(self, request: _Request) -> int:
        """Drafts worth verifying: no more than the request can still take beside the token that verification adds,
        none past the drafter's positions.
        """
        if self.drafter is None:
            return 0
        if request.position + self.drafter.config.block_size > self.drafter.config.max_position_embeddings:
            return 0
        return min(self.num_draft_tokens, request.remaining - 1)

    def _propose(self, anchors: torch.Tensor, num_draft_tokens: int) -> Draft | None:
        if self.drafter is None or self.draft_cache is None or num_draft_tokens == 0:
            return None
        self._read_taps()
        sampling = self.sampling if self.draft_truncation else self.sampling.without_truncation()
        cache = self.draft_cache
        noise_positions = None if self.schedule is None else step_positions(cache.lengths, num_draft_tokens)
        return self.drafter.propose(
            cache, anchors, sampling, self.streams, num_draft_tokens, self.drafting, noise_positions
        )

    def _lengths(self, plan: Plan, draft: Draft | None, offered: list[int]) -> list[int]:
        """Drafts to verify of each request, at most `offered`."""
        if draft is None or not plan.choose:
            return [min(plan.num_drafts, limit) for limit in offered]
        assert self.schedule is not None, "without one nothing is left to choose"
        assert draft.confidence_logits is not None, "checked before the first step"
        confidence = draft.confidence_logits.double().sigmoid().cpu().numpy()
        limits = [min(limit, confidence.shape[1]) for limit in offered]
        lengths = self.schedule(confidence, limits)
        wrong = [pair for pair in zip(lengths, limits, strict=True) if not 0 <= pair[0] <= pair[1]]
        assert not wrong, f"schedule verifies {wrong[0][0]} drafts of a request that may verify {wrong[0][1]}"
        return lengths

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values).to(self.target.device, non_blocking=True)

    def _record(
        self, offered: list[int], draft: Draft | None, verified: Verification
    ) -> tuple[list[_Event], list[int], np.ndarray]:
        """Commit what was emitted; also the accepted drafts of each request, and the confidences of all its drafts."""
        width = verified.tokens.shape[1]
        results = [verified.tokens, verified.num_accepted[:, None], verified.accept_probs]
        if draft is not None and draft.confidence_logits is not None:
            results.append(draft.confidence_logits.sigmoid())
        numbers = torch.cat([each.double() for each in results], dim=1).cpu().numpy()  # one copy, exact in float64
        events: list[_Event] = []
        for request, limit, row in zip(self.requests, offered, numbers.tolist(), strict=True):
            accepted = int(row[width])
            position = request.position
            committed, reason = request.commit([int(token) for token in row[: accepted + 1]])
            stopped_in_drafts = reason == "stop" and len(committed) <= accepted
            judged = len(committed) if stopped_in_drafts else limit
            step = StepRecord(
                position=position,
                num_offered=judged,
                num_accepted=min(accepted, judged),
                num_committed=len(committed),
                accept_probs=tuple(row[width + 1 :][:judged]),
                confidence=tuple(row[2 * width :][:judged]),
                finish_reason=reason,
            )
            request.generation.steps.append(step)
            events.append((request, committed, step))
        return events, numbers[:, width].astype(int).tolist(), numbers[:, 2 * width :]

    def drop_finished(self) -> None:
        """Give the places of finished requests free."""
        rows = [row for row, request in enumerate(self.requests) if request.generation.finish_reason is None]
        if len(rows) == len(self.requests):
            return
        self.requests = [self.requests[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.int64, device=self.target.device)
        self.unread = [taps[index] for taps in self.unread]
        self.cache.keep(rows)
        if self.draft_cache is not None:
            self.draft_cache.keep(rows)
        self.streams, self.sampling = self.streams.rows(index), self.sampling.rows(index)


def _open(index: int, target: Target, prompt: str | Sequence[int], params: SamplingParams) -> _Request:
    """Validate one prompt and its limits."""
    prompt_ids = target.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not prompt_ids:
        raise ValueError(f"prompt {index} is empty: there is nothing to condition on; give at least one token")
    outside = [token for token in prompt_ids if not 0 <= token < target.vocab_size]
    if outside:
        raise ValueError(
            f"prompt {index} holds token id {outside[0]}, outside the target's vocabulary of {target.vocab_size}"
        )
    room = target.max_positions - len(prompt_ids)
    if room < 1:
        raise ValueError(
            f"prompt {index} has {len(prompt_ids)} tokens, the target reaches {target.max_positions} positions: "
            "nothing could be generated; shorten it"
        )
    stop_ids = frozenset(params.stop_token_ids) | (
        frozenset() if params.ignore_eos else frozenset(target.stop_token_ids)
    )
    return _Request(index, params, stop_ids, min(params.max_new_tokens, room), Generation(prompt_ids))
