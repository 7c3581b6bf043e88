"""Sampling in a graph gives what vLLM's way gives, for the steps that it covers, and leaves the others alone.

There is no CUDA graph on a CPU: a tape of torch operations stands for it (`graph_tape.py`), under vLLM's own sampler
and state of requests (`graph_steps.py`).
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graph_steps import MOST, VOCAB, WIDTH, K, admit, check_step, make_runner, make_step, tensors, vllms_sample
from graph_tape import TapeRecorder

from dspark.vllm import v2_graph
from dspark.vllm.patches import V2_RELEASES


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(v2_graph, "Recorder", TapeRecorder)
    monkeypatch.setattr(TapeRecorder, "recorded", 0)
    runner = make_runner(monkeypatch)
    for slot in range(MOST):
        admit(runner, slot, temperature=slot % 2, seed=slot)
    return runner


@pytest.fixture
def sample():
    return v2_graph.sampling_in_graphs(vllms_sample)


def kinds(graphs):
    """Of what is recorded, wherever the inputs are."""
    return sorted(kind._replace(buffers=()) for kind in graphs.recorded)


def test_a_replayed_step_is_vllms(runner, sample):
    generator = torch.Generator().manual_seed(0)
    earlier = []
    for slots, padded in [([2], 1), ([5, 1, 0], 4), ([4], 1), ([7, 3, 6, 2], 4), ([0, 1], 4), ([2, 7], 2), ([1, 6], 2)]:
        found = check_step(runner, sample, make_step(runner, generator, slots, padded))
        earlier.append((found, [each.clone() for each in tensors(found)]))
    assert TapeRecorder.recorded == 4, "one graph a number of requests"
    for found, copies in earlier:  # all that vLLM copies to the host
        assert all(map(torch.equal, tensors(found)[:2], copies)), "a later step has written into an earlier one"


def random_params(generator, cuts):
    """Of a request: temperature 0, 0.6 or 1, and where `cuts` any of min-p, top-k and top-p."""
    choose = lambda *options: options[int(torch.randint(len(options), (), generator=generator))]  # noqa: E731
    params = {"temperature": choose(0.0, 0.6, 1.0)}
    params |= {"seed": int(torch.randint(1 << 40, (), generator=generator))} if choose(True, False) else {}
    if cuts:
        params |= {"min_p": choose(0.0, 0.0, 0.3), "top_k": choose(0, 0, 3, 9), "top_p": choose(1.0, 1.0, 0.4, 0.8)}
    return params


@pytest.mark.parametrize("cuts", [False, True])
def test_steps_of_any_parameters_are_vllms(runner, sample, cuts):
    """Requests come and go, so that slots, padding, parameters and kinds of steps change between replays."""
    generator = torch.Generator().manual_seed(int(cuts))
    for _ in range(150):
        for slot in range(MOST):
            if torch.rand((), generator=generator) < 0.1:
                prompt_len = int(torch.randint(5, 45, (), generator=generator))
                admit(runner, slot, prompt_len, **random_params(generator, cuts))
        count = int(torch.randint(1, 5, (), generator=generator))
        slots = torch.randperm(MOST, generator=generator)[:count].tolist()
        check_step(runner, sample, make_step(runner, generator, slots, padded=1 << (count - 1).bit_length()))
    kinds = set(runner._dspark_sample_graphs.recorded)
    assert len(kinds) == TapeRecorder.recorded < 75, "most steps are replays"
    assert {True, False} == {kind.processed for kind in kinds}
    assert all(any(getattr(kind, stage) for kind in kinds) for stage in ("min_p", "top_k", "only_top_p")) == cuts


def test_a_slot_that_is_used_again_has_its_new_request(runner, sample):
    """vLLM writes parameters into buffers in turn; a graph with the address of one would take the earlier request's."""
    generator = torch.Generator().manual_seed(5)
    for prompt_len, params in [
        (40, {"temperature": 0.6, "seed": 1}),
        (5, {"temperature": 0.3, "seed": 2}),
        (30, {"temperature": 0.9, "seed": 1}),
        (6, {"temperature": 0.6, "seed": 3}),
    ]:
        admit(runner, 3, prompt_len, **params)
        for _ in range(3):
            check_step(runner, sample, make_step(runner, generator, [3], 1))
    assert TapeRecorder.recorded == 1


def test_a_request_alone_after_a_batch_has_its_own_slot_in_every_row(runner, sample):
    """Temperature and prompt length of the others would change its law, or take its drafts for placeholders."""
    generator = torch.Generator().manual_seed(11)
    for slot, (prompt_len, temperature) in enumerate([(5, 0.6), (45, 1.5), (30, 0.3), (5, 0.0)]):
        admit(runner, slot, prompt_len, temperature=temperature, seed=slot)
    for slots in ([0, 1, 2, 3], [0], [2, 1, 3, 0], [3], [2], [0]):
        for _ in range(4):
            check_step(runner, sample, make_step(runner, generator, slots, len(slots)))


def test_vllms_parameters_stay_where_they_are(runner, sample):
    states = runner.sampler.sampling_states
    step = make_step(runner, torch.Generator().manual_seed(6), [3], 1)
    before = states.temperature.gpu
    sample(runner, *step, None)
    assert states.temperature.gpu is before


@pytest.mark.skipif(
    version("vllm").split("+")[0] not in V2_RELEASES, reason="an earlier vLLM has no launches for rows with top-p alone"
)
def test_one_kind_is_one_sequence_of_launches(runner):
    """The kind is computed from the same numbers as vLLM's decisions, and has to tell them apart."""
    generator = torch.Generator().manual_seed(7)
    launches: dict[v2_graph.Kind, list] = {}
    for _ in range(600):
        slots = torch.randperm(MOST, generator=generator)[:2].tolist()
        for slot in slots:
            admit(runner, slot, **random_params(generator, cuts=True))
        hidden, batch = make_step(runner, generator, slots, 4)
        vllms_sample(runner, hidden, batch, None)
        kind = v2_graph.choose_stages(runner.sampler, batch.idx_mapping_np)
        assert launches.setdefault(kind, list(runner.launches)) == runner.launches
    assert len(launches) > 12
    assert len({str(each) for each in launches.values()}) == len(launches) == 20, "and no graph is recorded twice"


def test_graphs_for_numbers_of_tokens_take_the_same_way(runner, sample):
    """Adaptive verification pads requests to what the tokens of a graph could hold, tokens by parts of a request."""
    generator = torch.Generator().manual_seed(3)
    for slots in ([5, 1], [0, 6]):
        _, batch = make_step(runner, generator, slots, 2)
        batch = replace(batch, num_reqs_after_padding=MOST, seq_lens=runner.buffers.seq_lens)
        check_step(runner, sample, (runner.cudagraph_manager.hidden_states[: 2 * WIDTH + 1], batch))
    assert TapeRecorder.recorded == 1


def test_other_buffers_are_another_graph(runner, sample):
    """Adaptive verification lays out a step that it trims in buffers of its own."""
    generator = torch.Generator().manual_seed(10)
    for own in (False, True, False, True):
        hidden, batch = make_step(runner, generator, [5, 1], 2)
        if own:
            batch = replace(batch, seq_lens=torch.tensor([30, 40, 7], dtype=torch.int32)[:2])
            kept = batch.seq_lens
        check_step(runner, sample, (hidden, batch))
    assert len(kept)
    assert TapeRecorder.recorded in (2, 3), "as many as there were addresses"


def refuse_grammar(runner, step):
    return step, "grammar"


def refuse_other_hidden(runner, step):
    return (step[0].clone(), step[1]), None


def refuse_ranks(runner, step):
    runner.parallel_config.world_size = 2
    return step, None


def refuse_large(runner, step):
    runner.vocab_size = v2_graph.MAX_LOGITS_BYTES
    return step, None


@pytest.mark.parametrize("refuse", [refuse_grammar, refuse_other_hidden, refuse_ranks, refuse_large])
def test_other_steps_take_vllms_way(runner, sample, refuse):
    step, grammar = refuse(runner, make_step(runner, torch.Generator().manual_seed(1), [5, 1], 2))
    sample(runner, *step, grammar)
    assert not TapeRecorder.recorded
    assert runner.calls == ["grammar" if grammar else 2]


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 3},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 2.0}},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 4, "stop_token_ids": [3]},
    ],
)
def test_requests_for_more_take_vllms_way(runner, monkeypatch, params):
    """Only while such a request is in the batch."""
    monkeypatch.setattr(runner.sampler, "apply_staged_writes", lambda: None)  # it has kernels for these
    found = []
    graphs = v2_graph.SampleGraphs(runner, vllms_sample)
    admit(runner, 5, temperature=0.6, **params)
    for slots in ([5, 1], [1, 3]):
        found.append(graphs.kind(*make_step(runner, torch.Generator().manual_seed(1), slots, 2)))
    assert found[0] is None
    assert found[1]._replace(buffers=()) == v2_graph.Kind(2)


def test_a_request_that_changes_its_mind_about_anything_is_seen(runner):
    """What is remembered of a batch is forgotten with each of the numbers that it depends on."""
    step = make_step(runner, torch.Generator().manual_seed(1), [5, 1], 2)
    graphs = v2_graph.SampleGraphs(runner, vllms_sample)
    changes = [
        {"logprobs": 3}, {"presence_penalty": 0.5}, {"logit_bias": {3: 2.0}}, {"min_p": 0.1}, {"top_k": 3},
        {"top_p": 0.3}, {"top_p": 0.3, "top_k": 3}, {"temperature": 1.0}, {"temperature": 0.0},
    ]  # fmt: skip
    for change in changes:
        for params in ({}, change):
            admit(runner, 5, **({"temperature": 0.6, "seed": 1} | params))
            for _ in range(2):
                found, expected = graphs.kind(*step), v2_graph.choose_stages(runner.sampler, np.array([5, 1]))
                assert (found and found._replace(buffers=())) == expected


def test_bad_words_thinking_and_processors_of_others_take_vllms_way(runner):
    sampler = runner.sampler
    admit(runner, 2, temperature=0.6)
    slots, others = np.array([2, 4]), np.array([2, 5])
    known = v2_graph.choose_stages(sampler, slots)
    assert known == v2_graph.Kind(2, processed=True, temperature=True)
    bad_words = sampler.logits_processors[2]
    bad_words.num_bad_words.np[5] = 1
    assert v2_graph.choose_stages(sampler, slots) == known
    assert v2_graph.choose_stages(sampler, others) is None
    bad_words.num_bad_words.np[5] = 0
    thinking = SimpleNamespace(enabled=True, use_thinking_budget=np.arange(MOST) == 5)
    sampler.thinking_budget_state = thinking
    assert v2_graph.choose_stages(sampler, slots) == known
    assert v2_graph.choose_stages(sampler, others) is None
    thinking.enabled = False
    assert v2_graph.choose_stages(sampler, others) == known
    sampler.logits_processors.append(type("Custom", (type(bad_words),), {})(None, sampler.req_states))
    assert v2_graph.choose_stages(sampler, slots) is None
    assert v2_graph.choose_stages(sampler, np.array([1, 4])) == v2_graph.Kind(2), "vLLM asks none of them here"


def test_a_step_with_missing_drafts_takes_vllms_way(runner, sample):
    step = make_step(runner, torch.Generator().manual_seed(2), [5, 1], 2, drafts=[K, 1])
    check_step(runner, sample, step)
    assert not TapeRecorder.recorded


def test_sampling_goes_on_where_nothing_can_be_captured(runner, sample, monkeypatch):
    def fail(self, body):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    warnings: list[str] = []
    monkeypatch.setattr(v2_graph.logger, "warning", lambda text, *args: warnings.append(text % args))
    generator = torch.Generator().manual_seed(4)
    check_step(runner, sample, make_step(runner, generator, [3], 1))
    monkeypatch.setattr(TapeRecorder, "record", fail)
    for slots in ([3, 1], [3], [2, 1], [3, 1]):
        check_step(runner, sample, make_step(runner, generator, slots, len(slots)))
    graphs = runner._dspark_sample_graphs
    assert kinds(graphs) == [v2_graph.Kind(1)], "what is there goes on being replayed"
    assert graphs.limit == 0
    assert [each.partition(": operation ")[2] for each in warnings] == ["not permitted when stream is capturing"]


def test_what_waits_for_the_device_is_not_captured(runner):
    """Of the stand-in: it refuses what a capture would."""

    def waiting(runner, hidden_states, batch, grammar):
        sampled = vllms_sample(runner, hidden_states, batch, grammar)
        assert int(sampled[1][0]) <= WIDTH
        return sampled

    sample = v2_graph.sampling_in_graphs(waiting)
    check_step(runner, sample, make_step(runner, torch.Generator().manual_seed(8), [3], 1))
    assert not TapeRecorder.recorded


def test_the_number_of_graphs_is_bounded(runner, sample, monkeypatch):
    monkeypatch.setattr(v2_graph, "MAX_GRAPHS", 2)
    generator = torch.Generator().manual_seed(9)
    for slots in ([1], [2, 3], [4, 5, 6], [3], [0, 1, 2, 3]):
        check_step(runner, sample, make_step(runner, generator, slots, len(slots)))
    assert kinds(runner._dspark_sample_graphs) == [v2_graph.Kind(1), v2_graph.Kind(2)]


def test_changed_logits_are_a_second_copy(runner, monkeypatch):
    monkeypatch.setattr(v2_graph, "MAX_LOGITS_BYTES", 2 * WIDTH * VOCAB * 4)
    graphs = v2_graph.SampleGraphs(runner, vllms_sample)
    admit(runner, 4, temperature=0.6)
    found = [graphs.kind(*make_step(runner, torch.Generator(), slots, len(slots))) for slots in ([1, 2], [4], [1, 4])]
    assert [each and each[:1] + each[2:4] for each in found] == [(2, False, False), (1, True, True), None]


class Pool:
    """Memory as torch holds it for graphs: what is free and large enough is used again, nothing is given back."""

    def __init__(self):
        self.free, self.taken = [], 0

    def empty(self, size, **options):
        return Block(self, size)


class Block:
    def __init__(self, pool, size):
        fitting = [each for each in pool.free if each >= size]
        self.pool, self.size = pool, min(fitting, default=size)
        if fitting:
            pool.free.remove(self.size)
        else:
            pool.taken += size

    def __del__(self):
        self.pool.free.append(self.size)


@pytest.mark.parametrize(("room", "taken"), [(100, 7 + 1 + 100), (0, 7 + 100 * 101 // 2)])
def test_graphs_of_growing_batches_share_their_memory(monkeypatch, room, taken):
    """Without the room that the first leaves, each takes its own. Some is kept in use, as cuBLAS's workspace is."""
    pool, stream = Pool(), SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(capture_begin=lambda **options: None, capture_end=lambda: None, replay=None)
    cuda = {
        "Stream": lambda device: stream, "current_stream": lambda: stream, "stream": lambda chosen: nullcontext(),
        "graph_pool_handle": lambda: 0, "CUDAGraph": lambda: graph,
    }  # fmt: skip
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "empty", pool.empty)
    recorder, workspace = v2_graph.Recorder(torch.device("cpu"), room), []

    def body(requests):
        workspace[:] = workspace or [pool.empty(7)]
        logits = pool.empty(requests)
        return logits.size

    for requests in range(1, 101):
        recorder.record(lambda requests=requests: body(requests))
    assert pool.taken == taken


def test_room_for_the_largest_step(runner, monkeypatch):
    whole = MOST * WIDTH * VOCAB * 8
    assert v2_graph.SampleGraphs(runner, vllms_sample).recorder.room == whole
    monkeypatch.setattr(v2_graph, "MAX_LOGITS_BYTES", whole - 1)
    assert v2_graph.SampleGraphs(runner, vllms_sample).recorder.room == whole - 1, "larger steps have no graph"
    runner.cudagraph_manager.hidden_states = torch.zeros(3 * WIDTH + 1, 1)
    assert v2_graph.SampleGraphs(runner, vllms_sample).recorder.room == whole // MOST * 3, "nor has the target"


def test_buffers_that_vllm_replaces_are_kept(runner, sample, monkeypatch):
    caches = SimpleNamespace(
        _TRITON_BUFFER_CACHE={"key": torch.zeros(2)},
        _TRITON_TABLE_CACHE={"device": (torch.zeros(3), torch.zeros(4))},
        _TRITON_SPLIT_CACHE={"device": {"stats": torch.zeros(5), "parts": torch.zeros(6)}},
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.ops.topk_topp_triton", caches)
    generator = torch.Generator().manual_seed(9)
    sample(runner, *make_step(runner, generator, [1], 1), None)
    caches._TRITON_BUFFER_CACHE["key"] = torch.zeros(7)
    sample(runner, *make_step(runner, generator, [1, 2], 2), None)
    kept = runner._dspark_sample_graphs.kept.values()
    assert sorted(len(each) for each in kept) == [2, 3, 4, 5, 6, 7]
