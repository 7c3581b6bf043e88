"""The exact tensor list of a resolved drafter, and how a file differs from it.

An allow-list in both directions: a tensor that is not applied costs acceptance as silently as one that is missing.
"""

import re
from dataclasses import replace

import torch

from dspark.config import DrafterConfig
from dspark.families.findings import Findings, refusal
from dspark.families.names import NamedTensors

LAYER = re.compile(r"layers\.(\d+)\.")
TABLES = frozenset({"d2t", "t2d"})  # checked by their contents, see vocabulary.py
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "draft_vocab_size", "markov_rank", "target_hidden_size")  # fmt: skip


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight: those of the module itself, built without storage."""
    from dspark.drafter import Drafter  # here, because the drafter's calibration is read by this package

    with torch.device("meta"):
        state = Drafter(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in TABLES}


def check_tensors(config: DrafterConfig, tensors: NamedTensors, findings: Findings) -> None:
    """Compare a checkpoint's tensors with the list its config implies; every difference becomes a problem."""
    layers = sorted({int(match[1]) for name in tensors.sources if (match := LAYER.match(name))})
    if layers != list(range(config.num_layers)):
        findings.refuse(
            f"layers found {layers}, num_hidden_layers={config.num_layers}",
            f"layers 0..{config.num_layers - 1}",
            "Layers would be dropped or left uninitialised.",
            "Correct num_hidden_layers in config.json, or fetch the complete checkpoint.",
        )
    depth = min(config.num_layers, max(layers, default=0) + 1)  # layers that no file has were reported just now
    expected = expected_shapes(replace(config, num_layers=depth, layers=config.layers[:depth]))
    _check_names(config, set(expected), set(tensors.sources) - TABLES, findings)
    for name in sorted(expected.keys() & tensors.sources.keys()):
        if tensors.shape(name) != expected[name]:
            findings.attempt(_refuse_shape, config, tensors, name, expected[name])


def _check_names(config: DrafterConfig, expected: set[str], found: set[str], findings: Findings) -> None:
    def in_known_layer(name: str) -> bool:
        match = LAYER.match(name)
        return match is None or int(match[1]) < config.num_layers  # surplus layers have their own message

    missing = sorted(expected - found)
    unexpected = sorted(name for name in found - expected if in_known_layer(name))
    if missing or unexpected:
        findings.refuse(
            f"tensor names do not match {config.family}: missing {_listed(missing)}, unexpected {_listed(unexpected)}",
            f"exactly its {len(expected)} tensors",
            "A missing weight stays uninitialised and an unused one means that the drafter computes something else.",
            "Fetch the complete checkpoint, or check which variant of the drafter it is.",
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none") + more


def _refuse_shape(config: DrafterConfig, tensors: NamedTensors, name: str, wanted: tuple[int, ...]) -> None:
    shape = tensors.shape(name)
    if name == "fc.weight" and shape is not None and len(shape) == 2 and shape[0] == config.hidden_size:
        taps, width = len(config.tap_ids), config.target_hidden_size
        raise refusal(
            f"fc.weight takes {shape[1]} features but {taps} taps of width {width} give {taps * width}",
            f"{shape[1] / width:g} taps, or target_hidden_size={shape[1] / taps:g}",
            "The drafter would read other target states than it was trained on. Correct the tap list in config.json.",
        )
    raise refusal(
        f"{name} has shape {list(shape or ())}",
        f"{_implied(config, name, wanted)}, as the config implies",
        "Weights and config belong to different drafters. Correct the field in config.json.",
    )


def _implied(config: DrafterConfig, name: str, wanted: tuple[int, ...]) -> str:
    """The shape of a weight, with the fields that each size depends on: those that change it when they change."""
    fields: list[list[str]] = [[] for _ in wanted]
    for field in SIZES:
        value = getattr(config, field)
        changed = expected_shapes(replace(config, **{field: value + 2}))[name] if value else wanted
        for axis, (size, other) in enumerate(zip(wanted, changed, strict=True)):
            fields[axis] += [field] if size != other else []
    named = [
        f"{names[0]}={size}" if len(names) == 1 else f"{size} of {' and '.join(names)}" if names else str(size)
        for size, names in zip(wanted, fields, strict=True)
    ]
    return f"[{', '.join(named)}]"
