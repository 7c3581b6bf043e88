"""DSpark on vLLM's V2 model runner: vLLM's speculator with our chain, and vLLM's rejection sampler with our kernels.

vLLM runs the backbone, the paged context, the CUDA graphs and the scheduling. Two things are ours: the sequential part
of drafting (`v2_chain`), inside vLLM's captured graph, and verification with probabilistic drafts (`v2_verify`).
`patches.py` puts the two classes here in the place of vLLM's, when an engine is built for this method.

A draft's q must reach the verification that happens one step later. The speculator owns it (`ProposalStore`), and the
rejection sampler finds the speculator through the speculative configuration that both were built from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models import ModelRegistry
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dspark.vllm.v2_chain import Chain, ProposalStore, StepInputs
from dspark.vllm.v2_models import DSparkDraftModel, stored_drafter
from dspark.vllm.v2_plan import OUR_ARCHITECTURE, Plan, describe, is_ours, make_plan
from dspark.vllm.v2_rows import StepBuffers
from dspark.vllm.v2_verify import Verifier

logger = init_logger("vllm.dspark")

_speculators: "WeakValueDictionary[int, Speculator]" = WeakValueDictionary()


class Speculator(DSparkSpeculator):
    """vLLM's DSpark speculator, drafting with our chain."""

    _speculator_name = "DSpark"
    chain: Chain | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.stored = stored_drafter(vllm_config)
        self.plan: Plan = make_plan(vllm_config, self.stored.config)
        super().__init__(vllm_config, device)
        self.store: ProposalStore | None = None
        if self.plan.chain != "vllm":
            target = vllm_config.model_config
            self.draft_logits = None  # vLLM's own, given back before ours is allocated
            self.store = ProposalStore(self.plan, self.max_num_reqs, target.get_vocab_size(), target.head_dtype, device)
            self.draft_logits = self.store.vllm_cache()
        _speculators[id(vllm_config.speculative_config)] = self

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """vLLM's loading, of our model class; says what will run."""
        cache = self.draft_logits
        if self.store is not None:
            self.draft_logits = None  # or vLLM allocates a buffer for the reduced vocabulary, which only its loop needs
        with _our_architecture(self.draft_model_config.hf_config):
            model = super().load_draft_model(target_model, target_attn_layer_names)
        self.draft_logits = cache
        if self.plan.options.check_ranks and model.markov_head is not None:
            check_ranks_agree("the Markov head's weights", digests(model.markov_head))
        kernels = ""
        if self.store is not None:
            self.chain = Chain(model, self.plan, self.store, adaptive=self.use_confidence_head)
            kernels = self.chain.description
        head = model.confidence_head
        line = describe(
            self.plan,
            path=self.draft_model_config.model,
            plugin=version("dspark"),
            vllm=vllm_version,
            kernels=kernels,
            calibrated=head is not None and head.scaling is not None,
        )
        logger.info("%s", line)
        return model

    def _sample_sequential(self, num_reqs: int, head_hidden: torch.Tensor) -> None:
        # vLLM asks the model's hook only after its own top-k branch; ours does both.
        if not self.model.sample_sequential(self, num_reqs, head_hidden):
            super()._sample_sequential(num_reqs, head_hidden)

    def walk_chain(self, num_reqs: int, head_hidden: torch.Tensor) -> bool:
        """Draft a block of each request into `draft_tokens`; contract of `DSparkDraftModel.sample_sequential`."""
        if self.chain is None:
            return False
        steps = self.num_speculative_steps
        hidden = head_hidden[self.sample_indices[: num_reqs * steps]]
        buffers = StepBuffers(
            input_ids=self.input_buffers.input_ids,
            rows=self.num_query_per_req,
            slots=self.sample_idx_mapping,
            positions=self.sample_pos,
            steps=steps,
            temperature=self.temperature,
            seeds=self.seeds,
        )
        step = StepInputs(
            base=self.model.compute_draft_logits(hidden).view(num_reqs, steps, -1),
            hidden=hidden.view(num_reqs, steps, -1),
            lead=None if self.sample_from_anchor else head_hidden[self._anchor_idx[:num_reqs]],
            rows=self.chain.gather(buffers, num_reqs),
        )
        self.chain.run(step, self.draft_tokens[:num_reqs], self.draft_token_confidence_probs[:num_reqs])
        return True

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM's, with the drafts of all ranks compared if that was asked for."""
        drafts = super().propose(*args, **kwargs)
        if self.plan.options.check_ranks:
            check_ranks_agree("drafts", drafts)
        return drafts


class Verification(RejectionSampler):
    """vLLM's rejection sampler, verifying with our kernels where the plan says so."""

    def __init__(self, sampler: Sampler, spec_config: Any, device: torch.device, **options: Any) -> None:
        super().__init__(sampler, spec_config, device, **options)
        self._speculator = _speculators[id(spec_config)]
        self._verifier = Verifier(self._speculator.store, sampler, self.num_speculative_steps)
        options = self._speculator.plan.options
        # Comparing ranks waits for the device.
        self.in_graphs = options.sampling_graph and not options.check_ranks
        # A request's plain steps read the same numbers as the last row of its speculative ones; which of them a token
        # comes from depends on the batch around it.
        sampler._sample_random = self._verifier.sample_plain

    def _verify(self, logits: torch.Tensor, draft_logits: torch.Tensor | None, *args: Any) -> Any:
        """Contract of vLLM's method: processed logits, sampled tokens [R, K + 1], number of them [R]."""
        draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, expanded, local, upper, verify_drafts = args
        processed = self.sampler.apply_sampling_params(
            logits, expanded, idx_mapping, idx_mapping_np, pos, draft_sampled, local, upper
        )
        tokens, counts = self._verifier.verify(
            processed, draft_sampled, verify_drafts, pos=pos, row_starts=cu_num_logits, slots=idx_mapping
        )
        if self._speculator.plan.options.check_ranks:
            check_ranks_agree("emitted tokens", tokens)
        return processed, tokens, counts


def make_speculator(vllms_own: Any, vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Any:
    """vLLM's `init_speculator`, with ours for drafters that are ours."""
    return Speculator(vllm_config, device) if is_ours(vllm_config) else vllms_own(vllm_config, device, req_states)


def make_rejection_sampler(
    vllms_own: type[RejectionSampler], sampler: Sampler, spec_config: Any, device: torch.device, **options: Any
) -> RejectionSampler:
    """A rejection sampler for an engine: ours where its speculator is ours and the plan says so."""
    speculator = _speculators.get(id(spec_config))
    if speculator is not None and speculator.plan.verification == "kernels":
        return Verification(sampler, spec_config, device, **options)
    return vllms_own(sampler, spec_config, device, **options)


def check_ranks_agree(what: str, tokens: torch.Tensor) -> None:
    """Compare `tokens` [R, n] (or other numbers) over the tensor-parallel ranks; waits for the device.

    Raises:
        RuntimeError: they differ; both rows are named.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return
    everyone = group.all_gather(tokens[None].contiguous(), dim=0)
    different = (everyone != everyone[:1]).any(-1).nonzero()
    if len(different):
        rank, row = different[0].tolist()
        raise RuntimeError(
            f"dspark: {what} differ between tensor-parallel ranks: row {row} is {everyone[0, row].tolist()} on"
            f" rank 0 and {everyone[rank, row].tolist()} on rank {rank}. The ranks no longer compute the same text"
        )


def digests(module: nn.Module) -> torch.Tensor:
    """[parameters, 2] int64: size of each and the bits of its sum, which two tensors hardly share by chance."""
    sums = torch.stack([each.detach().double().sum() for each in module.parameters()])
    sizes = torch.tensor([each.numel() for each in module.parameters()], device=sums.device)
    return torch.stack([sizes, sums.view(torch.int64)], dim=1)


@contextmanager
def _our_architecture(hf_config: Any) -> Iterator[None]:
    """While in the block, vLLM builds `DSparkDraftModel` for this config.

    Under a name of its own and only here, so that vLLM's class stays registered, is inspected from vLLM's cache, and
    serves every other configuration.
    """
    ModelRegistry.register_model(OUR_ARCHITECTURE, DSparkDraftModel)
    vllms_own, hf_config.architectures = hf_config.architectures, [OUR_ARCHITECTURE]
    try:
        yield
    finally:
        hf_config.architectures = vllms_own
