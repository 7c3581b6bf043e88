"""vLLM's adaptive verification, by what steps take and not by what two parts of them take on the GPU.

vLLM verifies as many drafts of a step as make expected tokens / cost largest. Its cost is the GPU time of the target's
pass and the drafter's, profiled at start-up. A step also samples, verifies, and runs on the host: with a small target
most of it is host time, in which rows are free, and every draft that is trimmed is a loss. And choosing costs the host
a tenth of such a step, whatever is chosen.

Here steps are timed while they run, apart for those that verify everything and those that trim, and by load, numbers of
requests within a fifth of a common one. What the profile lacks is added to it, for each kind its own; trimming has to
beat verifying everything by these prices. Where it does not, a step now and then looks whether that has changed, and
the others do nothing for it: a look waits for the confidences of the step before, so that the host no longer runs ahead
of the device. The first comes after `LOOK_AFTER` steps, each further one after twice as many up to `LONGEST_WAIT`, and
one at once where there is more load than verifying everything was found to be better at. The kind that loses is run for
`TRIAL` steps in `RETRY_AFTER`, so that its time is known; at a load where it never ran it is taken for what it was at
the nearest one, since a batch that fills and empties passes through many loads, and a trial of each would cost more
than is to be won. Steps with prompts are decided by the same prices, but neither timed nor tried, and look by a count
of their own; where trimming wins in them vLLM chooses how much. Which drafts a budget buys is always vLLM's ranking.

Lengths never depend on the drafts they cut: budgets come from earlier steps, the ranking from survivals
(`dspark.schedule`).
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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
# more load reads older ones of the requests that stay, and may trim worse for two steps.
RECORDED_BEFORE = 2


@dataclass
class Looks:
    """When steps of a sort look: those with prompts, or the others. A pass over prompts is dear whatever is trimmed, so
    that what pays in one sort says nothing of the other.

    Attributes:
        until: steps of the sort until the next look.
        wait: so many after it, if nothing is won.
        all_won_at: the highest load at which verifying everything was better.
    """

    until: int = 0
    wait: int = LOOK_AFTER
    all_won_at: int = -1


class WholeSteps:
    """In the place of vLLM's AdaptiveVerificationManager, which it drives."""

    def __init__(self, manager: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: vLLM's manager; seconds."""
        self.manager, self.clock = manager, clock
        self._missing: dict[bool, dict[int, deque[float]]] = {True: {}, False: {}}  # by load; True: all is verified
        self._idle = {True: 0, False: RETRY_AFTER}  # steps since the kind ran
        self._load, self._trials = -1, 0
        self._looks = {True: Looks(), False: Looks()}  # True: of steps with prompts
        self._began, self._priced, self._is_timed, self._had_prompts = 0.0, 0.0, False, False
        self._all = True  # the kind of the step that was chosen last
        self._run_of, self._run = True, 0  # that of the last without prompts, and how many of it in a row
        self._met: set[int] = set()  # numbers of requests
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
        has_prompts = total - drafts != requests
        looks = self._looks[has_prompts]
        looks.until = 0 if self._load > looks.all_won_at else looks.until - 1
        fits = drafts <= self.manager._max_total_logits - requests * self.manager.num_bonus_tokens
        budget = drafts
        if fits and looks.until <= 0:
            budget = self._look(num_tokens_per_req, draft_tokens, total - drafts, has_prompts=has_prompts)
        everything = budget == drafts and fits
        self._count(everything, has_prompts)
        # The first step of so many requests captures a graph, and one after prompts may wait for them.
        captures = everything and requests not in self._met
        may_wait = self._had_prompts and self._load in self._missing[everything]
        self._is_timed = fits and not has_prompts and not captures and not may_wait
        if everything and not has_prompts:
            self._met.add(requests)
        self._began, self._had_prompts = now, has_prompts
        if not everything and (has_prompts or not fits):
            looks.until = 0  # vLLM's choice, by confidences that are recorded from now on
            return self.manager.get_num_tokens(num_tokens_per_req, draft_tokens)
        self._hand_over(budget, num_tokens_per_req, draft_tokens, drafts)
        return total - drafts + budget

    def missing_ms(self, everything: bool) -> float:
        """Milliseconds that steps of this kind take beside the two passes, at the load nearest to this one where some
        were timed; those of the other kind before any was, and 0, as vLLM has it, before either was."""
        known = self._missing[everything] or self._missing[not everything]
        return median(known[min(known, key=lambda load: abs(load - self._load))]) if known else 0.0

    def _look(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]], others: int, *, has_prompts: bool
    ) -> int:
        """Decide on a budget, and when to look again. Steps with prompts go by the times that are known: they are not
        timed, and no kind is tried in them."""
        requests, looks = len(num_tokens_per_req), self._looks[has_prompts]
        lengths = np.fromiter((len(draft_tokens.get(r, ())) for r in num_tokens_per_req), np.int64, requests)
        slot_of = self.manager.req_states.req_id_to_index
        slots = np.fromiter((slot_of[r] for r in num_tokens_per_req), np.int64, requests)
        confidence = self.manager._stale_confidences[self.manager._stale_idx].np[slots].astype(np.float64)
        survival = np.cumprod(confidence, axis=1)[np.arange(confidence.shape[1]) < lengths[:, None]]
        tokens = requests + np.concatenate([[0.0], np.cumsum(-np.sort(-survival))])
        drafts = len(survival)
        drafting, verifying = self.manager.cost_tables
        passes = drafting[requests] + verifying[others : others + drafts + 1]
        timed = self._load in self._missing[True]
        if timed and not has_prompts and self._idle[False] >= RETRY_AFTER:  # tried again, if vLLM's price speaks for it
            self._trials, self._idle[False] = TRIAL, 0
            self._missing[False].pop(self._load, None)
        is_trial = self._trials > 0 and not has_prompts
        rates = tokens / np.maximum(passes + (0.0 if is_trial else self.missing_ms(False)), 1e-3)
        best = int(rates.argmax())
        of_all = tokens[drafts] / max(float(passes[drafts]) + self.missing_ms(True), 1e-3)
        trims = best < drafts and bool(rates[best] > of_all)
        if not has_prompts and (not timed or (trims and self._idle[True] >= RETRY_AFTER)):
            self._missing[True].pop(self._load, None)
            looks.until, looks.all_won_at = TRIAL, self._load
            return drafts
        if trims:
            looks.all_won_at, looks.wait, self._trials = -1, LOOK_AFTER, self._trials - is_trial
            return best
        looks.all_won_at = max(looks.all_won_at, self._load)
        looks.until, looks.wait = looks.wait, min(2 * looks.wait, LONGEST_WAIT)
        if not has_prompts:
            self._trials = 0
        return drafts

    def _count(self, everything: bool, has_prompts: bool) -> None:
        """A step of this kind is to run."""
        self._all = everything
        self._idle[everything], self._idle[not everything] = 0, self._idle[not everything] + 1
        if not has_prompts:
            self._run = self._run + 1 if everything == self._run_of else 1
            self._run_of = everything

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
        if self._looks[self._had_prompts].until <= RECORDED_BEFORE:
            self.manager.record_confidences(confidence_probs, input_batch)


def make_manager(vllms_own: Callable[..., Any], *, vllm_config: VllmConfig, **options: Any) -> Any:
    """vLLM's `maybe_create_adaptive_verification_manager`, with the steps of our drafters timed.

    Ranks that each timed their own steps would choose different budgets, so with several it stays vLLM's.
    """
    manager = vllms_own(vllm_config=vllm_config, **options)
    if manager is not None and is_ours(vllm_config) and vllm_config.parallel_config.world_size == 1:
        return WholeSteps(manager)
    return manager
