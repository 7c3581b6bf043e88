"""vLLM's adaptive verification, by what steps take and not by what two parts of them take on the GPU.

vLLM verifies as many drafts of a step as make expected tokens / cost largest. Its cost is the GPU time of the target's
pass and the drafter's, profiled at start-up. A step also samples, verifies, and runs on the host: with a small target
most of it is host time, in which rows are free, and every draft that is trimmed is a loss. And choosing costs the host
a tenth of such a step, whatever is chosen.

Here steps are timed while they run, apart for those that verify everything and those that trim, and by load, numbers of
requests within a fifth of one another. What the profile lacks is added to it, for each kind its own; trimming has to
beat verifying everything by these prices. Where it does not, a step now and then looks whether that has changed, and
the others do nothing for it: a look waits for the confidences of the step before, so that the host no longer runs ahead
of the device. The first comes after `LOOK_AFTER` steps, each further one after twice as many, and one at once where
there is more load than verifying everything was found to be better at. The kind that loses is run for `TRIAL` steps in
`RETRY_AFTER`, so that its time is known; at a load where it never ran it is taken for what it was at the nearest one,
since a batch that fills and empties passes through many loads, and a trial of each would cost more than is to be won.
Which drafts a budget buys stays vLLM's ranking.

Lengths never depend on the drafts they cut: budgets come from earlier steps, the ranking from survivals
(`dspark.schedule`).
"""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from dspark.vllm.v2_plan import is_ours

TIMED_STEPS = 15  # the median of so many follows the load and forgets a pause
TRIAL, RETRY_AFTER, LOOK_AFTER, LONGEST_WAIT = 4, 512, 16, 128
# Confidences reach the host a step late: what a look reads was recorded in the two steps before it. A look because of
# more load reads older ones of the requests that stay, and may trim worse for a step.
RECORDED_BEFORE = 2


class WholeSteps:
    """In the place of vLLM's AdaptiveVerificationManager, which it drives."""

    def __init__(self, manager: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: vLLM's manager; seconds."""
        self.manager, self.clock = manager, clock
        self._missing: dict[bool, dict[int, deque[float]]] = {True: {}, False: {}}  # by load; True: all is verified
        self._idle = {True: 0, False: RETRY_AFTER}  # steps since the kind ran
        self._load, self._all_won_at = -1, -1
        self._began, self._priced, self._all, self._run, self._is_timed = 0.0, 0.0, True, 0, False
        self._until_look, self._wait, self._trials, self._trims = 0, LOOK_AFTER, 0, False
        self._row_starts = np.zeros(1, np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Contract of vLLM's method: tokens of the step once drafts are trimmed. Called once a step."""
        requests, total = len(num_tokens_per_req), sum(num_tokens_per_req.values())
        drafts = sum(map(len, draft_tokens.values()))
        now = self.clock()
        # The first of a kind may compile what it needs, and wait for one of the other kind.
        if self._is_timed and self._run > 1:
            times = self._missing[self._all].setdefault(self._load, deque(maxlen=TIMED_STEPS))
            times.append(1e3 * (now - self._began) - self._priced)
        self._load = round(2 * math.log2(requests))
        self._until_look = 0 if self._load > self._all_won_at else self._until_look - 1
        has_prompts = total - drafts != requests
        if drafts > self.manager._max_total_logits - requests * self._bonus or (has_prompts and self._trims):
            self._until_look, self._is_timed = 0, False  # vLLM's, by confidences that are recorded from now on
            num_tokens = self.manager.get_num_tokens(num_tokens_per_req, draft_tokens)
            self._count(everything=False)
        else:
            looks = self._until_look <= 0 and not has_prompts
            budget = self._look(num_tokens_per_req, draft_tokens, drafts) if looks else drafts
            self._hand_over(budget, num_tokens_per_req, draft_tokens, drafts)
            num_tokens = total - drafts + budget
            self._count(everything=budget == drafts)
            self._is_timed = not has_prompts
        self._began = now
        return num_tokens

    @property
    def _bonus(self) -> int:
        return self.manager.num_bonus_tokens

    def missing_ms(self, everything: bool) -> float:
        """Milliseconds that steps of this kind take beside the two passes, at the load nearest to this one where some
        were timed; 0, as vLLM has it, if there is none."""
        known = self._missing[everything]
        return median(known[min(known, key=lambda load: abs(load - self._load))]) if known else 0.0

    def _look(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]], drafts: int) -> int:
        """Decide on a budget, and when to look again."""
        requests = len(num_tokens_per_req)
        lengths = np.fromiter((len(draft_tokens.get(r, ())) for r in num_tokens_per_req), np.int64, requests)
        slot_of = self.manager.req_states.req_id_to_index
        slots = np.fromiter((slot_of[r] for r in num_tokens_per_req), np.int64, requests)
        confidence = self.manager._stale_confidences[self.manager._stale_idx].np[slots].astype(np.float64)
        survival = np.cumprod(confidence, axis=1)[np.arange(confidence.shape[1]) < lengths[:, None]]
        tokens = requests + np.concatenate([[0.0], np.cumsum(-np.sort(-survival))])
        drafting, verifying = self.manager.cost_tables
        passes = drafting[requests] + verifying[requests : requests + drafts + 1]
        timed = self._load in self._missing[True]
        if timed and self._idle[False] >= RETRY_AFTER:  # it is tried again, if vLLM's price speaks for it
            self._trials, self._idle[False] = TRIAL, 0
            self._missing[False].pop(self._load, None)
        rates = tokens / np.maximum(passes + (0.0 if self._trials else self.missing_ms(False)), 1e-3)
        best = int(rates.argmax())
        of_all = tokens[drafts] / max(float(passes[drafts]) + self.missing_ms(True), 1e-3)
        self._trims = best < drafts and bool(rates[best] > of_all)
        if not timed or (self._trims and self._idle[True] >= RETRY_AFTER):
            self._until_look, self._all_won_at, self._trims = TRIAL, self._load, False
            return drafts
        if self._trims:
            self._all_won_at, self._wait, self._trials = -1, LOOK_AFTER, max(self._trials - 1, 0)
            return best
        self._all_won_at, self._trials = max(self._all_won_at, self._load), 0
        self._until_look, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        return drafts

    def _count(self, *, everything: bool) -> None:
        """A step of this kind is to run."""
        self._run = self._run + 1 if everything == self._all else 1
        self._all = everything
        self._idle[everything], self._idle[not everything] = 0, self._idle[not everything] + 1

    def _hand_over(
        self, budget: int, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]], drafts: int
    ) -> None:
        """Give the budget to vLLM's manager."""
        requests = len(num_tokens_per_req)
        drafting, verifying = self.manager.cost_tables
        self._priced = float(drafting[requests] + verifying[requests + budget])
        lengths: dict[str, int] = {}
        others: dict[str, int] = {}
        if budget < drafts:
            lengths = {r: len(draft_tokens.get(r, ())) for r in num_tokens_per_req}
            others = dict.fromkeys(num_tokens_per_req, 1)
        self.manager._batch_budget = lengths, others, budget

    def compact_batch(
        self, num_drafts: np.ndarray, num_tokens: np.ndarray, row_starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Contract of vLLM's method."""
        self._row_starts = row_starts
        return self.manager.compact_batch(num_drafts, num_tokens, row_starts)

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int, Any]:
        """Contract of vLLM's method. With nothing to trim the runner's own layout stands."""
        if not self._all:
            return self.manager.reallocate_drafts(req_ids, idx_mapping)
        budget, self.manager._batch_budget = self.manager._batch_budget[2], None
        row_starts = self.manager._cu_num_logits[: len(self._row_starts)]
        async_tensor_h2d(self._row_starts, out=row_starts)
        return row_starts, self.manager.query_start_loc, budget, None

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Contract of vLLM's method; steps whose confidences no look will read leave them."""
        if self._until_look <= RECORDED_BEFORE:
            self.manager.record_confidences(confidence_probs, input_batch)


def make_manager(vllms_own: Callable[..., Any], *, vllm_config: VllmConfig, **options: Any) -> Any:
    """vLLM's `maybe_create_adaptive_verification_manager`, with the steps of our drafters timed.

    Ranks that each timed their own steps would choose different budgets, so with several it stays vLLM's.
    """
    manager = vllms_own(vllm_config=vllm_config, **options)
    if manager is not None and is_ours(vllm_config) and vllm_config.parallel_config.world_size == 1:
        return WholeSteps(manager)
    return manager
