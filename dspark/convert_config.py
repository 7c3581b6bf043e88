"""The config.json of either packaging for a canonical record: every field stated, or refused."""

from collections.abc import Sequence
from typing import Any

import torch

from dspark.config import DrafterConfig, LayerConfig
from dspark.families.findings import CheckpointError, Findings, refusal

SLIDING, FULL = "sliding_attention", "full_attention"
SPECULATORS_VERSION = "0.9.0"  # the release whose schema this is


def to_deepspec(config: DrafterConfig, dtype: torch.dtype, findings: Findings) -> dict[str, Any]:
    """config.json of DeepSpec's Qwen3 drafters.

    Args:
        config: the drafter.
        dtype: of its weights.
        findings: receives what the packaging cannot express, and notes on what it does not say.
    """
    if config.draft_vocab_size != config.vocab_size:
        findings.refuse(
            f"draft_vocab_size={config.draft_vocab_size} of vocab_size={config.vocab_size}",
            "a full vocabulary",
            "DeepSpec's drafters have neither a smaller head nor a d2t table: ids would be read without it.",
            "Keep this drafter in the speculators packaging.",
        )
    if config.target_hidden_size != config.hidden_size:
        findings.refuse(
            f"target_hidden_size={config.target_hidden_size} with hidden_size={config.hidden_size}",
            "equal widths",
            "DeepSpec builds the tap projection for the drafter's own width.",
            "Keep this drafter in the speculators packaging.",
        )
    layers = findings.attempt(_deepspec_layers, config.layers) or {}
    if config.num_target_layers is None:
        findings.note(
            "num_target_layers is not written: the source does not say how many layers the target has, so engines "
            "cannot check that it is the right one"
        )
    if not config.anchor_first:
        findings.note(
            "sample_from_anchor=false is written for the 1+N layout: engines read it, DeepSpec's own evaluator drafts "
            "anchor-first only"
        )
    lacking = [
        name for name, own in (("embed_tokens", config.owns_embedding), ("lm_head", config.owns_head)) if not own
    ]
    if lacking:
        findings.note(
            f"{' and '.join(lacking)} are not in the checkpoint: engines use the target's, DeepSpec's own class would "
            "leave them as they were initialised, at random; --target copies them from there"
        )
    raw: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **_backbone(config, dtype),
        "rope_theta": config.rope.theta,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_first,
        "target_layer_ids": [tap - 1 for tap in config.tap_ids],
        **_heads(config),
        **layers,
    }
    if config.num_target_layers is not None:
        raw["num_target_layers"] = config.num_target_layers
    if config.logit_scale != 1.0:
        raw["logit_scale"] = config.logit_scale
    return raw


def to_speculators(config: DrafterConfig, dtype: torch.dtype, findings: Findings) -> dict[str, Any]:
    """config.json of speculators; arguments as above."""
    if config.draft_vocab_size > config.vocab_size:
        findings.refuse(
            f"draft_vocab_size={config.draft_vocab_size} above vocab_size={config.vocab_size}",
            "at most as many",
            "speculators would look for a table between the two. Cut the padding rows of lm_head and markov_w2 off.",
        )
    if config.logit_scale != 1.0:
        findings.refuse(
            f"logit_scale={config.logit_scale}",
            "1",
            "speculators has no such field: drafts would be drawn from unscaled logits.",
            "Fold the scale into lm_head and markov_w2.",
        )
    layers = findings.attempt(_speculators_layers, config.layers) or {}
    non_causal = layers.pop("sliding_window_non_causal", False)
    if config.num_target_layers is not None:
        findings.note(
            f"num_target_layers={config.num_target_layers} is not written: speculators configs have no such field"
        )
    if config.verifier_name is None:
        findings.note("the verifier has no name: speculators needs it given where it is loaded (or here: --verifier)")
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": list(config.tap_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_first,
        "sliding_window_non_causal": non_causal,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        **_heads(config),
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.max_draft_tokens}],
            "verifier": {"name_or_path": config.verifier_name, "architectures": []},
        },
        "transformer_layer_config": {"model_type": "qwen3", **_backbone(config, dtype), **layers},
        "dtype": str(dtype).removeprefix("torch."),
    }


def _backbone(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    windows = [layer.window for layer in config.layers if layer.window is not None]
    return {
        "attention_bias": config.attention_bias,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [FULL if layer.window is None else SLIDING for layer in config.layers],
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "rope_type": config.rope.rope_type,
            "rope_theta": config.rope.theta,
            **config.rope.scaling,
        },
        "sliding_window": windows[0] if windows else None,
        "use_sliding_window": bool(windows),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def _heads(config: DrafterConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla" if config.markov_kind == "none" else config.markov_kind,
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "hidden+markov",
    }


def _one_window(layers: Sequence[LayerConfig]) -> None:
    windows = sorted({layer.window for layer in layers if layer.window is not None})
    if len(windows) > 1:
        raise refusal(
            f"layers with windows {', '.join(map(str, windows))}",
            "one sliding_window",
            "Some layers would see more or less context than in training. Neither packaging can say this.",
        )


def _deepspec_layers(layers: Sequence[LayerConfig]) -> dict[str, Any]:
    """Causality beside `layer_types`: by type needs no word, all alike takes `is_causal`."""
    _one_window(layers)
    if all(layer.causal == (layer.window is not None) for layer in layers):
        return {}
    if len({layer.causal for layer in layers}) == 1:
        return {"is_causal": layers[0].causal}
    raise _mixed(layers, "all layers causal, none, or exactly those with a window")


def _speculators_layers(layers: Sequence[LayerConfig]) -> dict[str, Any]:
    """Full-attention layers are bidirectional there; the sliding ones are causal, or all of them not."""
    _one_window(layers)
    if any(layer.causal and layer.window is None for layer in layers):
        raise _mixed(layers, "no causal layer without a window")
    sliding = {layer.causal for layer in layers if layer.window is not None}
    if len(sliding) > 1:
        raise _mixed(layers, "sliding layers that are all causal or all not")
    return {"sliding_window_non_causal": sliding == {False}}


def _mixed(layers: Sequence[LayerConfig], expected: str) -> CheckpointError:
    shown = ", ".join(
        f"{'causal' if layer.causal else 'bidirectional'} with {'full context' if layer.window is None else 'a window'}"
        for layer in layers
    )
    return refusal(
        f"layers {shown}",
        expected,
        "Block rows would see other rows than in training. Keep the drafter in its own packaging.",
    )
