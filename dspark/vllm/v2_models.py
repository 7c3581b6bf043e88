"""The drafter on vLLM's V2 runner: vLLM's Qwen3 backbone with the library's own heads.

vLLM's class for these checkpoints builds the vanilla Markov head whatever the config says. This one builds the head of
the checkpoint (vanilla, gated, rnn, or none), from the same modules as the library, under the checkpoint's tensor
names. Backbone, paged context and the sharing of the target's embedding and head stay vLLM's.

Heads are replicated on every tensor-parallel rank, as in vLLM: they run K times per step, and sharding them would cost
a collective each time. All ranks therefore compute the same chain from the same gathered logits.
"""

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from dspark.checkpoint import check_finite
from dspark.families.names import IGNORED, canonical_name
from dspark.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead
from dspark.vllm.requirements import StoredDrafter, read_drafter

HEAD = "markov_head."


class DSparkBackbone(DFlashQwen3Model):
    """vLLM's backbone, and the two heads where vLLM expects them."""

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        drafter = stored_drafter(vllm_config).config
        self.markov_head = MARKOV_HEADS[drafter.markov_kind](drafter) if drafter.markov_rank else None
        self.confidence_head = ConfidenceHead(drafter) if drafter.confidence != "none" else None


class DSparkDraftModel(Qwen3DSparkForCausalLM):
    """A drafter in the DeepSpec or speculators packaging, as `DSparkSpeculator` of this package drives it."""

    model_cls = DSparkBackbone
    supports_pp = False  # a draft model is not cut into stages; vLLM warns of a class that says so and cannot

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # The parent's own constructor names its backbone; that of the class above takes `model_cls`.
        DFlashQwen3ForCausalLM.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.stored = stored_drafter(vllm_config)
        self.drafter = self.stored.config
        self.num_draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.target_vocab_size = vllm_config.model_config.get_vocab_size()
        if self.drafter.draft_vocab_size >= self.target_vocab_size:
            self.draft_id_to_target_id = None  # draft ids are target ids; rows beyond the target's are cropped

    @property
    def markov_head(self) -> MarkovHead | None:
        """The library's module of the checkpoint's head."""
        return self.model.markov_head

    @property
    def confidence_head(self) -> ConfidenceHead | None:
        """The library's module; None if the checkpoint has none."""
        return self.model.confidence_head

    @property
    def logit_scale(self) -> float:
        """What vLLM multiplies the base logits with; the bias is to be scaled likewise."""
        return float(self.logits_processor.scale)

    def draft_ids(self) -> torch.Tensor | None:
        """Target ids [draft vocabulary] int64 of the head's rows; None where row v is target token v."""
        offsets = self.draft_id_to_target_id
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the checkpoint's tensors, which `read_drafter` has compared with the expected list.

        Args:
            weights: stored names and tensors.

        Raises:
            CheckpointError: a weight is NaN or infinite.
        """
        # vLLM renames every gate_proj into a fused one, that of a gated head too; ours are copied as they are.
        head: dict[str, torch.Tensor] = {}
        super().load_weights(_all_but_head(weights, head))
        if self.markov_head is not None:
            self.markov_head.load_state_dict(head)
        calibration = self.stored.calibration
        if self.confidence_head is not None and calibration is not None:
            device = self.confidence_head.proj.weight.device
            self.confidence_head.scaling = torch.tensor(calibration.scaling, device=device)

    def sample_sequential(self, speculator: Any, num_reqs: int, head_hidden: torch.Tensor) -> bool:
        """vLLM's hook: draft K tokens of each request, inside the captured graph.

        Args:
            speculator: `DSparkSpeculator`.
            num_reqs: R, padding included.
            head_hidden: [R * query rows, hidden] after the final norm.

        Returns:
            False, having done nothing, if vLLM's own loop is to run.
        """
        return speculator.walk_chain(num_reqs, head_hidden)

    # What vLLM's own loop asks for; it runs with the vanilla head only.

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[R] target ids -> [R, rank]."""
        return self._vanilla_head().markov_w1(token_ids)

    def markov_bias(self, markov_embed: torch.Tensor) -> torch.Tensor:
        """[R, rank] -> [R, draft vocabulary]."""
        bias = self._vanilla_head().markov_w2(markov_embed)
        return bias if self.logit_scale == 1.0 else bias * self.logit_scale

    def apply_markov_bias_gathered(
        self, markov_embed: torch.Tensor, logits: torch.Tensor, values: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Corrected logits of chosen ids, scattered into `logits`.

        Args:
            markov_embed: [R, rank].
            logits: [R, draft vocabulary], -inf except where written.
            values: [R, k] base logits.
            index: [R, k] draft ids.
        """
        rows = self._vanilla_head().markov_w2.weight[index]
        bias = (rows @ markov_embed[..., None])[..., 0]
        return logits.scatter_(1, index, values + bias * self.logit_scale)

    def compute_confidence(self, head_hidden: torch.Tensor, markov_embed: torch.Tensor) -> torch.Tensor:
        """[N, hidden], [N, rank] -> probability [N] that the draft is accepted."""
        assert self.confidence_head is not None
        logits = self.confidence_head(head_hidden, markov_embed)
        return self.acceptance_probability(logits.view(-1, self.num_draft_tokens)).view(-1)

    def acceptance_probability(self, confidence_logits: torch.Tensor) -> torch.Tensor:
        """What adaptive verification ranks drafts by: [..., K] logits of the confidence head -> probabilities.

        The only place on this runner where the logit becomes a probability; the checkpoint's calibration acts here.
        """
        assert self.confidence_head is not None
        return torch.sigmoid(self.confidence_head.calibrated(confidence_logits))

    def _vanilla_head(self) -> MarkovHead:
        head = self.markov_head
        assert type(head) is MarkovHead, f"vLLM's own loop was reached with {type(head).__name__}"
        return head


_stored: "WeakValueDictionary[int, StoredDrafter]" = WeakValueDictionary()


def stored_drafter(vllm_config: VllmConfig) -> StoredDrafter:
    """What the drafter's files say: read by the first who asks, for an engine, and as long as somebody holds it.

    Everything was refused that is to be refused.
    """
    key = id(vllm_config.speculative_config)
    stored = _stored.get(key)
    if stored is None:
        with torch.device("cpu"):  # vLLM builds models with the GPU as the default device, and files are read here
            stored = read_drafter(vllm_config.speculative_config.draft_model_config.model, vllm_config.model_config)
        _stored[key] = stored
    return stored


def _all_but_head(
    weights: Iterable[tuple[str, torch.Tensor]], head: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under canonical names, without training leftovers; those of the Markov head go to `head`."""
    for stored, tensor in weights:
        name = canonical_name(stored)
        if IGNORED.search(name):
            continue
        if tensor.is_floating_point():
            check_finite(name, tensor)
        if name.startswith(HEAD):
            head[name.removeprefix(HEAD)] = tensor
        else:
            yield name, tensor
