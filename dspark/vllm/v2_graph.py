"""One CUDA graph from the target's last hidden states to the drafter's graph, where vLLM launches kernel by kernel.

vLLM captures the target and the drafter. What stands between them, the output head, the gathering of drafts,
verification and its bookkeeping, and where possible the drafter's inputs (`v2_tail`), is launched from Python in every
step; with a small target the host is what a step waits for, and not the GPU. A step in which every request has all K
drafts is the same launches on the same buffers whatever it holds, but for the requests' slots and parameters, and can
be replayed. Which of temperature, min-p, top-k and top-p vLLM launches is decided on the host from the batch: there is
a graph for each of these choices and each number of requests.

Everything else takes vLLM's way: steps with prompts or missing drafts, grammars, log-probabilities, several ranks, and
what vLLM does to logits before temperature: penalties, bad words, logit bias, allowed tokens, minimal lengths, thinking
budgets, custom processors. Adaptive verification comes here with steps that trim nothing.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from dspark.vllm.v2_tail import Tail, can_have_tail

logger = init_logger("vllm.dspark")

# Graphs share memory for the logits of one step, and a second copy where parameters change them, which vLLM has not set
# aside: the first graph takes it, for the largest step of vLLM's graphs. With more logits the launches hardly matter.
MAX_LOGITS_BYTES = 2**29
# Of some 20 launches each. They are numbers of requests times choices of stages, of which a server meets few.
MAX_GRAPHS = 256

_ATTRIBUTE = "_dspark_sample_graphs"

Sampled = tuple[SamplerOutput, torch.Tensor, torch.Tensor]
Sample = Callable[..., Sampled]


class Kind(NamedTuple):
    """What the host decides for a step: a graph holds these launches and no others.

    Attributes:
        requests: how many.
        buffers: where the step's inputs are.
        processed: whether logits are copied and changed at all; with False, none of the others is set.
        temperature: some request's is neither 0 nor 1.
        min_p, top_k, top_p: some request has one.
        only_top_p: some request has a top-p and no top-k, for which small batches have launches of their own.
    """

    requests: int
    buffers: tuple[int, ...] = ()
    processed: bool = False
    temperature: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False
    only_top_p: bool = False


class Recorded(NamedTuple):
    """A graph: what replays it, its outputs, and the drafter's graph whose inputs it prepares, if it does."""

    replay: Callable[[], None]
    sampled: Sampled
    drafting: Any


class SampleGraphs:
    """Graphs of vLLM's `GPUModelRunner.sample` by kind of step, captured when first met."""

    def __init__(self, runner: Any, vllms_own: Sample) -> None:
        """Args: an initialised runner; its own method, unbound."""
        self.runner, self.vllms_own = runner, vllms_own
        self.width = runner.num_speculative_steps + 1
        most, device = runner.max_num_reqs, runner.device
        rows = torch.arange(most * self.width, device=device)
        self.rows, self.local_pos = rows, (rows % self.width).to(torch.int32)
        self.row_starts = torch.arange(0, (most + 1) * self.width, self.width, dtype=torch.int32, device=device)
        self.slots, self.slots_held = torch.zeros(most, dtype=torch.int64, device=device), b""
        self.parameters = Parameters(runner.sampler)
        self.deciding = arrays_deciding(runner.sampler)
        self.decided: tuple[list[bytes], Kind | None] = [], None
        self.tail = Tail(runner) if can_have_tail(runner) else None
        largest = min(most, len(runner.cudagraph_manager.hidden_states) // self.width)
        room = self.logits_bytes(largest, processed=True)
        self.recorder = Recorder(device, min(room, MAX_LOGITS_BYTES))
        self.recorded: dict[Kind, Recorded] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.limit = MAX_GRAPHS

    def sample(self, hidden_states: torch.Tensor, batch: Any) -> Sampled | None:
        """Contract of vLLM's method without a grammar; None if this step must take vLLM's way.

        Args:
            hidden_states: [tokens, padding included, hidden].
            batch: vLLM's `InputBatch`.
        """
        kind = self.kind(hidden_states, batch)
        known = self.recorded.get(kind) if kind is not None else None
        if kind is None or (known is None and len(self.recorded) >= self.limit):
            return None
        slots = batch.idx_mapping_np.tobytes()
        if slots != self.slots_held:
            self.slots_held = slots
            self.slots[: kind.requests].copy_(batch.idx_mapping)
        self.parameters.update()
        if known is None:
            drafting = self.tail.drafting(kind.requests) if self.tail is not None else None
            # The step itself, one by one, which also compiles what the graph will hold.
            sampled = self.run(hidden_states, batch, drafting)
            self.record(kind, hidden_states, batch, drafting)
        else:
            replay, sampled, drafting = known
            replay()
        output, num_sampled, num_rejected = sampled
        # vLLM copies these to the host while the next step may be running.
        tokens, num_sampled = output.sampled_token_ids.clone(), num_sampled.clone()
        output = replace(output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected)
        if self.tail is not None and drafting is not None:
            self.tail.has_run(batch, num_sampled, drafting)
        return output, num_sampled, num_rejected

    def kind(self, hidden_states: torch.Tensor, batch: Any) -> Kind | None:
        """Which graph computes this step; None if none does."""
        count = batch.num_reqs
        rows = count * self.width
        full = (
            hidden_states.data_ptr() == self.runner.cudagraph_manager.hidden_states.data_ptr()
            and batch.num_tokens == rows
            and batch.num_draft_tokens == rows - count
        )
        kind = self.stages(batch.idx_mapping_np) if full else None
        if kind is None or self.logits_bytes(count, processed=kind.processed) > MAX_LOGITS_BYTES:
            return None
        inputs = batch.input_ids, batch.positions, batch.seq_lens, batch.query_start_loc
        return kind._replace(buffers=tuple(each.data_ptr() for each in inputs))

    def logits_bytes(self, requests: int, *, processed: bool) -> int:
        """Memory for a step's logits, in 32 bits whatever their type, and for the copy in which they are changed."""
        return requests * self.width * self.runner.vocab_size * (8 if processed else 4)

    def stages(self, slots: np.ndarray) -> Kind | None:
        """`choose_stages`, remembered while the batch and what it decides by are the same."""
        known, kind = self.decided
        now = [slots.tobytes(), *(each.tobytes() for each in self.deciding)]
        if known != now:
            kind = choose_stages(self.runner.sampler, slots)
            self.decided = now, kind
        return kind

    def run(self, hidden_states: torch.Tensor, batch: Any, drafting: Any) -> Sampled:
        """vLLM's method, and the tail if a drafter's graph follows, of buffers that stay where they are."""
        count, rows = batch.num_reqs, batch.num_tokens
        slots = self.slots[:count]
        fixed = replace(
            batch,
            idx_mapping=slots,
            # A copy for one request too, of which an expansion would be a view: kernels go by addresses, not strides.
            expanded_idx_mapping=slots[:, None].repeat(1, self.width).view(-1),
            expanded_local_pos=self.local_pos[:rows],
            logits_indices=self.rows[:rows],
            cu_num_logits=self.row_starts[: count + 1],
            cu_num_logits_np=np.arange(0, rows + 1, self.width, dtype=np.int32),
        )
        with self.parameters.in_place():
            sampled = self.vllms_own(self.runner, hidden_states, fixed, None)
            if self.tail is not None and drafting is not None:
                self.tail.run(hidden_states, fixed, sampled)
        return sampled

    def record(self, kind: Kind, hidden_states: torch.Tensor, batch: Any, drafting: Any) -> None:
        """Capture the graph of this kind of step. If that fails, no other is attempted: torch goes on taking the pool
        for one that is being recorded to, and lets no other capture use it."""
        try:
            replay, sampled = self.recorder.record(lambda: self.run(hidden_states, batch, drafting))
            self.recorded[kind] = Recorded(replay, sampled, drafting)
        except RuntimeError as error:
            self.limit = 0
            cause = error.__context__ or error  # ending a broken capture fails too
            logger.warning(
                "dspark: what follows the target's CUDA graph could not be captured in one, and is launched: %s", cause
            )
        self.kept |= {tensor.data_ptr(): tensor for tensor in truncation_buffers()}


class Parameters:
    """Device copies of the requests' parameters by slot, at addresses that stay.

    vLLM writes each parameter into host buffers in turn, in every step or with every new request. A graph that has the
    address of one would read an earlier step's, and in a slot that is used again an earlier request's.
    """

    def __init__(self, sampler: Any) -> None:
        states = sampler.sampling_states
        sampled = [states.temperature, states.seeds, states.min_p, states.top_k, states.top_p]
        self.vllms = [*sampled, sampler.req_states.prefill_len]
        self.own = [torch.empty_like(each.gpu) for each in self.vllms]
        self.known = [b""] * len(self.vllms)

    def update(self) -> None:
        """Copy those that changed since the last call; the host has the same numbers to compare."""
        for place, (vllms, own, known) in enumerate(zip(self.vllms, self.own, self.known, strict=True)):
            now = vllms.np.tobytes()
            if known != now:
                own.copy_(vllms.gpu, non_blocking=True)
                self.known[place] = now

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While in the block, vLLM's functions read the copies."""
        theirs = [each.gpu for each in self.vllms]
        try:
            for each, own in zip(self.vllms, self.own, strict=True):
                each.gpu = own
            yield
        finally:
            for each, gpu in zip(self.vllms, theirs, strict=True):
                each.gpu = gpu


def choose_stages(sampler: Any, slots: np.ndarray) -> Kind | None:
    """What vLLM launches for the sampling parameters of these slots; None if some of it is not for graphs."""
    states, thinking = sampler.sampling_states, sampler.thinking_budget_state
    if states.max_num_logprobs(slots) != NO_LOGPROBS:
        return None
    if not sampler.needs_logits_processing[slots].any():
        return Kind(len(slots))
    acting = [slots_acted_on(each) for each in sampler.logits_processors]
    if any(each is None or each[slots].any() for each in acting):
        return None
    if thinking.enabled and thinking.use_thinking_budget[slots].any():
        return None
    temperature, top_p = states.temperature.np[slots], states.top_p.np[slots]
    has_top_k, has_top_p = states.top_k.np[slots] != states.vocab_size, top_p != 1.0
    return Kind(
        len(slots),
        processed=True,
        temperature=bool(((temperature != 0.0) & (temperature != 1.0)).any()),
        min_p=bool((states.min_p.np[slots] != 0.0).any()),
        top_k=bool(has_top_k.any()),
        top_p=bool(has_top_p.any()),
        only_top_p=bool((~has_top_k & has_top_p).any()),
    )


def arrays_deciding(sampler: Any) -> list[np.ndarray]:
    """All that `choose_stages` reads, by slot."""
    states, thinking = sampler.sampling_states, sampler.thinking_budget_state
    values = [each.np for each in (states.temperature, states.min_p, states.top_k, states.top_p)]
    flags = [slots_acted_on(each) for each in sampler.logits_processors]
    flags.append(thinking.use_thinking_budget if thinking.enabled else None)
    known = [each for each in flags if each is not None]
    return [sampler.needs_logits_processing, states.num_logprobs, *values, *known]


def slots_acted_on(processor: Any) -> np.ndarray | None:
    """Where a stage before temperature launches: the entries that are not 0. None for one that is not vLLM's own."""
    if type(processor) is LogitBiasState:
        return processor.use_logit_bias
    if type(processor) is PenaltiesState:
        return processor.use_penalty
    return processor.num_bad_words.np if type(processor) is BadWordsState else None


def truncation_buffers() -> list[torch.Tensor]:
    """What vLLM's top-k and top-p use in between. It replaces them by larger ones, while graphs go on using theirs."""
    module = sys.modules.get("vllm.v1.sample.ops.topk_topp_triton")
    if module is None:
        return []
    tables = [each for pair in module._TRITON_TABLE_CACHE.values() for each in pair]
    split = [each for parts in module._TRITON_SPLIT_CACHE.values() for each in parts.values()]
    return [*module._TRITON_BUFFER_CACHE.values(), *tables, *split]


class Recorder:
    """Captures graphs on a stream of its own, with one memory pool: one graph is over before another runs.

    A pool gives nothing back, and takes more for whatever fits into none of its free blocks: of batches that grow by a
    request at a time, each would add logits of its own. So the first graph leaves a free block that any logits fit.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        """Args: where; bytes of that block."""
        self.device, self.room = device, room
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Sampled]) -> tuple[Callable[[], None], Sampled]:
        """Returns: what replays `body`, and its outputs, which every replay writes anew.

        Raises:
            RuntimeError: something in it cannot be captured, or there is no memory.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            # Other threads wait for copies meanwhile, which must not end the capture.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outputs = body()
                # Free again at once; not before: what the first graph keeps, as cuBLAS does its workspace, lies beside.
                torch.empty(self.room, dtype=torch.uint8, device=self.device)
            finally:
                graph.capture_end()
        self.room = 0
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
    """Whether any step of this runner could be replayed: our verification, one rank, no LoRA, vLLM's graphs are there,
    and nothing is put out beside tokens: counts of NaN, sampling masks, routed experts."""
    sampler = runner.sampler
    return (
        getattr(runner.rejection_sampler, "in_graphs", False)
        and getattr(runner.cudagraph_manager, "hidden_states", None) is not None
        and runner.parallel_config.world_size == 1
        and runner.batch_sharder is None
        and runner.lora_config is None
        and not sampler.compute_nans
        and not sampler.return_sampling_mask
        and runner.aux_output_connector is None
    )
