"""What a configuration must be for DSpark, checked before any model is loaded; on either model runner.

A combination that was not shown to be right is refused here with its reason; the alternative is output that is wrong,
or drafts that are silently never accepted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.logger import init_logger

from dspark.checkpoint import check_files, stored_calibration
from dspark.confidence import ConfidenceCalibration
from dspark.config import DrafterConfig
from dspark.drafter import check_num_draft_tokens
from dspark.families import CheckpointError, Findings
from dspark.families.container import open_container

logger = init_logger("vllm.dspark")


@dataclass(frozen=True)
class ServedTarget:
    """The target's facts for loading a drafter (`dspark.families.target.TargetFacts`).

    `input_embedding` and `output_head` are [rows, hidden_size]; before the model is loaded they have shapes only (meta
    tensors).
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    input_embedding: torch.Tensor
    output_head: torch.Tensor

    @classmethod
    def described_by(cls, model_config: ModelConfig) -> "ServedTarget":
        """Facts from the configuration alone."""
        vocab_size, hidden_size = model_config.get_vocab_size(), model_config.get_hidden_size()
        matrix = torch.empty(vocab_size, hidden_size, device="meta")
        return cls(vocab_size, model_config.get_total_num_hidden_layers(), hidden_size, matrix, matrix)


def check_configuration(config: VllmConfig) -> None:
    """Refuse what cannot work, and tell vLLM which target states to hand to the drafter.

    Raises:
        ValueError: every reason why this configuration cannot run; a problem of the checkpoint is a `CheckpointError`.
    """
    speculative = config.speculative_config
    drafter = resolve_drafter(speculative.draft_model_config.model, config.model_config)
    problems = [*_option_problems(speculative), *_engine_problems(config)]
    try:
        check_num_draft_tokens(drafter, speculative.num_speculative_tokens)
    except ValueError as error:
        problems.append(str(error).replace("num_draft_tokens", "num_speculative_tokens", 1))
    if problems:
        listed = "\n".join(f"  {index}. {problem}" for index, problem in enumerate(problems, 1))
        raise ValueError(f"dspark cannot run on vLLM's V1 model runner as configured:\n{listed}")
    # vLLM counts these as the drafter does: 0 is the embedding, k the output of layer k - 1.
    speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = list(drafter.tap_ids)


def check_v2_configuration(config: VllmConfig) -> None:
    """Refuse what would run wrongly on the V2 model runner, and put into vLLM's config of the drafter what our reading
    of the checkpoint says. Drafters that are not ours to serve are left alone.

    Raises:
        ValueError: every reason why this configuration cannot run; a problem of the checkpoint is a `CheckpointError`.
    """
    from dspark.vllm.v2_plan import is_ours, make_plan

    if not is_ours(config):
        return
    draft = config.speculative_config.draft_model_config
    drafter = resolve_drafter(draft.model, config.model_config)
    make_plan(config, drafter)
    align_drafter_config(draft.hf_config, drafter)


def align_drafter_config(hf_config: Any, drafter: DrafterConfig) -> None:
    """Give vLLM's config of the drafter the values that the checkpoint was resolved to.

    vLLM reads the same keys with other precedences and defaults: it takes a missing layout key of speculators for
    1+N only where its own conversion wrote one, ignores `sliding_window_non_causal`, and applies a
    `partial_rotary_factor` that is a copy of the target's.
    """
    hf_config.eagle_aux_hidden_state_layer_ids = list(drafter.tap_ids)  # 0 is the embedding, k the output of k - 1
    hf_config.sample_from_anchor = drafter.anchor_first
    hf_config.mask_token_id = drafter.mask_token_id
    hf_config.draft_vocab_size = drafter.draft_vocab_size
    if any(layer.causal != (layer.window is not None) for layer in drafter.layers):  # vLLM's own rule
        hf_config.is_causal = drafter.layers[0].causal  # all layers alike, or the plan would have refused it
    rope = getattr(hf_config, "rope_parameters", None)
    if isinstance(rope, dict) and drafter.rope.rope_type == "default":
        rope.pop("partial_rotary_factor", None)


@dataclass(frozen=True)
class StoredDrafter:
    """What a drafter's files say.

    Attributes:
        config: the checkpoint's record.
        calibration: of its confidence head, None where none lies beside the weights.
    """

    config: DrafterConfig
    calibration: ConfidenceCalibration | None


def resolve_drafter(path: str, target: ModelConfig) -> DrafterConfig:
    """The checkpoint's record, as in `read_drafter`."""
    return read_drafter(path, target).config


def read_drafter(path: str, target: ModelConfig) -> StoredDrafter:
    """Read a checkpoint's files, with every check that needs no weights.

    Raises:
        CheckpointError: the checkpoint is not a drafter, not a supported one, or not one for this target; or its
            calibration is of another head.
    """
    findings = Findings()
    container = findings.attempt(open_container, path)
    resolved = container and check_files(container, ServedTarget.described_by(target), None, findings)
    findings.raise_problems(path)
    if resolved is None or resolved.config is None:
        raise CheckpointError(f"{path}: nothing could be read from this drafter checkpoint")
    return StoredDrafter(resolved.config, stored_calibration(container, resolved))


def _option_problems(speculative: SpeculativeConfig) -> list[str]:
    """Fields of --speculative-config that this runner cannot honour."""
    problems = []
    method = speculative.rejection_sample_method
    if method != "standard":
        problems.append(
            f"rejection_sample_method={method!r}: only 'standard' is implemented on this runner; the others exist in"
            " vLLM's V2 runner"
        )
    if speculative.enable_adaptive_verification:
        problems.append("enable_adaptive_verification: needs the V2 runner; leave it out")
    if speculative.dspark_draft_topk is not None:
        problems.append(
            f"dspark_draft_topk={speculative.dspark_draft_topk}: the Markov step runs over the whole draft vocabulary"
            " here; leave it out"
        )
    if speculative.disable_padded_drafter_batch:
        problems.append("disable_padded_drafter_batch: the drafter needs the padded batch; leave it out")
    if speculative.use_local_argmax_reduction:
        problems.append("use_local_argmax_reduction: the Markov head needs the logits; leave it out")
    if speculative.num_speculative_tokens_per_batch_size:
        problems.append("num_speculative_tokens_per_batch_size: K is fixed on this runner; leave it out")
    for field in ("quantization", "revision", "code_revision", "kv_cache_dtype", "attention_backend", "max_model_len"):
        value = getattr(speculative, field)
        if value is not None:
            problems.append(f"{field}={value!r} has no effect on a DSpark drafter on this runner; leave it out")
    return problems


def _engine_problems(config: VllmConfig) -> list[str]:
    """Engine features that drafting was not shown to be right with."""
    parallel, model = config.parallel_config, config.model_config
    problems = [
        f"{field}={getattr(parallel, field)}: the drafter runs unsharded on one device; use 1"
        for field in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        )
        if getattr(parallel, field) != 1
    ]
    if parallel.use_ubatching:
        problems.append("dual-batch overlap: the drafter sees whole batches only; turn it off")
    if config.lora_config is not None:
        problems.append(
            "LoRA: the drafter was trained on the base model's states, and this was never tested; turn it off"
        )
    if config.kv_transfer_config is not None:
        problems.append(
            "a KV connector: rows restored by it would lack the drafter's context, which exists only for tokens that"
            " ran through the target here; leave --kv-transfer-config out"
        )
    if model.uses_mrope or model.is_encoder_decoder:
        problems.append(
            "the target has multi-dimensional positions or an encoder; the drafter counts positions of one text stream"
        )
    return problems
