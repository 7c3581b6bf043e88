"""One CUDA graph from the target's last hidden states to the tokens of a step, where vLLM launches kernel by kernel.

vLLM captures the target and the drafter. What stands between them, the output head, the gathering of drafts,
verification and its bookkeeping, is launched from Python in every step; with a small target the host is what a step
waits for, and not the GPU. A step in which every request has all K drafts is the same launches on the same buffers
whatever it holds, but for the requests' slots, and can be replayed.

Everything else takes vLLM's way: steps with prompts or missing drafts, grammars, log-probabilities, sampling parameters
that change logits (temperatures other than 0 and 1, truncation, penalties), several ranks. Adaptive verification, whose
graphs are for numbers of tokens, comes here with steps that trim nothing and fill their graph.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

logger = init_logger("vllm.dspark")

# A graph keeps its logits, which vLLM has not set memory aside for: with more, the launches hardly matter.
MAX_LOGITS_BYTES = 2**28

_ATTRIBUTE = "_dspark_sample_graphs"

Sampled = tuple[SamplerOutput, torch.Tensor, torch.Tensor]
Sample = Callable[..., Sampled]


class SampleGraphs:
    """Graphs of vLLM's `GPUModelRunner.sample` by padded number of requests, captured when first met."""

    def __init__(self, runner: Any, vllms_own: Sample) -> None:
        """Args: an initialised runner; its own method, unbound."""
        self.runner, self.vllms_own = runner, vllms_own
        self.width = runner.num_speculative_steps + 1
        most, device = runner.max_num_reqs, runner.device
        rows = torch.arange(most * self.width, device=device)
        self.rows, self.local_pos = rows, (rows % self.width).to(torch.int32)
        self.row_starts = torch.arange(0, (most + 1) * self.width, self.width, dtype=torch.int32, device=device)
        self.slots = torch.zeros(most, dtype=torch.int64, device=device)
        self.recorder = Recorder(device)
        self.recorded: dict[int, tuple[Callable[[], None], Sampled]] = {}
        self.enabled = True

    def sample(self, hidden_states: torch.Tensor, batch: Any) -> Sampled | None:
        """Contract of vLLM's method without a grammar; None if this step must take vLLM's way.

        Args:
            hidden_states: [tokens, padding included, hidden].
            batch: vLLM's `InputBatch`.
        """
        if not self.enabled or not self.covers(hidden_states, batch):
            return None
        padded, count = len(hidden_states) // self.width, batch.num_reqs
        self.slots[:count].copy_(batch.idx_mapping)
        known = self.recorded.get(padded)
        if known is None:
            # The step itself, one by one, which also compiles what the graph will hold.
            sampled = self.run(hidden_states, batch)
            self.record(hidden_states, batch)
        else:
            replay, sampled = known
            replay()
        output, num_sampled, num_rejected = sampled
        # vLLM copies a step's tokens to the host while the next step may be running.
        num_sampled, num_rejected = num_sampled[:count].clone(), num_rejected[:count].clone()
        tokens = output.sampled_token_ids[:count].clone()
        output = replace(output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected)
        return output, num_sampled, num_rejected

    def covers(self, hidden_states: torch.Tensor, batch: Any) -> bool:
        """Whether a graph computes this step."""
        sampler, slots = self.runner.sampler, batch.idx_mapping_np
        count, rows = batch.num_reqs, len(hidden_states)
        return (
            hidden_states.data_ptr() == self.runner.cudagraph_manager.hidden_states.data_ptr()
            and rows % self.width == 0
            and batch.num_tokens == count * self.width
            and batch.num_draft_tokens == count * (self.width - 1)
            and rows * self.runner.vocab_size * 4 <= MAX_LOGITS_BYTES
            and not sampler.needs_logits_processing[slots].any()
            and sampler.sampling_states.max_num_logprobs(slots) == NO_LOGPROBS
        )

    def run(self, hidden_states: torch.Tensor, batch: Any) -> Sampled:
        """vLLM's method on the whole padded batch, of buffers that stay where they are."""
        rows = len(hidden_states)
        padded = rows // self.width
        # What is read on the host: any slot does for padding, since these requests ask for nothing special.
        slots_np = np.full(padded, batch.idx_mapping_np[0], batch.idx_mapping_np.dtype)
        slots_np[: batch.num_reqs] = batch.idx_mapping_np
        slots = self.slots[:padded]
        fixed = replace(
            batch,
            num_reqs=padded,
            num_tokens=rows,
            num_draft_tokens=rows - padded,
            idx_mapping=slots,
            idx_mapping_np=slots_np,
            expanded_idx_mapping=slots[:, None].expand(padded, self.width).reshape(-1),
            expanded_local_pos=self.local_pos[:rows],
            logits_indices=self.rows[:rows],
            cu_num_logits=self.row_starts[: padded + 1],
            cu_num_logits_np=np.arange(0, rows + 1, self.width, dtype=np.int32),
        )
        return self.vllms_own(self.runner, hidden_states, fixed, None)

    def record(self, hidden_states: torch.Tensor, batch: Any) -> None:
        """Capture the graph of this padded number of requests; without it, steps take vLLM's way."""
        padded = len(hidden_states) // self.width
        try:
            self.recorded[padded] = self.recorder.record(lambda: self.run(hidden_states, batch))
        except RuntimeError as error:
            self.enabled = False
            logger.warning("dspark: sampling could not be captured in a CUDA graph and is launched instead: %s", error)


class Recorder:
    """Captures graphs on a stream of its own, with one memory pool: one graph is over before another runs."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Sampled]) -> tuple[Callable[[], None], Sampled]:
        """Returns: what replays `body`, and its outputs, which every replay writes anew.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            # Other threads wait for copies meanwhile, which must not end the capture.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outputs = body()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        return graph.replay, outputs


def sampling_in_graphs(vllms_own: Sample) -> Sample:
    """vLLM's `GPUModelRunner.sample`, in graphs where our verification runs and a step allows it."""

    @wraps(vllms_own)
    def sample(self: Any, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Sampled:
        graphs = getattr(self, _ATTRIBUTE, None)
        if graphs is None and can_use_graphs(self):
            graphs = SampleGraphs(self, vllms_own)
            setattr(self, _ATTRIBUTE, graphs)
        sampled = None if graphs is None or grammar_output is not None else graphs.sample(hidden_states, input_batch)
        return vllms_own(self, hidden_states, input_batch, grammar_output) if sampled is None else sampled

    return sample


def can_use_graphs(runner: Any) -> bool:
    """Whether any step of this runner could be replayed: our verification, one rank, and vLLM's graphs are captured."""
    sampler = runner.sampler
    return (
        getattr(runner.rejection_sampler, "in_graphs", False)
        and getattr(runner.cudagraph_manager, "hidden_states", None) is not None
        and runner.parallel_config.world_size == 1
        and runner.batch_sharder is None
        and runner.lora_config is None
        and not sampler.compute_nans
        and not sampler.return_sampling_mask
    )
