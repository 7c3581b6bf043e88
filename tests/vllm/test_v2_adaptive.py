"""Adaptive verification on V2 goes by the time of whole steps: a machine with a known step time, and what is chosen."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.vllm import v2_adaptive
from dspark.vllm.v2_adaptive import LONGEST_WAIT, LOOK_AFTER, RETRY_AFTER, TRIAL, WholeSteps, make_manager

STEPS = 4  # K


class Manager:
    """vLLM's manager in small: what `WholeSteps` reads of it, and a count of what it is asked to do."""

    def __init__(self, survivals, *, draft_ms=1.0, row_ms=0.1, max_logits=10_000):
        num_slots, K = len(survivals), STEPS
        survivals = np.asarray(survivals, dtype=np.float32)
        confidence = survivals / np.concatenate([np.ones((num_slots, 1), np.float32), survivals[:, :-1]], axis=1)
        self._stale_confidences, self._stale_idx = [SimpleNamespace(np=confidence)] * 2, 0
        self.req_states = SimpleNamespace(req_id_to_index={f"r{i}": i for i in range(num_slots)})
        self.cost_tables = np.full(num_slots + 1, draft_ms), 1.0 + row_ms * np.arange(num_slots * (K + 1) + 600)
        self.num_bonus_tokens, self._max_total_logits = 1, max_logits
        self._batch_budget = None
        self._cu_num_logits = torch.zeros(num_slots + 1, dtype=torch.int32)
        self.query_start_loc = torch.zeros(num_slots + 1, dtype=torch.int32)
        self.calls = {"get": 0, "record": 0, "reallocate": 0}

    def get_num_tokens(self, num_tokens_per_req, draft_tokens):
        self.calls["get"] += 1
        self._batch_budget = ({}, {}, 0)
        return sum(num_tokens_per_req.values()) - sum(map(len, draft_tokens.values()))

    def compact_batch(self, num_drafts, num_tokens, row_starts):
        return num_tokens, row_starts

    def reallocate_drafts(self, req_ids, idx_mapping):
        self.calls["reallocate"] += 1
        lengths, others, budget = self._batch_budget
        assert set(lengths) == set(others) == set(req_ids)
        self._batch_budget = None
        return "rows", "queries", budget, None

    def record_confidences(self, confidence_probs, input_batch):
        self.calls["record"] += 1

    def add_request(self, index):
        return index


def served(manager, num_requests, num_steps, seconds, steps=None):
    """Budgets of `num_steps` steps; `seconds(budget)` is what a step takes in truth."""
    now = [0.0]
    steps = steps or WholeSteps(manager, clock=lambda: now[0])
    requests = [f"r{i}" for i in range(num_requests)]
    budgets = []
    for _ in range(num_steps):
        total = steps.get_num_tokens(dict.fromkeys(requests, STEPS + 1), dict.fromkeys(requests, [-1] * STEPS))
        budgets.append(total - num_requests)
        lengths = np.full(num_requests, STEPS)
        starts = np.arange(num_requests + 1, dtype=np.int32) * (STEPS + 1)
        steps.compact_batch(lengths, lengths + 1, starts)
        steps.reallocate_drafts(requests, None)
        steps.record_confidences(None, None)
        now[0] += seconds(budgets[-1])
    return budgets


SURVIVALS = np.tile([0.7, 0.3, 0.1, 0.03], (8, 1))
EVERYTHING = 8 * STEPS
# Expected tokens of 8 requests: 8, then 5.6, 2.4, 0.8 and 0.24 more for columns of 8 rows. With 0.1 ms a row the passes
# take 2.8 ms and 0.8 more a column: 13.6 / 3.6 = 3.78, 16.0 / 4.4 = 3.64. vLLM's rule verifies one draft of each.
VLLMS_CHOICE = 8


def test_rows_that_cost_nothing_on_a_busy_host_are_verified():
    """The host takes 12 ms, the passes 2.8 to 6 ms beside it: drafts are free, and a step now and then tries fewer."""
    manager = Manager(SURVIVALS)
    budgets = served(manager, 8, 1000, lambda budget: 0.012)
    trimmed = sum(budget < EVERYTHING for budget in budgets)
    assert trimmed <= 1000 * (TRIAL + 2) / RETRY_AFTER
    assert manager.calls["reallocate"] == trimmed
    assert manager.calls["record"] <= 0.3 * len(budgets)


def test_rows_that_cost_what_the_passes_say_are_trimmed_as_vllm_does():
    """Nothing but the passes takes time; all that is verified beside it is a trial now and then."""
    manager = Manager(SURVIVALS)
    drafting, verifying = manager.cost_tables
    budgets = served(manager, 8, 1000, lambda budget: 1e-3 * (drafting[8] + verifying[8 + budget]))
    assert budgets.count(EVERYTHING) <= 1000 * (TRIAL + 2) / RETRY_AFTER
    assert set(budgets) == {EVERYTHING, VLLMS_CHOICE}


def test_a_first_step_that_compiles_is_not_held_against_its_kind():
    manager = Manager(SURVIVALS)
    drafting, verifying = manager.cost_tables
    compiled = set()

    def seconds(budget):
        first = budget not in compiled
        compiled.add(budget)
        return 2.0 * first + 1e-3 * (drafting[8] + verifying[8 + budget])

    assert served(manager, 8, 100, seconds).count(VLLMS_CHOICE) > 90


def test_the_part_of_a_step_that_no_row_changes_is_reckoned_with():
    """20 ms more in every step: 13.6 / 23.6 = 0.576, 16 / 24.4 = 0.656, 16.8 / 25.2 = 0.667, 17.04 / 26 = 0.655."""
    manager = Manager(SURVIVALS)
    drafting, verifying = manager.cost_tables
    budgets = served(manager, 8, 1000, lambda budget: 0.020 + 1e-3 * (drafting[8] + verifying[8 + budget]))
    assert budgets.count(24) > 900
    assert budgets.count(EVERYTHING) <= 1000 * (TRIAL + 2) / RETRY_AFTER


def test_a_loss_that_the_passes_do_not_show_is_found():
    """Verifying everything takes 20 ms, anything less 5, which the profile does not know."""
    manager = Manager(SURVIVALS, row_ms=0.05)
    budgets = served(manager, 8, 1000, lambda budget: 0.020 if budget == EVERYTHING else 0.005)
    assert budgets.count(EVERYTHING) <= 1000 * (TRIAL + 2) / RETRY_AFTER


def test_more_load_is_looked_at_at_once_and_less_is_not():
    """Rows are dearest where there are most of them: what pays for many requests pays for few."""
    manager = Manager(SURVIVALS)
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    looks, look = [], steps._look
    steps._look = lambda *step, **options: looks.append(len(step[0])) or look(*step, **options)
    for requests, num_steps in ((2, 40), (8, 40), (2, 4), (1, 4), (7, 4)):
        for _ in range(num_steps):
            served(manager, requests, 1, lambda budget: 0.0, steps)
            now[0] += 0.012
    assert looks[0] == 2
    assert set(looks) == {2, 8}, f"the last 12 steps are within a wait that began with 8 requests: {looks}"


def test_looks_become_rare_while_nothing_is_won():
    manager = Manager(SURVIVALS)
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    looks, look = [], steps._look
    steps._look = lambda *step, **options: looks.append(round(now[0] / 0.012)) or look(*step, **options)
    for _ in range(RETRY_AFTER):
        served(manager, 8, 1, lambda budget: 0.0, steps)
        now[0] += 0.012
    assert np.diff(looks)[-4:].tolist() == [LONGEST_WAIT // 2, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def test_steps_are_timed_though_requests_come_and_go():
    """Between steps of 7 and 8 requests there is never the same twice, and drafts are trimmed all the same."""
    manager = Manager(SURVIVALS)
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    drafting, verifying = manager.cost_tables
    trimmed = 0
    for step in range(200):
        requests = 7 + step % 2
        budget = served(manager, requests, 1, lambda budget: 0.0, steps)[0]
        now[0] += 1e-3 * (drafting[requests] + verifying[requests + budget])
        trimmed += budget < requests * STEPS
    assert trimmed > 150


def test_a_batch_that_fills_and_empties_is_not_a_trial_at_every_size():
    """Rows cost nothing: after the first trial nothing is trimmed, though twelve loads are passed through again."""
    manager = Manager(np.tile(SURVIVALS, (8, 1)))
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    trimmed = 0
    for step in range(RETRY_AFTER):
        requests = 1 + min(step % 128, 127 - step % 128)
        trimmed += served(manager, requests, 1, lambda budget: 0.0, steps)[0] < requests * STEPS
        now[0] += 0.1
    assert 0 < trimmed <= TRIAL


def test_with_nothing_to_trim_the_runners_layout_stands():
    manager = Manager(SURVIVALS)
    steps = WholeSteps(manager)
    total = steps.get_num_tokens({"r0": 5, "r1": 3}, {"r0": [-1] * 4, "r1": [-1] * 2})
    assert total == 8
    assert steps.compact_batch(np.array([4, 2]), np.array([5, 3]), np.array([0, 5, 8], np.int32))[0].tolist() == [5, 3]
    starts, queries, budget, admitted = steps.reallocate_drafts(["r0", "r1"], None)
    assert (starts.tolist(), budget, admitted) == ([0, 5, 8], 6, None)
    assert queries is manager.query_start_loc
    assert manager._batch_budget is None


def test_more_rows_than_a_chunk_holds_are_vllms():
    manager = Manager(SURVIVALS, max_logits=7)
    steps = WholeSteps(manager)
    steps.get_num_tokens({"r0": 5, "r1": 5}, {"r0": [-1] * 4, "r1": [-1] * 4})
    assert manager.calls["get"] == 1
    steps.record_confidences(None, None)
    assert manager.calls["record"] == 1
    assert steps.add_request(3) == 3


def test_steps_between_those_with_prompts_are_timed():
    """Every second step holds a prompt; verifying everything takes 20 ms, anything less 5, which the profile does not
    know, and a step with a prompt 50."""
    manager = Manager(SURVIVALS, row_ms=0.05)
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    budgets = []
    for _ in range(100):
        budgets += served(manager, 8, 1, lambda budget: 0.0, steps)
        now[0] += 0.020 if budgets[-1] == EVERYTHING else 0.005
        steps.get_num_tokens({"r0": 5, "r1": 40}, {"r0": [-1] * 4, "r1": []})
        now[0] += 0.050
    assert budgets.count(EVERYTHING) < 20
    assert max(time for known in steps._missing.values() for times in known.values() for time in times) < 20


def with_prompt(steps, manager):
    """A step of seven requests with drafts and a prompt of three tokens; whether drafts were trimmed."""
    requests = {f"r{i}": STEPS + 1 for i in range(7)} | {"r7": 3}
    before = manager.calls["get"]
    tokens = steps.get_num_tokens(requests, {r: [-1] * STEPS for r in requests if r != "r7"})
    if tokens == sum(requests.values()):
        lengths = np.array([STEPS] * 7 + [0])
        starts = np.concatenate([[0], np.cumsum(lengths + 1)]).astype(np.int32)
        steps.compact_batch(lengths, np.array(list(requests.values())), starts)
        found = steps.reallocate_drafts(list(requests), None)
        assert (found[0].tolist(), found[2], found[3]) == (starts.tolist(), 7 * STEPS, None)
        assert found[1] is manager.query_start_loc
    else:
        assert manager.calls["get"] == before + 1, "how much is vLLM's to say"
    steps.record_confidences(None, None)
    return tokens < sum(requests.values())


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("pure", [6, 50])
def test_steps_with_prompts_are_decided_by_the_times_of_others(trims, pure):
    """Nothing but the passes takes time, or 12 ms of the host do; from then on every step has a prompt."""
    manager = Manager(SURVIVALS)
    drafting, verifying = manager.cost_tables
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    for _ in range(pure):
        budget = served(manager, 8, 1, lambda budget: 0.0, steps)[0]
        now[0] += 1e-3 * (drafting[8] + verifying[8 + budget]) if trims else 0.012
    recorded, trimmed = manager.calls["record"], 0
    for _ in range(500):
        trimmed += with_prompt(steps, manager)
        now[0] += 5.0
    assert trimmed > 400 if trims else trimmed < 10
    if not trims:
        assert manager.calls["record"] - recorded < 100, "where nothing is won, nothing is waited for"
    assert not any(time > 4000 for known in steps._missing.values() for times in known.values() for time in times)


@pytest.mark.parametrize("every", [3, 8, 40])
def test_prompts_now_and_then_leave_other_steps_to_themselves(every):
    """A step with 500 tokens of a prompt verifies everything, which costs little beside them; others go on trimming."""
    manager = Manager(SURVIVALS)
    drafting, verifying = manager.cost_tables
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    budgets = []
    for number in range(1000):
        if number % every == every - 1:
            drafting_requests = {f"r{i}": STEPS + 1 for i in range(7)}
            total = steps.get_num_tokens(drafting_requests | {"r7": 500}, {r: [-1] * STEPS for r in drafting_requests})
            now[0] += 0.060
            assert total == 535
        else:
            budgets += served(manager, 8, 1, lambda budget: 0.0, steps)
            now[0] += 1e-3 * (drafting[8] + verifying[8 + budgets[-1]])
    assert budgets.count(VLLMS_CHOICE) > 0.95 * len(budgets)


def test_times_from_before_a_change_do_not_outvote_it():
    """Verifying everything takes 40 ms until step 2,500 and 12 from then on, and its next trial finds out."""
    manager = Manager(SURVIVALS)
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    budgets = []
    for number in range(2500 + RETRY_AFTER + 2 * TRIAL + LOOK_AFTER):
        budgets += served(manager, 8, 1, lambda budget: 0.0, steps)
        now[0] += (0.040 if number < 2500 else 0.012) if budgets[-1] == EVERYTHING else 0.012
    assert budgets[2400:2500].count(EVERYTHING) <= 2 * TRIAL
    assert set(budgets[-LOOK_AFTER:]) == {EVERYTHING}


def test_captures_are_no_times():
    """A batch that empties captures a graph of 80 ms in each step; a step of 24 requests then takes 12."""
    manager = Manager(np.tile(SURVIVALS, (8, 1)))
    now = [0.0]
    steps = WholeSteps(manager, clock=lambda: now[0])
    captured, trimmed = set(), 0
    for requests in [*range(64, 0, -1), *[24] * 1000]:
        everything = served(manager, requests, 1, lambda budget: 0.0, steps)[0] == requests * STEPS
        now[0] += 0.080 if everything and requests not in captured else 0.012
        captured |= {requests} if everything else set()
        trimmed += not everything
    assert trimmed <= (TRIAL + 2) * (2 + 1000 // RETRY_AFTER)


@pytest.mark.parametrize(("ours", "ranks", "timed"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_only_our_drafters_of_one_rank_are_timed(monkeypatch, ours, ranks, timed):
    monkeypatch.setattr(v2_adaptive, "is_ours", lambda config: ours)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
    manager = make_manager(lambda **options: Manager(SURVIVALS), vllm_config=config, num_bonus_tokens=1)
    assert isinstance(manager, WholeSteps) == timed
    assert make_manager(lambda **options: None, vllm_config=config) is None
