"""DeepSpec's Qwen3 packaging: a flat config, copied from the target's text config with the drafter's keys added."""

from collections.abc import Mapping
from typing import Any

from dspark.families.fields import Fields
from dspark.families.heads import HeadDefaults
from dspark.families.qwen3 import NESTED, Dialect

NAME = "DeepSpec Qwen3"


def read_dialect(raw: Mapping[str, Any]) -> Dialect:
    """Where a DeepSpec config keeps its fields; some re-exports nest the drafter's own."""
    return Dialect(
        family=NAME,
        raw=raw,
        backbone=raw,
        backbone_key="",
        drafter=Fields.of(raw, *NESTED),
        heads=HeadDefaults(),
        tables_together=False,
    )
