"""Resolve a checkpoint with the Qwen3 backbone: what the DeepSpec and speculators packagings share.

A packaging says where its fields stand and what its schema's defaults are (`Dialect`); the rest is one path, so that
the same drafter written in either packaging resolves to the same record.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.config import DrafterConfig
from dspark.families.attention import read_layers
from dspark.families.backbone import read_dimensions, read_extras, read_rms_norm_eps, read_rope
from dspark.families.block import (
    MASK_TOKEN_KEYS,
    Layout,
    check_block,
    read_block_size,
    read_draft_topk,
    read_layout,
)
from dspark.families.container import Container
from dspark.families.expected import check_tensors
from dspark.families.fields import Fields, section
from dspark.families.findings import Findings, refusal
from dspark.families.heads import HeadDefaults, read_heads
from dspark.families.names import NamedTensors, name_tensors
from dspark.families.taps import read_taps
from dspark.families.vocabulary import check_ownership, check_reduction, read_draft_vocab_size

NESTED = ("dspark_config", "dflash_config", "eagle_config")
# Drafter keys that are read, at the top level or in a section of NESTED.
KNOWN_KEYS = frozenset({
    "block_size", "dspark_block_size", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id",
    "target_layer_ids", "dspark_target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
    "num_target_layers", "target_hidden_size", "draft_vocab_size", "dspark_draft_topk",
    "markov_rank", "dspark_markov_rank", "markov_head_type", "dspark_markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov",
    "sample_from_anchor", "query_zero_predicts_next", "dspark_bonus_anchor", "logits_start",
    "is_causal", "causal", "dflash_query_causal", "use_swa", "swa_window_size",
    "sliding_window_non_causal", "layer_types", "num_anchors",
})  # fmt: skip
PREFIXES = ("dspark", "dflash", "eagle", "markov", "confidence", "draft", "mask_", "anchor", "enable_confidence")


@dataclass(frozen=True)
class Dialect:
    """One packaging's reading of a config.

    Attributes:
        family: name that messages and records carry.
        raw: the whole config.
        backbone: the section with the backbone's fields.
        backbone_key: its dotted name, "" for the top level.
        drafter: sections with the drafter's own fields, in order of precedence.
        heads: schema defaults of the heads.
        tables_together: d2t and t2d are always written together.
    """

    family: str
    raw: Mapping[str, Any]
    backbone: Mapping[str, Any]
    backbone_key: str
    drafter: Fields
    heads: HeadDefaults
    tables_together: bool

    @property
    def backbone_fields(self) -> Fields:
        """The backbone's section, with the drafter's nested sections before it (both may hold `layer_types`)."""
        nested = tuple(part for part in self.drafter.sections if part[0] in NESTED)
        return Fields((*nested, (self.backbone_key, self.backbone)))


@dataclass(frozen=True)
class Resolved:
    """A checkpoint as far as it could be read: `config` is None where a field stands in the way, `tensors` where
    sizes do."""

    config: DrafterConfig | None
    tensors: NamedTensors | None
    dialect: Dialect

    def complete(self) -> tuple[DrafterConfig, NamedTensors]:
        """Both, where no problem was found."""
        assert self.config is not None, "a problem was found, and not raised"
        assert self.tensors is not None, "a problem was found, and not raised"
        return self.config, self.tensors


def resolve(
    dialect: Dialect, container: Container, layout: Layout | None, target_vocab_size: int | None, findings: Findings
) -> Resolved:
    """Read one checkpoint into the canonical record; problems go to `findings`.

    Args:
        dialect: where the fields stand.
        container: config and tensor headers.
        layout: the caller's choice of block layout, or None.
        target_vocab_size: Vt where the target is known.
        findings: receives problems and notes.
    """
    findings.attempt(_check_unknown_keys, dialect)
    size = findings.attempt(read_dimensions, dialect.backbone_fields)
    stored = container.tensors.values()
    tensors = None if size is None else findings.attempt(name_tensors, stored, size)
    parts = [
        size,
        _read_independent(dialect, layout, findings),
        None if size is None else _read_sized(dialect, size, findings),
        None if size is None or tensors is None else _read_tensors(dialect, size, tensors, findings),
    ]
    values: dict[str, Any] = {name: value for part in parts if part is not None for name, value in part.items()}
    if tensors is None or None in parts:
        return Resolved(None, tensors, dialect)
    verifier = findings.attempt(_verifier_name, dialect.raw)
    config = DrafterConfig(family=dialect.family, verifier_name=verifier, notes=tuple(findings.notes), **values)
    findings.attempt(check_block, config.block_size, config.anchor_first, config.mask_token_id, config.vocab_size)
    findings.attempt(check_reduction, tensors, config.draft_vocab_size, config.vocab_size, target_vocab_size)
    findings.attempt(_check_target_fields, config)
    check_tensors(config, tensors, findings)
    return Resolved(config, tensors, dialect)


def _read_independent(dialect: Dialect, layout: Layout | None, findings: Findings) -> dict[str, Any] | None:
    """Fields that need no sizes."""
    drafter, other_target = dialect.drafter, "The drafter would be matched with the wrong target."
    other_filler = "The block would be filled with the embedding of some other token."
    values = findings.gather(
        block_size=lambda: read_block_size(drafter),
        anchor_first=lambda: read_layout(drafter, dialect.raw, layout, findings),
        mask_token_id=lambda: drafter.integer(*MASK_TOKEN_KEYS, minimum=0, consequence=other_filler),
        tap_ids=lambda: read_taps(drafter),
        rope=lambda: read_rope(dialect.backbone, findings),
        rms_norm_eps=lambda: read_rms_norm_eps(dialect.backbone_fields, findings),
        num_target_layers=lambda: drafter.optional_integer("num_target_layers", minimum=1, consequence=other_target),
    )
    extras = findings.attempt(read_extras, drafter, findings)
    return None if values is None or extras is None else values | extras


def _read_sized(dialect: Dialect, size: dict[str, int], findings: Findings) -> dict[str, Any] | None:
    """Fields that need the sizes of the backbone."""
    cut, num_layers = "The fuse projection would be cut at the wrong places.", size["num_layers"]
    values = findings.gather(
        layers=lambda: read_layers(dialect.backbone_fields, dialect.drafter, num_layers, findings),
        target_hidden_size=lambda: dialect.drafter.optional_integer("target_hidden_size", minimum=1, consequence=cut),
    )
    if values is not None and values["target_hidden_size"] is None:
        values["target_hidden_size"] = size["hidden_size"]
    return values


def _read_tensors(
    dialect: Dialect, size: dict[str, int], tensors: NamedTensors, findings: Findings
) -> dict[str, Any] | None:
    """Fields that config and tensors decide together."""
    findings.attempt(check_ownership, dialect.raw, tensors)
    draft = findings.attempt(read_draft_vocab_size, dialect.drafter, tensors, size["vocab_size"], findings)
    heads = findings.attempt(read_heads, dialect.drafter, tensors, size["hidden_size"], dialect.heads, findings)
    if draft is None or heads is None:
        return None
    findings.attempt(read_draft_topk, dialect.drafter, draft, findings)
    return {
        "draft_vocab_size": draft,
        "owns_embedding": "embed_tokens.weight" in tensors.sources,
        "owns_head": "lm_head.weight" in tensors.sources,
        **heads,
    }


def _verifier_name(raw: Mapping[str, Any]) -> str | None:
    name = section(section(raw, "speculators_config"), "verifier").get("name_or_path")
    return None if name is None else str(name)


def _check_target_fields(config: DrafterConfig) -> None:
    if config.num_target_layers is not None and config.tap_ids[-1] > config.num_target_layers:
        raise refusal(
            f"target layer id {config.tap_ids[-1] - 1} is outside -1..{config.num_target_layers - 1} "
            f"(num_target_layers={config.num_target_layers})",
            "layers of the target",
            "The state that the drafter reads does not exist. Correct the tap list or num_target_layers.",
        )
    if not (config.owns_embedding and config.owns_head) and config.hidden_size != config.target_hidden_size:
        raise refusal(
            f"hidden_size={config.hidden_size} with target_hidden_size={config.target_hidden_size} and no own "
            f"{'head' if config.owns_embedding else 'embedding'}",
            "equal widths, or both matrices in the checkpoint",
            "The target's matrices do not fit. Fetch the complete checkpoint.",
        )


def _check_unknown_keys(dialect: Dialect) -> None:
    """Refuse drafter-specific keys that are not read; all other unknown keys are copies of the target's config."""
    unknown = [
        f"{prefix}.{key}={value!r}" if prefix else f"{key}={value!r}"
        for prefix, values in dialect.drafter.sections
        for key, value in values.items()
        if (prefix in NESTED or key.startswith(PREFIXES)) and key not in KNOWN_KEYS | set(NESTED) and value is not None
    ]
    if unknown:
        raise refusal(
            f"unknown drafter fields {', '.join(sorted(unknown))}",
            "fields that are known here",
            "They would be ignored, and the drafter would run unlike it was trained.",
            "Remove them if they have no effect on inference; otherwise this variant is not supported.",
        )
