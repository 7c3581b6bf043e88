"""The proposer that vLLM's V1 model runner calls after each of its steps.

    context rows of all tokens that the step committed  -> the drafter's paged cache
    one block per request                                -> K draft tokens, and q for vLLM's rejection sampler

The drafter is the library's own `Drafter`, and so are its heads, its loader and its sampling: only the cache behind it
and the batch in front of it are vLLM's. From vLLM's `DFlashProposer` come the preparation of padded batches and the
place in the runner.
"""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models import supports_multimodal
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from dspark.backbone import rotary_tables
from dspark.checkpoint import load_drafter
from dspark.config import DrafterConfig
from dspark.sampling import Drafting, OneHotProposal, SamplingTensors, Streams
from dspark.vllm.context import DraftContextLayer, PagedContext
from dspark.vllm.requirements import ServedTarget, resolve_drafter

logger = init_logger("vllm.dspark")


@dataclass(frozen=True)
class StepRows:
    """Where a step's tokens belong.

    Attributes:
        lengths: [B] int64, committed tokens of each request, which is the position of its anchor.
        committed: [T] bool, True for the rows of the step that stay; rejected drafts do not.
    """

    lengths: torch.Tensor
    committed: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, starts: torch.Tensor, num_rejected: torch.Tensor | None) -> "StepRows":
        """Rows of a padded batch.

        Args:
            positions: [T] absolute positions.
            starts: [B + 1], the first row of each request, and T.
            num_rejected: [B], rows at the end of each request that hold rejected drafts; None if there are none.
        """
        starts = starts.long()
        counts = starts.diff()
        kept = counts if num_rejected is None else counts - num_rejected
        row = torch.arange(positions.shape[0], device=positions.device)
        committed = row < (starts[:-1] + kept).repeat_interleave(counts)
        return cls(lengths=positions[starts[:-1]].long() + kept, committed=committed)


class DSparkProposer(DFlashProposer):
    """DSpark drafting for the V1 model runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        # DFlash's own constructor sizes buffers for a block inside the paged cache, which is not used here.
        super(DFlashProposer, self).__init__(vllm_config, device, pass_hidden_states_to_model=True, runner=runner)
        self.runner = runner
        self.supports_mm_inputs = False  # drafts are text; images reach the drafter through the target's states
        self.drafting: Drafting = self.speculative_config.draft_sample_method
        self._seeds: dict[str, int] = {}
        runner.use_aux_hidden_state_outputs = True

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, register its context layers with vLLM, and say what will run."""
        if not supports_eagle3(target_model):
            raise ValueError(
                f"dspark: {type(target_model).__name__} does not hand out the states of its layers in vLLM (it lacks"
                " the SupportsEagle3 interface), and the drafter reads them: this target cannot be used"
            )
        target = served_target(target_model, self.vllm_config)
        path = self.speculative_config.draft_model_config.model
        check_shareable(resolve_drafter(path, self.vllm_config.model_config), target)
        self.model = load_drafter(path, target=target, device=self.device, dtype=self.dtype)
        config = self.model.config
        self.context_layers = [
            DraftContextLayer(
                # vLLM orders layers by the only number in their name.
                f"dspark.layers.{target.num_layers + index}.context",
                config.num_key_value_heads,
                config.head_dim,
                self.dtype,
                self.vllm_config,
            )
            for index in range(config.num_layers)
        ]
        self._draft_attn_layer_names = {layer.name for layer in self.context_layers}
        # The runner skips the drafter for the whole batch when one request comes near this length. The other requests
        # would then lack context rows; here the drafter always runs, and its block needs no room in the cache.
        self.runner.effective_drafter_max_model_len = self.max_model_len + self.num_speculative_tokens + 1
        logger.info("%s", self.summary(path))

    def summary(self, path: str) -> str:
        """What runs and what does not, in one line."""
        config = self.model.config
        markov = f"{config.markov_kind} (rank {config.markov_rank})" if self.model.markov_head is not None else "none"
        inactive = ["Triton kernels (torch on this runner)"]
        if self.model.confidence_head is not None:
            inactive.append("confidence head (adaptive verification needs the V2 runner)")
        return (
            f"dspark {version('dspark')} on vLLM {vllm_version}, V1 model runner: {config.family} drafter {path};"
            f" Markov head {markov}, confidence head {config.confidence}; K={self.num_speculative_tokens} of"
            f" {config.max_draft_tokens} trained, {'anchor-first' if config.anchor_first else '1+N'} layout;"
            f" draft vocabulary {config.draft_vocab_size} of {self.model.target_vocab_size}; {self.drafting} drafting,"
            f" standard rejection sampling (vLLM's sampler); inactive: {', '.join(inactive)}"
            + "".join(f"; note: {note}" for note in config.notes)
        )

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Find the cache group whose block tables the context layers share."""
        groups = [
            gid
            for gid, group in enumerate(kv_cache_config.kv_cache_groups)
            if self._draft_attn_layer_names & set(group.layer_names)
        ]
        if len(groups) != 1:
            raise ValueError(
                f"dspark: vLLM spreads the drafter's context over {len(groups)} KV cache groups, and the V1 runner"
                " hands over the block tables of one. This happens for targets that mix kinds of attention (sliding"
                " window, recurrent): they are not supported on this runner"
            )
        self.kv_cache_gid = groups[0]

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's warm-up: there is nothing to compile or capture."""

    @torch.inference_mode()
    def propose(  # noqa: PLR0913  (the runner calls it so)
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """One step of the drafter, called by the runner with the target's step of the whole batch.

        Args:
            num_speculative_tokens: K.
            target_token_ids: [T], not needed.
            target_positions: [T] absolute positions of the tokens that ran through the target.
            target_hidden_states: [T, num_taps * hidden], the taps of those tokens.
            next_token_ids: [B], each request's newest token (the anchor).
            token_indices_to_sample: not needed.
            common_attn_metadata: block tables [B, n] and slots [T] of the drafter's cache group, and where each
                request's rows are.
            sampling_metadata: the requests' sampling parameters.
            mm_embed_inputs: not needed.
            num_rejected_tokens_gpu: [B], rejected drafts of this step; None if nothing was drafted.
            slot_mappings: not needed.

        Returns:
            [B, K] int64 draft tokens. A request that cannot be drafted for gets token 0 with q = 1, which the verifier
            treats like any greedy draft. The matching q waits for `take_last_draft_probs`.
        """
        batch_size, num_tokens = common_attn_metadata.num_reqs, target_positions.shape[0]
        starts = common_attn_metadata.query_start_loc[: batch_size + 1]
        rows = StepRows.of(target_positions, starts, num_rejected_tokens_gpu)
        slots = common_attn_metadata.slot_mapping[:num_tokens]
        self._store_context(
            target_hidden_states[rows.committed], target_positions[rows.committed], slots[rows.committed]
        )
        self._last_draft_probs = None
        tokens = torch.zeros(batch_size, num_speculative_tokens, dtype=torch.int64, device=self.device)
        drafting = self._drafting_rows(rows.lengths)
        if num_speculative_tokens == 0 or not len(drafting):
            return tokens
        sampling = self._sampling(sampling_metadata, batch_size)
        context = PagedContext(
            self.context_layers, common_attn_metadata.block_table_tensor[drafting], rows.lengths[drafting]
        )
        proposal = self.model.propose(
            context,
            next_token_ids[drafting].long(),
            sampling.rows(drafting),
            self._streams([self.runner.input_batch.req_ids[row] for row in drafting.tolist()]),
            num_speculative_tokens,
            self.drafting,
        ).proposal
        tokens[drafting] = proposal.tokens
        if not isinstance(proposal, OneHotProposal):
            draft_probs = OneHotProposal(tokens).dense(self.model.target_vocab_size)
            draft_probs[drafting] = proposal.dense(self.model.target_vocab_size).float()
            self._last_draft_probs = draft_probs
        return tokens

    def _store_context(self, taps: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the context rows of committed tokens: taps [T, num_taps * hidden], positions [T], slots [T]."""
        features = self.model.context_features(taps[None])
        cos, sin = rotary_tables(self.model.config, positions[None], self.model.dtype)
        for layer, store in zip(self.model.layers, self.context_layers, strict=True):
            keys, values = layer.self_attn.keys_values(features, cos, sin)
            store.store(slots, keys[0], values[0])

    def _drafting_rows(self, lengths: torch.Tensor) -> torch.Tensor:
        """Requests to draft for [n]: prefill is finished, and the block ends within the drafter's positions."""
        unfinished = self.runner.discard_request_mask.gpu[: len(lengths)]
        config = self.model.config
        fits = lengths + config.block_size <= config.max_position_embeddings
        return (fits & ~unfinished).nonzero()[:, 0]

    def _sampling(self, metadata: SamplingMetadata, batch_size: int) -> SamplingTensors:
        """The requests' parameters as far as they shape q: temperature, top-k and top-p.

        Requests with structured output are drafted greedily. vLLM drops drafts that the grammar forbids before they are
        verified; were they drawn at random, whether one is dropped would depend on the draw, and the output would be
        biased. A greedy draft is dropped or not whatever is drawn, which is exact.
        """
        zeros = torch.zeros(batch_size, dtype=torch.float64, device=self.device)
        temperature = zeros if metadata.temperature is None else metadata.temperature[:batch_size].double()
        structured = [
            self.runner.requests[request].sampling_params.structured_outputs is not None
            for request in self.runner.input_batch.req_ids[:batch_size]
        ]
        return SamplingTensors(
            temperature=temperature.masked_fill(torch.tensor(structured, device=self.device), 0.0),
            top_k=zeros.long() if metadata.top_k is None else metadata.top_k[:batch_size].long(),
            top_p=zeros + 1 if metadata.top_p is None else metadata.top_p[:batch_size].double(),
            min_p=zeros,  # refused by vLLM together with any speculative method
        )

    def _streams(self, requests: list[str]) -> Streams:
        """Draft noise of each request, keyed by its seed, or by a number drawn when the request is first seen.

        vLLM draws the acceptance and recovery noise from its own generators, so that draft noise never meets it.
        """
        alive = self.runner.requests
        self._seeds = {request: seed for request, seed in self._seeds.items() if request in alive}
        for request in requests:
            if request not in self._seeds:
                seed = alive[request].sampling_params.seed
                self._seeds[request] = int(torch.randint(2**62, ())) if seed is None else _signed(seed)
        return Streams(torch.tensor([self._seeds[request] for request in requests], device=self.device))


def served_target(model: nn.Module, config: VllmConfig) -> ServedTarget:
    """Facts and raw matrices of the loaded target, without the rows that vLLM pads its vocabulary with.

    A matrix that vLLM does not keep as plain floating-point weights is described by its shape only.
    """
    language_model = model.get_language_model() if supports_multimodal(model) else model
    described = ServedTarget.described_by(config.model_config)
    inner = getattr(language_model, "model", language_model)

    def matrix(module: nn.Module | None) -> torch.Tensor:
        weight = getattr(module, "weight", None)
        if weight is None or not weight.is_floating_point() or weight.shape[-1] != described.hidden_size:
            return described.input_embedding
        return weight.data[: described.vocab_size]

    return ServedTarget(
        described.vocab_size,
        described.num_layers,
        described.hidden_size,
        matrix(getattr(inner, "embed_tokens", None)),
        matrix(getattr(language_model, "lm_head", None)),
    )


def check_shareable(drafter: DrafterConfig, target: ServedTarget) -> None:
    """Refuse a drafter that needs a matrix of the target which vLLM holds in another form (ValueError)."""
    for name, owned, matrix in (
        ("embed_tokens", drafter.owns_embedding, target.input_embedding),
        ("lm_head", drafter.owns_head, target.output_head),
    ):
        if not owned and matrix.is_meta:
            raise ValueError(
                f"dspark: the drafter ships no {name} and would share the target's, but vLLM holds that matrix"
                " quantised or packed: use a drafter that ships its own, or the unquantised target"
            )


def _signed(seed: int) -> int:
    """The 64 bits of a request's seed as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63
