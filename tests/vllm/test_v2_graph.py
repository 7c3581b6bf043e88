"""Sampling in a graph gives what vLLM's way gives, for the steps that it covers, and leaves the others alone.

There is no CUDA graph on a CPU: the recorder is replaced by one that runs its body again and writes into the outputs of
the first time, which is what replaying does. The runner is a stand-in with a sampling function that reads everything
that vLLM's reads.
"""

import itertools
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from dspark.vllm import v2_graph

K, WIDTH, HIDDEN, VOCAB, MOST, TOKENS = 3, 4, 5, 32, 8, 64


class Again:
    """Replaying by running once more."""

    recorded = 0

    def __init__(self, device):
        self.device = device

    def record(self, body):
        Again.recorded += 1
        outputs = body()

        def replay():
            for old, new in zip((outputs[0].sampled_token_ids, *outputs[1:]), tensors(body()), strict=True):
                old.copy_(new)

        for tensor in tensors(outputs):
            tensor.fill_(-7)  # capturing computes nothing
        return replay, outputs


def tensors(sampled):
    output, num_sampled, num_rejected = sampled
    return output.sampled_token_ids, num_sampled, num_rejected


def vllms_sample(runner, hidden_states, batch, grammar):
    """Numbers of a request that depend on all that vLLM's sampling reads, and on that request only."""
    rows = hidden_states[batch.logits_indices].sum(-1) + batch.input_ids[batch.logits_indices]
    rows = rows + 10 * batch.positions[batch.logits_indices] + 100 * batch.expanded_local_pos
    rows = rows + 1000 * runner.state[batch.expanded_idx_mapping]
    starts = batch.cu_num_logits.long()
    widest = int(starts.diff().max())
    taken = torch.full((batch.num_reqs, widest), -1, dtype=torch.int64)
    for request, (first, last) in enumerate(itertools.pairwise(starts)):
        taken[request, : last - first] = rows[first:last].long()
    num_sampled = (batch.seq_lens[: batch.num_reqs] + runner.state[batch.idx_mapping]).to(torch.int32)
    runner.calls.append("grammar" if grammar else batch.num_reqs)
    return SamplerOutput(taken, None, None, num_sampled, num_sampled + 1), num_sampled, num_sampled + 1


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(v2_graph, "Recorder", Again)
    Again.recorded = 0
    return SimpleNamespace(
        num_speculative_steps=K,
        max_num_reqs=MOST,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        rejection_sampler=SimpleNamespace(in_graphs=True),
        cudagraph_manager=SimpleNamespace(hidden_states=torch.zeros(TOKENS, HIDDEN)),
        parallel_config=SimpleNamespace(world_size=1),
        batch_sharder=None,
        lora_config=None,
        sampler=SimpleNamespace(
            compute_nans=False,
            return_sampling_mask=False,
            needs_logits_processing=np.zeros(MOST, dtype=bool),
            sampling_states=SimpleNamespace(max_num_logprobs=lambda slots: runner_logprobs[slots].max()),
        ),
        buffers=SimpleNamespace(
            input_ids=torch.zeros(TOKENS, dtype=torch.int32),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
            seq_lens=torch.zeros(MOST, dtype=torch.int32),
        ),
        state=torch.arange(MOST) * 3,
        calls=[],
    )


runner_logprobs = np.full(MOST, -1)


def make_step(runner, generator, slots, padded, drafts=None):
    """A step of vLLM's: hidden states and input batch; every request has K drafts unless stated."""
    drafts = [K] * len(slots) if drafts is None else drafts
    widths = np.array([count + 1 for count in drafts])
    count, tokens, rows = len(slots), int(widths.sum()), padded * WIDTH
    runner.cudagraph_manager.hidden_states.copy_(torch.randint(0, 99, (TOKENS, HIDDEN), generator=generator))
    for name, buffer in vars(runner.buffers).items():
        buffer.copy_(torch.randint(0, 9 if name == "seq_lens" else 50, buffer.shape, generator=generator))
    starts = np.concatenate([[0], widths.cumsum()]).astype(np.int32)
    values = dict.fromkeys(field.name for field in fields(InputBatch)) | {
        "num_reqs": count,
        "num_reqs_after_padding": padded,
        "idx_mapping": torch.tensor(slots),
        "idx_mapping_np": np.array(slots),
        "expanded_idx_mapping": torch.tensor(np.repeat(slots, widths)),
        "expanded_local_pos": torch.tensor(np.concatenate([np.arange(width) for width in widths]), dtype=torch.int32),
        "num_tokens": tokens,
        "num_draft_tokens": tokens - count,
        "seq_lens": runner.buffers.seq_lens[:padded],
        "input_ids": runner.buffers.input_ids[:rows],
        "positions": runner.buffers.positions[:rows],
        "logits_indices": torch.arange(tokens),
        "cu_num_logits": torch.tensor(starts),
        "cu_num_logits_np": starts,
    }
    return runner.cudagraph_manager.hidden_states[:rows], InputBatch(**values)


def test_a_replayed_step_is_vllms(runner):
    generator = torch.Generator().manual_seed(0)
    sample = v2_graph.sampling_in_graphs(vllms_sample)
    earlier = []
    for slots, padded in [([2], 1), ([5, 1, 0], 4), ([4], 1), ([7, 3, 6, 2], 4), ([0, 1], 4), ([2, 7], 2), ([1, 6], 2)]:
        hidden, batch = make_step(runner, generator, slots, padded)
        expected = tensors(vllms_sample(runner, hidden, batch, None))
        found = sample(runner, hidden, batch, None)
        assert found[0].num_sampled is found[1]
        for ours, theirs in zip(tensors(found), expected, strict=True):
            assert torch.equal(ours, theirs)
        earlier.append((found, [each.clone() for each in tensors(found)]))
    assert Again.recorded == 3, "one graph a padded number of requests"
    for found, copies in earlier:
        assert all(map(torch.equal, tensors(found), copies)), "a later step has written into an earlier one's tokens"


def test_graphs_for_numbers_of_tokens_take_the_same_way(runner):
    """Adaptive verification pads requests to what the tokens of a graph could hold; a part of a request is no row."""
    generator = torch.Generator().manual_seed(3)
    sample = v2_graph.sampling_in_graphs(vllms_sample)
    for slots in ([5, 1], [0, 6]):
        hidden, batch = make_step(runner, generator, slots, 2)
        batch = replace(batch, num_reqs_after_padding=MOST, seq_lens=runner.buffers.seq_lens)
        expected = tensors(vllms_sample(runner, hidden, batch, None))
        assert all(map(torch.equal, tensors(sample(runner, hidden, batch, None)), expected))
    assert Again.recorded == 1
    _, batch = make_step(runner, generator, [5, 1], 2)
    sample(runner, runner.cudagraph_manager.hidden_states[: 2 * WIDTH + 1], batch, None)
    assert Again.recorded == 1


def refuse_grammar(runner, step):
    return step, "grammar"


def refuse_logprobs(runner, step):
    runner.sampler.sampling_states.max_num_logprobs = lambda slots: 3
    return step, None


def refuse_processing(runner, step):
    runner.sampler.needs_logits_processing[5] = True
    return step, None


def refuse_other_hidden(runner, step):
    return (step[0].clone(), step[1]), None


def refuse_ranks(runner, step):
    runner.parallel_config.world_size = 2
    return step, None


def refuse_large(runner, step):
    runner.vocab_size = v2_graph.MAX_LOGITS_BYTES
    return step, None


@pytest.mark.parametrize(
    "refuse",
    [refuse_grammar, refuse_logprobs, refuse_processing, refuse_other_hidden, refuse_ranks, refuse_large],
)
def test_other_steps_take_vllms_way(runner, refuse):
    step, grammar = refuse(runner, make_step(runner, torch.Generator().manual_seed(1), [5, 1], 2))
    v2_graph.sampling_in_graphs(vllms_sample)(runner, *step, grammar)
    assert not Again.recorded
    assert runner.calls == ["grammar" if grammar else 2]


def test_a_step_with_missing_drafts_takes_vllms_way(runner):
    hidden, batch = make_step(runner, torch.Generator().manual_seed(2), [5, 1], 2, drafts=[K, 1])
    found = v2_graph.sampling_in_graphs(vllms_sample)(runner, hidden, batch, None)
    assert not Again.recorded
    assert all(map(torch.equal, tensors(found), tensors(vllms_sample(runner, hidden, batch, None))))


def test_sampling_goes_on_where_nothing_can_be_captured(runner, monkeypatch, caplog):
    def fail(self, body):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Again, "record", fail)
    sample = v2_graph.sampling_in_graphs(vllms_sample)
    for seed in range(3):
        hidden, batch = make_step(runner, torch.Generator().manual_seed(seed), [3, 1], 4)
        found = sample(runner, hidden, batch, None)
        assert all(map(torch.equal, tensors(found), tensors(vllms_sample(runner, hidden, batch, None))))
    assert runner._dspark_sample_graphs.enabled is False
