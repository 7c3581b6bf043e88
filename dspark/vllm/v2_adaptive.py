"""What a step costs beside the target's and the drafter's passes, for vLLM's adaptive verification.

vLLM verifies as many drafts of a step as make expected tokens / cost largest, and takes as cost the GPU time of two
parts, the target's pass and the drafter's, profiled at start-up. A step also samples, verifies and runs on the host,
and that part is the same for few rows as for many. Left out, every row looks dearer than it is, and drafts are trimmed
that would have paid: with a small target, or few requests, most of a step is host time.

Here steps are timed while they run, and what is missing from vLLM's price is added to it. The confidences that decide
how many drafts that buys, and which ones, stay those of vLLM's rule.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from vllm.config import VllmConfig

from dspark.vllm.v2_plan import is_ours

REMEMBERED_STEPS = 15  # the median of so many follows the load and forgets a pause


class StepPrice:
    """In the place of `get_num_tokens` of vLLM's manager, which chooses a step's budget."""

    def __init__(self, manager: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Args: vLLM's AdaptiveVerificationManager; seconds."""
        self.manager, self.clock = manager, clock
        self._vllms_own = manager.get_num_tokens
        self._missing: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._last: tuple[float, Mapping[str, int], float] | None = None

    @property
    def missing_ms(self) -> float:
        """Milliseconds of a step that are in neither pass; 0 before any was timed."""
        return max(median(self._missing), 0.0) if self._missing else 0.0

    def __call__(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Contract of vLLM's method. Called once a step, so that from call to call a step goes by."""
        now = self.clock()
        if self._last is not None and self._last[1].keys() == num_tokens_per_req.keys():
            self._missing.append(1e3 * (now - self._last[0]) - self._last[2])
        drafting, verifying = self.manager.cost_tables
        self.manager.cost_tables = drafting + self.missing_ms, verifying
        try:
            num_tokens = self._vllms_own(num_tokens_per_req, draft_tokens)
        finally:
            self.manager.cost_tables = drafting, verifying
        priced = float(drafting[len(num_tokens_per_req)] + verifying[num_tokens])
        self._last = now, num_tokens_per_req, priced
        return num_tokens


def make_manager(vllms_own: Callable[..., Any], *, vllm_config: VllmConfig, **options: Any) -> Any:
    """vLLM's `maybe_create_adaptive_verification_manager`, timing the steps of our drafters.

    Ranks that each timed their own steps would choose different budgets, so with several it stays vLLM's.
    """
    manager = vllms_own(vllm_config=vllm_config, **options)
    if manager is not None and is_ours(vllm_config) and vllm_config.parallel_config.world_size == 1:
        manager.get_num_tokens = StepPrice(manager)
    return manager
