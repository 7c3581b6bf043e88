"""Steps whose tail is in the graph of sampling leave what vLLM's own `sample_tokens` leaves: tokens, drafts, states.

Two runners are fed the same steps, one as vLLM runs it. `sample_tokens`, `postprocess_sampled` and `propose` are vLLM's
methods, on objects that hold only what these read; the two kernels are replaced by their definitions, and a function of
all that the drafter's graph reads stands for it. See `graph_steps.py` and `graph_tape.py`.
"""

from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from graph_steps import (
    MOST,
    TOKENS,
    VOCAB,
    WIDTH,
    K,
    admit,
    batch_by_address,
    by_address,
    make_runner,
    make_step,
    vllms_sample,
)  # fmt: skip
from graph_tape import TapeRecorder
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from dspark.vllm import v2_graph, v2_tail
from dspark.vllm.patches import V2_RELEASES

pytestmark = pytest.mark.skipif(
    version("vllm").split("+")[0] not in V2_RELEASES, reason="on the releases whose V2 runner the plug-in knows"
)
QUERIES, LAYERS, AUX = K, 2, 6
FIELDS = [
    "num_computed_tokens.gpu", "last_sampled_tokens", "all_token_ids.gpu", "total_len.gpu", "draft_tokens",
]  # fmt: skip


class State(ModelState):
    """A model whose state no step advances."""


State.__abstractmethods__ = frozenset()


class Runner(model_runner.GPUModelRunner):
    """As much of vLLM's as `sample_tokens` reads."""

    main_stream = None

    def __init__(self, parts):
        vars(self).update(vars(parts))


class Manager:
    """The drafter's graphs: one for every even number of requests."""

    def __init__(self, speculator):
        self.speculator, self.replayed = speculator, []

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len=None):
        requests = num_reqs + num_reqs % 2
        if num_reqs > 4:
            return SimpleNamespace(cg_mode=CUDAGraphMode.NONE, num_reqs=num_reqs, num_tokens=num_tokens)
        assert uniform_token_count == QUERIES
        assert num_tokens == num_reqs * QUERIES
        return SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_reqs=requests, num_tokens=requests * QUERIES)

    def run_fullgraph(self, chosen):
        self.replayed.append(chosen.num_reqs)
        self.speculator.draft_from_buffers(chosen.num_reqs)


class Speculator(DSparkSpeculator):
    """vLLM's, with the buffers of its inputs, and drafts that are numbers made from them."""

    max_model_len = 256

    def __init__(self, runner):
        device = torch.device("cpu")
        self.num_speculative_steps, self.num_query_per_req, self.sample_from_anchor = K, QUERIES, True
        self.max_num_reqs, self.max_num_tokens, self.dp_size, self.dp_rank, self.dcp_size = MOST, TOKENS, 1, 0, 1
        self.pcp_manager = self.eplb_state = self.acceptance_estimator = self.draft_watermarker = None
        self.parallel_drafting_token_id, self.draft_kv_cache_group_id = 9, 0
        self.draft_kv_cache_group_ids, self.supports_decode_metadata_update = [0], True
        self.supports_mm_inputs, self._group_causal = False, False
        self._num_rejected = self.draft_logits = self.kv_cache_config = None
        self.input_buffers = InputBuffers(MOST, TOKENS, device)
        self.block_tables = SimpleNamespace(
            slot_mappings=torch.zeros(1, TOKENS, dtype=torch.int64),
            input_block_tables=[torch.arange(MOST * 16, dtype=torch.int32).view(MOST, 16) + 1],
            block_sizes=[16],
            cp_rank=0,
            cp_interleave=1,
        )
        self.context_positions = torch.zeros(TOKENS, dtype=torch.int64)
        self._context_slot_mappings = torch.zeros(1, TOKENS, dtype=torch.int64)
        self.sample_indices, self.sample_pos = (torch.zeros(MOST * K, dtype=torch.int64) for _ in range(2))
        self.sample_idx_mapping = torch.full((MOST * K,), -1)
        self.temperature, self.seeds = torch.zeros(MOST), torch.zeros(MOST, dtype=torch.int64)
        self._aux_staging, self.hidden_states = (torch.zeros(TOKENS, width) for width in (LAYERS * AUX, AUX))
        self.draft_tokens = torch.zeros(MOST, K, dtype=torch.int64)
        self.model = SimpleNamespace(combine_hidden_states=lambda each: each[:, :AUX] + each[:, AUX:])
        self.query_cudagraph_manager = Manager(self)

    def draft_from_buffers(self, requests):
        """Numbers that depend on all that the drafter's graph reads."""
        rows = torch.arange(requests)
        slots = self.sample_idx_mapping.view(MOST, K)[rows, 0]
        inputs = self.input_buffers
        numbers = inputs.input_ids[rows * QUERIES] + 3 * inputs.positions[rows * QUERIES] + 5 * inputs.seq_lens[rows]
        numbers = numbers + (self.seeds + 10 * self.temperature.long())[slots] * (slots >= 0)
        context = self._aux_staging.view(-1, LAYERS * AUX)[: requests * WIDTH].view(requests, -1).sum(-1).long()
        mapped = (
            (self._context_slot_mappings[0] + self.context_positions)[: requests * WIDTH].view(requests, -1).sum(-1)
        )
        numbers = numbers + 7 * context + 11 * mapped
        self.draft_tokens[:requests] = (numbers[:, None] + torch.arange(K)) % VOCAB

    def _generate_draft(self, num_reqs, *args, **named):
        self.draft_from_buffers(num_reqs)

    def _precompute_context_kv(self, start, end, dummy_run=False):
        self.stored = start, end

    def _build_uniform_attn_metadata(self, **named):
        return None


def define_kernels(patch):
    """vLLM's kernels in torch, without waiting for the device."""

    def post_update(slots, computed, last, counts, tokens, num_sampled, num_rejected, starts, everything, lengths, *_):
        slots, num_sampled, num_rejected, starts = map(by_address, (slots, num_sampled, num_rejected, starts))
        start = lengths[slots]
        for place in range(tokens.shape[1]):
            there = (place < num_sampled)[:, None] & (torch.arange(everything.shape[1]) == (start + place)[:, None])
            everything[slots] = torch.where(there, tokens[:, place, None], everything[slots]).to(torch.int32)
            counts.index_put_(
                (slots, tokens[:, place].clamp_min(0)), (place < num_sampled).to(torch.int32), accumulate=True
            )
        newest = tokens.gather(1, (num_sampled - 1).clamp_min(0)[:, None].long())
        last[slots] = torch.where(num_sampled[:, None] > 0, newest, last[slots])
        lengths[slots] = start + num_sampled
        computed[slots] += starts.diff()[: len(slots)] - num_rejected

    def prepare(
        inputs, query_slots, positions, context_slots, indices, sample_pos, mapping, temperature, seeds, batch, sampled,
        rejected, last, prefill, new_temperature, new_seeds, tables, block_size, rank, size, interleave, mask, queries,
        steps, most, tokens, longest, anchor, count,
    ):  # fmt: skip
        batch, sampled, rejected = batch_by_address(batch), by_address(sampled), by_address(rejected)
        slots, ends = batch.idx_mapping, batch.query_start_loc[1 : count + 1]
        before = batch.positions[(ends - rejected - 1).long()]
        bonus = torch.where(sampled > 0, last[slots, 0], prefill[0, slots])
        where = before[:, None] + 1 + torch.arange(queries)
        for buffer, padding in [(inputs.input_ids, 0), (inputs.positions, 0), (inputs.seq_lens, 0), (mapping, -1)]:
            buffer.fill_(padding)
        ids = torch.cat([bonus[:, None], torch.full((count, queries - 1), mask)], dim=1)
        inputs.input_ids[: count * queries] = ids.flatten().to(torch.int32)
        inputs.positions[: count * queries] = where.flatten()
        inputs.seq_lens[:count] = (before + 1 + queries).to(torch.int32)
        query_slots[: count * queries] = (tables[:count, 0, None] * block_size + where % block_size).flatten()
        rows = int(batch.num_scheduled_tokens[:count].sum())
        positions[:rows] = batch.positions[:rows]
        context_slots[:rows] = batch.positions[:rows] % block_size
        mapping[: count * steps] = slots[:, None].expand(count, steps).flatten()
        indices[: count * steps] = torch.arange(count * steps)
        sample_pos[: count * steps] = where[:, :steps].flatten() + 1
        temperature[slots], seeds[slots] = new_temperature[slots], new_seeds[slots]

    patch.setattr(model_runner, "post_update", post_update)
    patch.setattr(dflash, "prepare_dflash_inputs", prepare)
    patch.setattr(dflash, "build_slot_mappings_by_layer", lambda *args: None)
    patch.setattr(model_runner, "AsyncOutput", Copied)
    patch.setattr(model_runner, "use_workspace_lane", lambda lane: nullcontext())


class Copied:
    """vLLM's asynchronous copy: what the tensors hold is read only later."""

    def __init__(self, sampler_output, num_sampled_tokens, **rest):
        self.tokens, self.counts = sampler_output.sampled_token_ids, num_sampled_tokens


def build(patch, sample):
    """A runner whose `sample` is the one given."""
    runner = type("Bare", (Runner,), {"sample": sample})(make_runner(patch))
    runner.is_last_pp_rank, runner._draft_workspace_lane = True, 0
    for name in ("pcp_manager", "pp_handler", "adaptive_verification", "output_copy_stream", "check_ep_fault"):
        setattr(runner, name, None)
    runner.prompt_logprobs_worker = SimpleNamespace(
        compute_prompt_logprobs=lambda *args: {}, compute_prompt_token_id_logprobs=lambda *args: {}
    )
    runner.kv_connector = SimpleNamespace(post_forward=lambda *args, **named: None, finalize_step=lambda: None)
    runner.eplb = SimpleNamespace(step=lambda *args, **named: None, setup_from_mapping=None)
    runner.draft_tokens_handler = SimpleNamespace(set_draft_tokens=lambda batch, tokens: None)
    runner.req_states, runner.model = runner.sampler.req_states, SimpleNamespace(compute_logits=None)
    runner.model_state, runner.speculator = object.__new__(State), Speculator(runner)
    runner.model_state.supports_mm_inputs = False
    runner.cudagraph_manager.use_aux_hidden_state_outputs = True
    runner.cudagraph_manager.aux_hidden_states = [torch.zeros(TOKENS, AUX) for _ in range(LAYERS)]
    for slot in range(MOST):
        admit(runner, slot, temperature=slot % 2, seed=slot)
    return runner


def serve(runner, seed, slots, drafts=None, planned=K):
    """One step; seed decides the target's outputs."""
    generator = torch.Generator().manual_seed(seed)
    padded = max(len(slots), 2)
    hidden, batch = make_step(runner, generator, slots, padded, drafts)
    batch.req_ids, batch.positions = [str(slot) for slot in slots], batch.positions
    aux = runner.cudagraph_manager.aux_hidden_states
    for each in aux:
        each.copy_(torch.randint(0, 9, each.shape, generator=generator))
    runner.execute_model_state = SimpleNamespace(
        input_batch=batch,
        attn_metadata={},
        slot_mappings_by_layer={},
        hidden_states=hidden,
        aux_hidden_states=[each[: len(hidden)] for each in aux],
        dp_sync_state=None,
        finished_req_ids=set(),
        ec_connector_output=None,
        cudagraph_stats=None,
        num_spec_tokens_to_schedule=planned,
    )
    return model_runner.GPUModelRunner.sample_tokens(runner, None)


def everything(runner):
    """All that a step may change."""
    found = {}
    for name in FIELDS:
        value = runner.req_states
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value.clone()
    found["counts"] = runner.sampler.penalties_state.output_bin_counts.clone()
    speculator = runner.speculator
    for owner in (speculator, speculator.input_buffers):
        found |= {name: value.clone() for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}
    return found


@pytest.fixture
def pair(monkeypatch):
    """vLLM's runner, and ours."""
    monkeypatch.setattr(v2_graph, "Recorder", TapeRecorder)
    monkeypatch.setattr(TapeRecorder, "recorded", 0)
    define_kernels(monkeypatch)
    return build(monkeypatch, vllms_sample), build(monkeypatch, v2_graph.sampling_in_graphs(vllms_sample))


def same_step(pair, *args, but=(), **named):
    """Everything but the named is the same."""
    outputs = [serve(runner, *args, **named) for runner in pair]
    assert torch.equal(outputs[0].tokens, outputs[1].tokens)
    assert torch.equal(outputs[0].counts, outputs[1].counts)
    theirs, ours = map(everything, pair)
    different = [name for name in theirs if name not in but and not torch.equal(theirs[name], ours[name])]
    assert not different
    return outputs[1]


def test_states_and_drafts_are_vllms(pair):
    """Over requests that come and go, numbers of requests and parameters, and steps that no graph covers."""
    generator = torch.Generator().manual_seed(1)
    copies = []
    for seed in range(80):
        for slot in range(MOST):
            if torch.rand((), generator=generator) < 0.1:
                temperature = (0.0, 0.6, 1.0)[int(torch.randint(3, (), generator=generator))]
                for runner in pair:
                    admit(runner, slot, 10, temperature=temperature, seed=seed)
        count = int(torch.randint(1, 6, (), generator=generator))
        slots = torch.randperm(MOST, generator=generator)[:count].tolist()
        drafts = [K] * (count - 1) + [1] if seed % 7 == 3 else None
        found = same_step(pair, seed, slots, drafts, planned=2 if seed % 11 == 6 else K)
        copies.append((found, found.tokens.clone(), found.counts.clone()))
    assert all(torch.equal(found.tokens, tokens) and torch.equal(found.counts, n) for found, tokens, n in copies)
    theirs, ours = (runner.speculator.query_cudagraph_manager.replayed for runner in pair)
    assert ours == theirs, "the drafter's graph runs as often, and for as many requests"
    assert TapeRecorder.recorded < 25


def test_a_step_without_drafts(pair):
    """Only what a replay of the drafter's graph puts in place anew may differ."""
    anew = "_aux_staging", "_context_slot_mappings"
    for seed, planned in enumerate([K, 0, K, 0, 0, K]):
        same_step(pair, seed, [3, 1, 6, 0], planned=planned, but=anew if planned == 0 else ())
    replayed = [runner.speculator.query_cudagraph_manager.replayed for runner in pair]
    assert replayed == [[4, 4, 4]] * 2


def test_dummy_steps_in_between(pair):
    """vLLM gives the arguments of those by name."""
    for seed in range(4):
        same_step(pair, seed, [3, 1])
        for runner in pair:
            states = runner.sampler.sampling_states
            hidden, batch = make_step(runner, torch.Generator().manual_seed(90 + seed), [0, 1], 2)
            runner.speculator.propose(
                input_batch=batch,
                attn_metadata={},
                slot_mappings={},
                last_hidden_states=hidden,
                aux_hidden_states=runner.cudagraph_manager.aux_hidden_states,
                num_sampled=torch.ones(2, dtype=torch.int32),
                num_rejected=torch.zeros(2, dtype=torch.int32),
                last_sampled=runner.req_states.last_sampled_tokens,
                next_prefill_tokens=runner.req_states.next_prefill_tokens,
                temperature=states.temperature.gpu,
                seeds=states.seeds.gpu,
                dummy_run=True,
            )


def test_replays_call_neither_of_vllms(pair, monkeypatch):
    runner = pair[1]
    for seed in range(2):
        same_step(pair, seed, [3, 1])

    def fail(*args, **named):
        raise AssertionError("launched from Python")

    monkeypatch.setattr(model_runner, "post_update", fail)
    monkeypatch.setattr(dflash, "prepare_dflash_inputs", fail)
    serve(runner, 3, [5, 2])
    with pytest.raises(AssertionError, match="launched from Python"):
        serve(runner, 4, [5, 2], drafts=[K, 1])


def test_a_tail_that_cannot_be_captured(pair, monkeypatch):
    """The step in which that turns out has run its tail, which does not run again; there is no other capture."""

    def waiting(self, batch, *rest, **named):
        assert int(batch.idx_mapping[0]) < MOST
        return dflash.DFlashSpeculator.propose(self, batch, *rest, **named)

    def attempt(self, body):
        attempts.append(1)
        return record(self, body)

    attempts, record = [], TapeRecorder.record
    monkeypatch.setattr(Speculator, "propose", waiting)
    monkeypatch.setattr(TapeRecorder, "record", attempt)
    for seed in range(5):
        same_step(pair, seed, [3, 1])
    graphs = pair[1]._dspark_sample_graphs
    assert not graphs.recorded
    assert attempts == [1]


def test_steps_of_which_nothing_can_be_captured(pair, monkeypatch):
    def fail(self, body):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(TapeRecorder, "record", fail)
    for seed in range(4):
        same_step(pair, seed, [3, 1])
    assert not pair[1]._dspark_sample_graphs.limit


def test_more_requests_than_the_drafter_has_graphs_for(pair):
    """Then only sampling is in the graph."""
    for seed in range(3):
        same_step(pair, seed, [0, 1, 2, 3, 4])
    assert [each.drafting for each in pair[1]._dspark_sample_graphs.recorded.values()] == [None]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("speculator", "supports_decode_metadata_update", False),
        ("speculator", "acceptance_estimator", object()),
        ("speculator", "draft_watermarker", object()),
        ("speculator", "eplb_state", object()),
        ("speculator", "dp_size", 2),
        ("speculator", "query_cudagraph_manager", None),
        ("cudagraph_manager", "use_aux_hidden_state_outputs", False),
    ],
)
def test_what_the_host_has_a_part_in_stays_with_vllm(pair, owner, name, value):
    runner = pair[1]
    assert v2_tail.can_have_tail(runner)
    setattr(getattr(runner, owner), name, value)
    assert not v2_tail.can_have_tail(runner)


def test_recurrent_states_stay_with_vllm(pair):
    runner = pair[1]
    runner.model_state = object.__new__(type("Recurrent", (State,), {"postprocess_state": lambda *args: None}))
    assert not v2_tail.can_have_tail(runner)
