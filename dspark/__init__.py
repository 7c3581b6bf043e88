"""Speculative decoding with DSpark drafters.

A drafter proposes a block of tokens from the target model's own hidden states, the target verifies the block in one
pass, and rejection sampling keeps the output distribution exactly the target's.

    target = dspark.HFTarget.from_pretrained("path/to/target")
    drafter = dspark.load_drafter("path/to/drafter", target=target)
    dspark.generate(target, drafter, ["Once upon a time"], dspark.SamplingParams(temperature=0.7))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.checkpoint import load_drafter as load_drafter
    from dspark.config import DrafterConfig as DrafterConfig
    from dspark.drafter import Draft as Draft
    from dspark.drafter import Drafter as Drafter
    from dspark.loop import generate as generate
    from dspark.records import Generation as Generation
    from dspark.records import StepRecord as StepRecord
    from dspark.sampling import SamplingParams as SamplingParams
    from dspark.target import HFTarget as HFTarget

__version__ = "0.1.0"

_HOME = {
    "Draft": "dspark.drafter",
    "Drafter": "dspark.drafter",
    "DrafterConfig": "dspark.config",
    "Generation": "dspark.records",
    "HFTarget": "dspark.target",
    "SamplingParams": "dspark.sampling",
    "StepRecord": "dspark.records",
    "generate": "dspark.loop",
    "load_drafter": "dspark.checkpoint",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `dspark --help` and the vLLM plug-in must not wait for transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
