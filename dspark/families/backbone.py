"""Dimensions and rotary embedding of the Qwen3 backbone, which both supported packagings share.

DeepSpec's config is a deep copy of the target's text config, so fields such as `partial_rotary_factor`,
`mrope_section` or `use_sliding_window` may describe the target. Those that the trainer's own code never reads are noted
and left alone.
"""

from collections.abc import Mapping
from typing import Any

from dspark.config import RopeConfig
from dspark.families.fields import Fields, Found, integer, positive_number, section
from dspark.families.findings import Findings, refusal

WRONG_SHAPES = "The module would be built with another shape than the weights have."
# The types whose frequencies are the same at every length up to max_position_embeddings (nothing is drafted beyond it),
# with the parameters that each cannot do without.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS = frozenset({
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "truncate",
})  # fmt: skip
# Read separately, or without meaning for a drafter's one-dimensional positions.
ROPE_HANDLED = frozenset({
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "interleaved",
})  # fmt: skip
# Fields of arithmetic that is not implemented: the value that leaves it out, and what any other would lead to.
VARIANTS = {
    "attention_value_scale": (1, "Attention values would not be scaled as in training."),
    "is_neox_style": (True, "Rotary pairs, which are interleaved then, would be taken from the wrong places."),
    "rope_is_neox_style": (True, "Rotary pairs, which are interleaved then, would be taken from the wrong places."),
    "log_snr_conditioning": (False, "The block would be computed without it."),
    "attention_sink_bias": (False, "The block would be computed without it."),
}


def read_dimensions(fields: Fields) -> dict[str, int]:
    """Sizes from the config, named as in `DrafterConfig`; the tensors are compared with them later."""

    def size(name: str, consequence: str = WRONG_SHAPES) -> int:
        return fields.integer(name, minimum=1, consequence=consequence)

    hidden, heads, kv_heads = size("hidden_size"), size("num_attention_heads"), size("num_key_value_heads")
    head_dim = fields.optional_integer("head_dim", minimum=1, consequence=WRONG_SHAPES)
    if head_dim is None:
        head_dim = hidden // heads
    if heads % kv_heads:
        raise refusal(
            f"num_attention_heads={heads} with num_key_value_heads={kv_heads}",
            "a multiple",
            "Query heads could not be assigned to key/value heads. Correct them in config.json.",
        )
    if head_dim % 2:
        raise refusal(
            f"head_dim={head_dim}",
            "an even number",
            "Rotary embedding pairs the two halves of a head. Correct head_dim in config.json.",
        )
    activation = fields.find("hidden_act")
    if activation is not None and activation.value != "silu":
        raise refusal(
            str(activation), "'silu'", "The MLP would compute something else.", "Only SiLU-gated MLPs are supported."
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": size("vocab_size"),
        "max_position_embeddings": size(
            "max_position_embeddings", "Drafting would go on past the positions the drafter knows."
        ),
    }


def read_rms_norm_eps(fields: Fields, findings: Findings) -> float:
    """Epsilon of every norm."""
    found = fields.find("rms_norm_eps")
    if found is None:
        findings.assume("assumed rms_norm_eps=1e-06: the config has none, and that is the default of Qwen3")
        return 1e-6
    return positive_number(found, "Every norm would be off or divide by zero.")


def read_extras(fields: Fields, findings: Findings) -> dict[str, Any]:
    """`attention_bias` and `logit_scale`; fields that would change the arithmetic in ways not implemented are
    refused."""
    for name, (plain, consequence) in VARIANTS.items():
        found = fields.find(name)
        if found is not None and found.value != plain:
            raise refusal(str(found), f"{plain} or nothing", consequence, "This variant is not supported.")
    softcap = fields.find("final_logit_softcapping")
    if softcap is not None:
        positive_number(softcap, "Capped logits would be undefined.")
        findings.note(f"{softcap} ignored: neither trainer caps the logits of a Qwen3 drafter")
    bias = fields.flag("attention_bias")
    scale = fields.find("logit_scale") or Found("logit_scale", 1.0)
    return {
        "attention_bias": bias is not None and bias.value,
        "logit_scale": positive_number(scale, "Drafts would be drawn from wrongly scaled logits."),
    }


def read_rope(raw: Mapping[str, Any], findings: Findings) -> RopeConfig:
    """Rotary embedding from the section that holds the backbone's fields.

    Nested theta beats the flat one, which in a copied config may be the target's older value. A missing theta is
    refused: engines fill in 10,000 or 1,000,000, and acceptance then falls with the length of the text.
    """
    parameters = _rope_section(raw, findings)
    theta = _theta(raw, parameters, findings)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise refusal(
            f"rope_type={kind!r}",
            f"one of {', '.join(ROPE_TYPES)}",
            "Positions would be rotated by other frequencies than in training.",
            "Other types, also those that change with the length of the text, are not supported.",
        )
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if kind == "default":
        if partial not in (None, 1, 1.0):
            findings.note(f"partial_rotary_factor={partial} ignored: a copy of the target's; Qwen3 rotates whole heads")
        return RopeConfig(theta)
    if partial not in (None, 1, 1.0):
        raise refusal(
            f"rope_type={kind!r} with partial_rotary_factor={partial}",
            "a factor of 1",
            "No trainer can have run this: the tables do not fit the heads. Check where this config comes from.",
        )
    return RopeConfig(theta, kind, _scaling(kind, parameters))


def _rope_section(raw: Mapping[str, Any], findings: Findings) -> Mapping[str, Any]:
    nested, legacy = section(raw, "rope_parameters"), section(raw, "rope_scaling")
    by_layer = {key: value for key, value in nested.items() if isinstance(value, Mapping)}
    if by_layer:
        # The trainer looks for this entry first and then uses it in every layer, also in full-attention ones.
        chosen = "sliding_attention" if "sliding_attention" in by_layer else "full_attention"
        if chosen not in by_layer:
            raise refusal(
                f"rope_parameters has entries {sorted(by_layer)}",
                "sliding_attention or full_attention",
                "It would be unclear which of them the drafter was trained with. Correct config.json.",
            )
        findings.note(f"rope_parameters.{chosen} is used for every layer, as in the trainer")
        nested = by_layer[chosen]
    if not nested:
        return legacy
    kinds = [part.get("rope_type") or part.get("type") or "default" for part in (nested, legacy) if part]
    if len(set(kinds)) > 1:
        raise refusal(
            f"rope_parameters says rope_type={kinds[0]!r}, rope_scaling says {kinds[1]!r}",
            "one of them",
            "Positions would be rotated by other frequencies than in training. Remove the wrong one.",
        )
    return nested


def _theta(raw: Mapping[str, Any], parameters: Mapping[str, Any], findings: Findings) -> float:
    nested, flat = parameters.get("rope_theta"), raw.get("rope_theta")
    if nested is None and flat is None:
        raise refusal(
            "rope_theta is missing (looked in rope_parameters, rope_scaling and beside them)",
            "a number",
            "A guessed base rotates keys wrongly, and acceptance falls with the length of the text.",
            "Add the base the drafter was trained with.",
        )
    if nested is not None and flat is not None and nested != flat:
        findings.note(f"rope_theta={nested} of the nested rope section is used, not the flat rope_theta={flat}")
    return positive_number(Found("rope_theta", nested if nested is not None else flat), "Positions have no frequency.")


def _scaling(kind: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {key: value for key, value in parameters.items() if key not in ROPE_HANDLED and value is not None}
    lost = [key for key in ROPE_TYPES[kind] if key not in scaling]
    unknown = sorted(set(scaling) - ROPE_OPTIONS - set(ROPE_TYPES[kind]))
    if lost or unknown:
        raise refusal(
            f"rope_type={kind!r} with parameters {scaling}",
            f"{', '.join(ROPE_TYPES[kind])}" + (f" and no {', '.join(unknown)}" if unknown else ""),
            "Positions would be rotated by other frequencies than in training. Correct the rope section.",
        )
    for key in ROPE_TYPES[kind]:
        positive_number(Found(key, scaling[key]), "Frequencies would be undefined.")
    original = scaling.get("original_max_position_embeddings")
    if original is not None:
        integer(Found("original_max_position_embeddings", original), 1, "Frequencies would be undefined.")
    return scaling
