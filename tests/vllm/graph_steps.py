"""Steps of a V2 runner on a CPU, for graphs: vLLM's sampler, requests that come and go, sampling in torch operations
that reads everything that vLLM's reads.

Logits are small integers and noise is integer hashing, so that numbers do not depend on how many rows are computed at a
time. The three kernels of vLLM's sampling parameters are replaced by their definitions. What kernels read is read as
they read it (`by_address`).
"""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import states
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

K, WIDTH, HIDDEN, VOCAB, MOST, TOKENS = 3, 4, 5, 32, 8, 64


def by_address(values):
    """A vector as kernels read it: entries that follow one another in memory, whatever the strides say."""
    return values.as_strided(values.shape, [1])


def batch_by_address(batch):
    """The same of all that is in a batch."""
    vectors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **{name: by_address(value) for name, value in vectors.items()})


def vllms_sample(runner, hidden_states, batch, grammar):
    """vLLM's `GPUModelRunner.sample`; what a request gets depends on that request only."""
    batch = batch_by_address(batch)
    sampler, rows = runner.sampler, batch.expanded_idx_mapping
    params = sampler.sampling_states
    logits = hidden_states[batch.logits_indices] @ runner.head
    pos, ids = batch.positions[batch.logits_indices], batch.input_ids[batch.logits_indices]
    prefill = sampler.req_states.prefill_len.gpu
    placeholder = (batch.expanded_local_pos > 0) & (pos - batch.expanded_local_pos < prefill[rows])
    ids = ids.masked_fill(placeholder, -1)
    bounds = batch.seq_lens_cpu_upper_bound.numpy()
    runner.launches.clear()
    processed = sampler.apply_sampling_params(
        logits, rows, batch.idx_mapping, batch.idx_mapping_np, pos, ids, batch.expanded_local_pos, bounds
    )
    keys = (params.seeds.gpu[rows] * 31 + pos * 77 + ids)[:, None] * 40503 + torch.arange(VOCAB) * 69069
    noise = (keys % 1009).float() / 101 * params.temperature.gpu[rows].sign()[:, None]
    drawn = (processed + noise).argmax(-1)
    # Where the requests' rows begin, and how many there are, without waiting for the device.
    taken = torch.full((batch.num_reqs, WIDTH), -1, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(batch.num_reqs), torch.from_numpy(np.diff(batch.cu_num_logits_np)))
    taken.index_put_((owner, batch.expanded_local_pos.long()), drawn)
    starts = batch.cu_num_logits
    whole = batch.seq_lens[: batch.num_reqs] >= prefill[batch.idx_mapping]
    num_sampled = (drawn[starts[:-1].long()] % WIDTH + 1).to(torch.int32) * whole
    num_rejected = (starts.diff() - num_sampled).to(torch.int32) * whole
    runner.calls.append("grammar" if grammar else batch.num_reqs)
    return SamplerOutput(taken, None, None, num_sampled, num_rejected), num_sampled, num_rejected


def tensors(sampled):
    output, num_sampled, num_rejected = sampled
    return output.sampled_token_ids, num_sampled, num_rejected


def define_kernels(patch, launches):
    """vLLM's kernels in torch; `launches` receives the names of those that run."""

    def apply_temperature(logits, rows, temperature):
        launches.append("temperature")
        values = temperature[rows]
        logits.div_(values.masked_fill(values == 0, 1.0)[:, None])

    def apply_min_p(logits, rows, min_p):
        launches.append("min_p")
        lowest = logits.max(-1, keepdim=True).values + min_p[rows].double().log()[:, None]
        logits.masked_fill_(logits < lowest, float("-inf"))

    def apply_top_k_top_p(logits, k, p, has_topp_only_rows=True):
        launches.append(("truncation", k is not None, p is not None, has_topp_only_rows))
        if k is not None and p is not None and not has_topp_only_rows:
            p = p.masked_fill(k == VOCAB, 1.0)  # which the flag promises not to be there
        return apply_top_k_top_p_pytorch(logits, k, p)

    patch.setattr(states, "apply_temperature", apply_temperature)
    patch.setattr(states, "apply_min_p", apply_min_p)
    patch.setattr(states, "apply_top_k_top_p", apply_top_k_top_p)


class OnHost(np.ndarray):
    """A tensor on the host where all others are on the device: reading it waits for nothing."""

    def numpy(self):
        return np.asarray(self)


class NoTail:
    """A model's state that is advanced by every step, as recurrent ones are: only sampling is in the graph."""

    def postprocess_state(self, slots, num_sampled, num_computed_tokens):
        raise AssertionError


def make_runner(patch, processors=()):
    """A runner of which only sampling is there."""
    patch.setattr(buffer_utils, "is_uva_available", lambda: False)
    launches: list = []
    define_kernels(patch, launches)
    device = torch.device("cpu")
    requests = RequestState(MOST, 256, TOKENS, K, VOCAB, device)
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(reasoning_config=None)
    return SimpleNamespace(
        num_speculative_steps=K,
        max_num_reqs=MOST,
        vocab_size=VOCAB,
        device=device,
        head=torch.randint(-2, 3, (HIDDEN, VOCAB), generator=generator).float(),
        rejection_sampler=SimpleNamespace(in_graphs=True),
        cudagraph_manager=SimpleNamespace(hidden_states=torch.zeros(TOKENS, HIDDEN)),
        parallel_config=SimpleNamespace(world_size=1),
        batch_sharder=None,
        lora_config=None,
        aux_output_connector=None,
        model_state=NoTail(),
        speculator=None,
        sampler=Sampler(config, MOST, VOCAB, device, requests, custom_logits_processors=processors),
        buffers=SimpleNamespace(
            input_ids=torch.zeros(TOKENS, dtype=torch.int32),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
            seq_lens=torch.zeros(MOST, dtype=torch.int32),
            query_start_loc=torch.zeros(MOST + 1, dtype=torch.int32),
        ),
        launches=launches,
        calls=[],
    )


def admit(runner, slot, prompt_len=10, **params):
    """A new request in a slot, with vLLM's bookkeeping of it."""
    requests, sampler = runner.sampler.req_states, runner.sampler
    requests.prompt_len.np[slot] = requests.prefill_len.np[slot] = prompt_len
    requests.prompt_len.copy_to_uva()
    requests.prefill_len.copy_to_uva()
    sampler.add_request(slot, SamplingParams(**params))


def make_step(runner, generator, slots, padded, drafts=None):
    """A step of vLLM's: hidden states and input batch; every request has K drafts unless stated."""
    runner.sampler.apply_staged_writes()  # vLLM does so in every step
    drafts = [K] * len(slots) if drafts is None else drafts
    widths = np.array([count + 1 for count in drafts])
    count, tokens, rows = len(slots), int(widths.sum()), padded * WIDTH
    runner.cudagraph_manager.hidden_states.copy_(torch.randint(-2, 3, (TOKENS, HIDDEN), generator=generator))
    for name, buffer in vars(runner.buffers).items():
        high = VOCAB if name == "input_ids" else 50
        buffer.copy_(torch.randint(0, high, buffer.shape, generator=generator))
    starts = np.concatenate([[0], widths.cumsum()]).astype(np.int32)
    runner.buffers.query_start_loc[: count + 1] = torch.tensor(starts)
    values = dict.fromkeys(field.name for field in fields(InputBatch)) | {
        "num_reqs": count,
        "num_reqs_after_padding": padded,
        "idx_mapping": torch.tensor(slots),
        "idx_mapping_np": np.array(slots),
        "expanded_idx_mapping": torch.tensor(np.repeat(slots, widths)),
        "expanded_local_pos": torch.tensor(np.concatenate([np.arange(width) for width in widths]), dtype=torch.int32),
        "num_tokens": tokens,
        "num_draft_tokens": tokens - count,
        "num_scheduled_tokens": widths,
        "query_start_loc": runner.buffers.query_start_loc[: padded + 1],
        "seq_lens": runner.buffers.seq_lens[:padded],
        "seq_lens_cpu_upper_bound": np.zeros(padded, np.int32).view(OnHost),
        "input_ids": runner.buffers.input_ids[:rows],
        "positions": runner.buffers.positions[:rows],
        "logits_indices": torch.arange(tokens),
        "cu_num_logits": torch.tensor(starts),
        "cu_num_logits_np": starts,
    }
    return runner.cudagraph_manager.hidden_states[:rows], InputBatch(**values)


def check_step(runner, sample, step):
    """The step's tokens are those of vLLM's way.

    Returns:
        What was sampled.
    """
    expected = tensors(vllms_sample(runner, *step, None))
    found = sample(runner, *step, None)
    assert found[0].num_sampled is found[1]
    for ours, theirs in zip(tensors(found), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    return found
