"""The two supported packagings: where each keeps its fields, and what its own schema takes for an absent one."""

from collections.abc import Mapping
from typing import Any

from dspark.families.fields import Fields, section
from dspark.families.findings import refusal
from dspark.families.heads import HeadDefaults
from dspark.families.qwen3 import NESTED, Dialect

BACKBONE = "transformer_layer_config"


def read_deepspec(raw: Mapping[str, Any]) -> Dialect:
    """DeepSpec Qwen3: a flat config, copied from the target's text config with the drafter's keys added; some
    re-exports nest the drafter's own.
    """
    return Dialect(
        family="DeepSpec Qwen3",
        raw=raw,
        backbone=raw,
        backbone_key="",
        drafter=Fields.of(raw, *NESTED),
        heads=HeadDefaults(),
        tables_together=False,
    )


def read_speculators(raw: Mapping[str, Any]) -> Dialect:
    """speculators: the backbone nested in `transformer_layer_config`, the drafter's keys beside it.

    Raises:
        CheckpointError: it is for another algorithm, or backbone or taps are undefined.
    """
    algorithm = raw["speculators_model_type"]
    stated = section(raw, "speculators_config").get("algorithm", algorithm)
    if algorithm != "dspark" or stated != "dspark":
        raise refusal(
            f"speculators checkpoint for algorithm {algorithm!r} (speculators_config.algorithm={stated!r})",
            'only "dspark" is supported',
            "Other algorithms have other inputs and other heads. Pass a DSpark drafter.",
        )
    for key in (BACKBONE, "aux_hidden_state_layer_ids"):
        if raw.get(key) is None:
            raise refusal(
                f"speculators config lacks {key}",
                "it to be present",
                "Backbone or taps are undefined. Fetch the complete config.json.",
            )
    return Dialect(
        family="speculators",
        raw=raw,
        backbone=section(raw, BACKBONE),
        backbone_key=BACKBONE,
        drafter=Fields((*Fields.of(raw, *NESTED).sections, (BACKBONE, section(raw, BACKBONE)))),
        heads=HeadDefaults(markov_rank=256, markov_kind="vanilla", confidence_with_markov=True),
        tables_together=True,
    )
