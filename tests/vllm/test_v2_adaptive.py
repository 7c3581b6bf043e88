"""Adaptive verification on V2 reckons with whole steps: what is added to vLLM's price, and when."""

from types import SimpleNamespace

import numpy as np
import pytest

from dspark.vllm import v2_adaptive
from dspark.vllm.v2_adaptive import REMEMBERED_STEPS, StepPrice, make_manager


class Manager:
    """vLLM's rule in small: the budget of the best expected tokens per cost, for one row of survivals."""

    def __init__(self, survivals, row_ms):
        self.survivals = survivals
        self.cost_tables = np.full(9, 1.0), 1.0 + row_ms * np.arange(40)

    def get_num_tokens(self, num_tokens_per_req, draft_tokens):
        requests = len(num_tokens_per_req)
        drafting, verifying = self.cost_tables
        tokens = requests + np.concatenate([[0.0], np.cumsum(self.survivals)])
        costs = drafting[requests] + verifying[requests : requests + len(tokens)]
        return requests + int(np.argmax(tokens / costs))


def steps(manager, seconds, *, count=REMEMBERED_STEPS + 1, requests=("a",)):
    """Budgets of steps that each take `seconds` in truth."""
    now = [0.0]
    price = StepPrice(manager, clock=lambda: now[0])
    chosen = []
    for _ in range(count):
        chosen.append(price(dict.fromkeys(requests, 5), {}))
        now[0] += seconds
    return price, chosen


def test_drafts_that_a_long_step_pays_for_are_kept():
    manager = Manager([0.6, 0.3, 0.1, 0.05], row_ms=0.3)
    tables = manager.cost_tables
    # the passes take 2.3 to 3.5 ms: 1/2.3, 1.6/2.6, 1.9/2.9 = .655, 2/3.2 = .625
    assert manager.get_num_tokens({"a": 5}, {}) == 3
    price, chosen = steps(manager, seconds=0.020)
    assert chosen[0] == 3
    assert set(chosen[1:]) == {5}  # about 17 ms more: 2.05 tokens in 20.6 ms beat 2.00 in 20.3
    assert price.missing_ms == pytest.approx(20 - 3.5)
    assert all(np.array_equal(*pair) for pair in zip(manager.cost_tables, tables, strict=True))


def test_a_step_that_takes_what_the_passes_take_changes_nothing():
    manager = Manager([0.6, 0.3, 0.1, 0.05], row_ms=0.3)
    price, chosen = steps(manager, seconds=0.0029)
    assert set(chosen) == {3}
    assert price.missing_ms == pytest.approx(0, abs=1e-9)
    price, chosen = steps(manager, seconds=0.001)  # queued faster than it runs
    assert set(chosen) == {3}
    assert price.missing_ms == 0


def test_a_pause_and_other_requests_are_no_steps():
    now = [0.0]
    price = StepPrice(Manager([0.6, 0.3], row_ms=0.3), clock=lambda: now[0])
    for requests in (("a",), ("a", "b"), ("b",), ("c",)):
        price(dict.fromkeys(requests, 3), {})
        now[0] += 10.0  # between batches the engine waits
    assert price.missing_ms == 0
    for _ in range(REMEMBERED_STEPS):
        price({"c": 3}, {})
        now[0] += 0.010
    now[0] += 60.0
    price({"c": 3}, {})
    assert price.missing_ms < 10


@pytest.mark.parametrize(("ours", "ranks", "timed"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_only_our_drafters_of_one_rank_are_timed(monkeypatch, ours, ranks, timed):
    monkeypatch.setattr(v2_adaptive, "is_ours", lambda config: ours)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
    manager = make_manager(lambda **options: Manager([], 0.1), vllm_config=config, num_bonus_tokens=1)
    assert isinstance(manager.get_num_tokens, StepPrice) == timed
    assert make_manager(lambda **options: None, vllm_config=config) is None
