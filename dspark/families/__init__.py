"""Checkpoint packagings: recognise one, and resolve it to a `DrafterConfig`.

Read `recognise.py` for what is supported, `qwen3.py` for the one path from config and tensor names to the canonical
record; the other modules are one topic each (block layout, taps, heads, vocabulary, attention, backbone, tensor
names). Source: the trainers, DeepSpec (modeling/dspark) and speculators (models/dspark); where their code settles
nothing, vLLM 0.33 and SGLang 0.5.23.
"""

from dspark.families.block import Layout
from dspark.families.container import Container
from dspark.families.dialects import read_deepspec, read_speculators
from dspark.families.findings import CheckpointError, Findings
from dspark.families.qwen3 import Resolved, resolve
from dspark.families.recognise import Family, recognise, refuse_unsupported

DIALECTS = {"DeepSpec Qwen3": read_deepspec, "speculators": read_speculators}


def resolve_container(
    container: Container, layout: Layout | None, target_vocab_size: int | None, findings: Findings
) -> Resolved | None:
    """Recognise and resolve a checkpoint.

    Args:
        container: config and tensor headers.
        layout: the caller's choice of block layout, or None.
        target_vocab_size: Vt where the target is known.
        findings: receives problems and notes.

    Returns:
        What could be read, or None where no supported packaging was recognised.
    """

    def read() -> Resolved:
        family = recognise(container.raw, container.tensors)
        refuse_unsupported(family)
        return resolve(DIALECTS[family.name](container.raw), container, layout, target_vocab_size, findings)

    return findings.attempt(read)


__all__ = [
    "CheckpointError",
    "Container",
    "Family",
    "Findings",
    "Layout",
    "Resolved",
    "recognise",
    "refuse_unsupported",
    "resolve_container",
]
