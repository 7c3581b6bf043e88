"""The exact tensor list of a resolved drafter, and how a file differs from it.

An allow-list in both directions: a tensor that is not applied costs acceptance as silently as one that is missing.
"""

import re

from dspark.config import DrafterConfig
from dspark.families.findings import Findings, refusal
from dspark.families.names import NamedTensors

LAYER = re.compile(r"layers\.(\d+)\.")
TABLES = frozenset({"d2t", "t2d"})  # checked by their contents, see vocabulary.py


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[str, ...]]:
    """Canonical name -> shape as names of `dimensions`."""
    shapes: dict[str, tuple[str, ...]] = {
        "fc.weight": ("hidden_size", "taps*target_hidden_size"),
        "hidden_norm.weight": ("hidden_size",),
        "norm.weight": ("hidden_size",),
    }
    if config.owns_embedding:
        shapes["embed_tokens.weight"] = ("vocab_size", "hidden_size")
    if config.owns_head:
        shapes["lm_head.weight"] = ("draft_vocab_size", "hidden_size")
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    if config.markov_rank:
        shapes["markov_head.markov_w1.weight"] = ("vocab_size", "markov_rank")
        shapes["markov_head.markov_w2.weight"] = ("draft_vocab_size", "markov_rank")
    if config.markov_kind == "gated":
        shapes["markov_head.gate_proj.weight"] = ("markov_rank", "hidden_size+markov_rank")
        shapes["markov_head.gate_proj.bias"] = ("markov_rank",)
    if config.markov_kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = ("3*markov_rank", "2*markov_rank+hidden_size")
        shapes["markov_head.joint_proj.bias"] = ("3*markov_rank",)
    if config.confidence != "none":
        width = "hidden_size+markov_rank" if config.confidence == "hidden+markov" else "hidden_size"
        shapes["confidence_head.proj.weight"] = ("1", width)
        shapes["confidence_head.proj.bias"] = ("1",)
    return shapes


def _layer_shapes(config: DrafterConfig) -> dict[str, tuple[str, ...]]:
    projections = {
        "self_attn.q_proj": ("num_attention_heads*head_dim", "hidden_size"),
        "self_attn.k_proj": ("num_key_value_heads*head_dim", "hidden_size"),
        "self_attn.v_proj": ("num_key_value_heads*head_dim", "hidden_size"),
        "self_attn.o_proj": ("hidden_size", "num_attention_heads*head_dim"),
    }
    shapes: dict[str, tuple[str, ...]] = {
        "input_layernorm.weight": ("hidden_size",),
        "post_attention_layernorm.weight": ("hidden_size",),
        "self_attn.q_norm.weight": ("head_dim",),
        "self_attn.k_norm.weight": ("head_dim",),
        "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
        "mlp.up_proj.weight": ("intermediate_size", "hidden_size"),
        "mlp.down_proj.weight": ("hidden_size", "intermediate_size"),
    }
    for name, shape in projections.items():
        shapes[f"{name}.weight"] = shape
        if config.attention_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def dimensions(config: DrafterConfig) -> dict[str, int]:
    """Sizes that shapes are written in."""
    hidden, rank, head_dim = config.hidden_size, config.markov_rank, config.head_dim
    return {
        "1": 1,
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size,
        "head_dim": head_dim,
        "num_attention_heads*head_dim": config.num_attention_heads * head_dim,
        "num_key_value_heads*head_dim": config.num_key_value_heads * head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "markov_rank": rank,
        "3*markov_rank": 3 * rank,
        "2*markov_rank+hidden_size": 2 * rank + hidden,
        "hidden_size+markov_rank": hidden + rank,
        "taps*target_hidden_size": len(config.tap_ids) * config.target_hidden_size,
    }


def check_tensors(config: DrafterConfig, tensors: NamedTensors, findings: Findings) -> None:
    """Compare a checkpoint's tensors with the list its config implies; every difference becomes a problem."""
    expected = expected_shapes(config)
    findings.attempt(_check_layers, config, tensors)
    findings.attempt(_check_names, config, set(expected), set(tensors.sources) - TABLES)
    sizes = dimensions(config)
    for name in expected.keys() & tensors.sources.keys():
        wanted = expected[name]
        if tensors.shape(name) != tuple(sizes[size] for size in wanted):
            findings.attempt(_refuse_shape, config, tensors, name, wanted)


def _check_layers(config: DrafterConfig, tensors: NamedTensors) -> None:
    found = {int(match[1]) for name in tensors.sources if (match := LAYER.match(name))}
    if found != set(range(config.num_layers)):
        raise refusal(
            f"layers found {sorted(found)}, num_hidden_layers={config.num_layers}",
            f"layers 0..{config.num_layers - 1}",
            "Layers would be dropped or left uninitialised.",
            "Correct num_hidden_layers in config.json, or fetch the complete checkpoint.",
        )


def _check_names(config: DrafterConfig, expected: set[str], found: set[str]) -> None:
    def in_known_layer(name: str) -> bool:
        match = LAYER.match(name)
        return match is None or int(match[1]) < config.num_layers  # surplus layers have their own message

    missing = sorted(expected - found)
    unexpected = sorted(name for name in found - expected if in_known_layer(name))
    if missing or unexpected:
        raise refusal(
            f"tensor names do not match {config.family}: missing {_listed(missing)}, unexpected {_listed(unexpected)}",
            f"exactly its {len(expected)} tensors",
            "A missing weight stays uninitialised and an unused one means that the drafter computes something else.",
            "Fetch the complete checkpoint, or check which variant of the drafter it is.",
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none") + more


def _refuse_shape(config: DrafterConfig, tensors: NamedTensors, name: str, wanted: tuple[str, ...]) -> None:
    shape, sizes = tensors.shape(name), dimensions(config)
    if name == "fc.weight" and shape is not None and len(shape) == 2 and shape[0] == config.hidden_size:
        taps, width = len(config.tap_ids), config.target_hidden_size
        raise refusal(
            f"fc.weight takes {shape[1]} features but {taps} taps of width {width} give {taps * width}",
            f"{shape[1] / width:g} taps, or target_hidden_size={shape[1] / taps:g}",
            "The drafter would read other target states than it was trained on.",
            "Correct the tap list in config.json.",
        )
    implied = ", ".join(size if size == "1" else f"{size}={sizes[size]}" for size in wanted)
    raise refusal(
        f"{name} has shape {list(shape or ())}",
        f"[{implied}], as the config implies",
        "Weights and config belong to different drafters.",
        "Correct the field in config.json.",
    )
