"""What vLLM launches between sampling and the drafter's graph, inside the graph of sampling (`v2_graph`).

The requests' state is advanced by the sampled tokens, the drafter's inputs are laid out and the target's hidden states
are put where the drafter's graph reads them. All of it is vLLM's own code: `postprocess_sampled`, and `propose` up to
the place where it replays its graph. Afterwards the runner calls both, and finds the work of this very batch done.

The state changes before the copy of the sampled tokens to the host starts, and not after: that copy reads tensors of
its own, and nothing that the runner does between the two looks at the state of requests that are past their prompts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.interface import ModelState


class Done(NamedTuple):
    """A step whose tail has run: vLLM's batch, the tensor that stands for its sampling, the drafter's graph."""

    batch: Any
    num_sampled: torch.Tensor
    drafting: Any


class Tail:
    """Runs the tail of a step ahead, and takes the place of the runner's own calls."""

    def __init__(self, runner: Any) -> None:
        """Args: a runner that `can_have_tail`; its `postprocess_sampled` and its speculator's `propose` become ours."""
        self.runner, self.speculator = runner, runner.speculator
        self.vllms_postprocess: Callable[..., None] = runner.postprocess_sampled
        self.vllms_propose: Callable[..., torch.Tensor] = runner.speculator.propose
        self.done: Done | None = None
        runner.postprocess_sampled, runner.speculator.propose = self.postprocess, self.propose

    def drafting(self, requests: int) -> Any:
        """The drafter's graph that vLLM will choose for so many requests; None if it will launch layer by layer."""
        width = self.speculator.num_query_per_req
        chosen = self.speculator.query_cudagraph_manager.dispatch(requests, requests * width, width, num_active_loras=0)
        return chosen if chosen.cg_mode == CUDAGraphMode.FULL else None

    def run(self, hidden_states: torch.Tensor, batch: Any, sampled: Any) -> None:
        """Everything before the drafter's graph, on the tensors given."""
        output, num_sampled, num_rejected = sampled
        runner, requests, params = self.runner, self.runner.req_states, self.runner.sampler.sampling_states
        self.vllms_postprocess(
            batch.idx_mapping, output.sampled_token_ids, num_sampled, num_rejected, batch.query_start_loc
        )
        with without_replay(self.speculator.query_cudagraph_manager):
            self.vllms_propose(
                batch,
                None,
                None,
                hidden_states,
                [each[: len(hidden_states)] for each in runner.cudagraph_manager.aux_hidden_states],
                num_sampled,
                num_rejected,
                requests.last_sampled_tokens,
                requests.next_prefill_tokens,
                params.temperature.gpu,
                params.seeds.gpu,
            )

    def has_run(self, batch: Any, num_sampled: torch.Tensor, drafting: Any) -> None:
        """The runner is about to ask for this step's tail."""
        self.done = Done(batch, num_sampled, drafting)

    def postprocess(
        self,
        idx_mapping: torch.Tensor,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        """vLLM's `postprocess_sampled`, which vLLM also calls by the names of its arguments."""
        if self.done is None or self.done.num_sampled is not num_sampled:
            self.vllms_postprocess(idx_mapping, sampled_tokens, num_sampled, *rest, **named)

    def propose(self, input_batch: Any, *rest: Any, **named: Any) -> torch.Tensor:
        """vLLM's `propose`, whose arguments dummy steps name; a step without drafts has no use for the drafter's graph
        and takes vLLM's way."""
        if self.done is None or self.done.batch is not input_batch or named.get("num_speculative_tokens") == 0:
            return self.vllms_propose(input_batch, *rest, **named)
        self.speculator.query_cudagraph_manager.run_fullgraph(self.done.drafting)
        return self.speculator.draft_tokens[: input_batch.num_reqs]


@contextmanager
def without_replay(manager: Any) -> Iterator[None]:
    """While in the block, the drafter's graph is prepared and not replayed."""
    manager.run_fullgraph = lambda chosen: None
    try:
        yield
    finally:
        del manager.run_fullgraph


def can_have_tail(runner: Any) -> bool:
    """Whether the tail of this runner's steps is launches alone: no estimator, watermarks, balancing of experts, other
    ranks or recurrent states, and no attention metadata of the drafter's that the host would build."""
    speculator = runner.speculator
    return (
        type(runner.model_state).postprocess_state is ModelState.postprocess_state
        and runner.cudagraph_manager.use_aux_hidden_state_outputs
        and speculator.query_cudagraph_manager is not None
        and speculator.supports_decode_metadata_update
        and speculator.acceptance_estimator is None
        and speculator.draft_watermarker is None
        and speculator.eplb_state is None
        and speculator.dp_size == 1
    )
