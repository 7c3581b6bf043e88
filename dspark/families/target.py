"""Checks that need the target: does the drafter belong to it, and can it be given what the checkpoint lacks?"""

from typing import Protocol

import torch

from dspark.config import DrafterConfig
from dspark.families.findings import Findings, refusal

OTHER_TARGET = "Load the drafter that was trained for this target."


class TargetFacts(Protocol):
    """What loading needs to know of a target. `input_embedding` and `output_head` are raw matrices [rows,
    hidden_size]."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def input_embedding(self) -> torch.Tensor: ...

    @property
    def output_head(self) -> torch.Tensor: ...


def find_target_problems(config: DrafterConfig, target: TargetFacts, findings: Findings) -> None:
    """Record every reason why `config` cannot draft for `target`."""
    layers_differ = config.num_target_layers not in (None, target.num_layers)
    if layers_differ or config.target_hidden_size != target.hidden_size:
        layers = "an unstated number of" if config.num_target_layers is None else config.num_target_layers
        findings.refuse(
            f"drafter was trained for a target with {layers} layers (num_target_layers) and width "
            f"{config.target_hidden_size} (target_hidden_size)",
            f"this target's {target.num_layers} layers and width {target.hidden_size}",
            f"Its taps would be other states than it was trained on. {OTHER_TARGET}",
        )
    last = config.tap_ids[-1]
    if last > target.num_layers:
        findings.refuse(
            f"target layer id {last - 1} (tap_ids={list(config.tap_ids)}) is outside -1..{target.num_layers - 1}",
            f"layers of a target with {target.num_layers}",
            f"The state that the drafter reads does not exist. {OTHER_TARGET}",
        )
    if config.vocab_size < target.vocab_size:
        findings.refuse(
            f"vocab_size={config.vocab_size}: target token ids up to {target.vocab_size - 1} cannot be embedded",
            f"at least {target.vocab_size} rows",
            f"Those tokens would index outside the embedding. {OTHER_TARGET}",
        )
    rows = target.input_embedding.shape[0]
    if not config.owns_embedding and config.vocab_size > rows:
        findings.refuse(
            f"input vocabulary vocab_size={config.vocab_size} exceeds the target's {rows} embedding rows",
            "embed_tokens.weight in the checkpoint",
            "Its own rows, such as the mask token, cannot be shared. Fetch the complete checkpoint.",
        )
    rows, draft = target.output_head.shape[0], config.draft_vocab_size
    if not config.owns_head and draft > rows:
        findings.refuse(
            f"lm_head of draft_vocab_size={draft} rows is neither shipped nor equal to the target's {rows}",
            f"lm_head.weight [{draft}, {config.hidden_size}]",
            "The rest of the head would stay uninitialised. Fetch the complete checkpoint.",
        )
    if not (config.owns_embedding and config.owns_head) and config.hidden_size != target.hidden_size:
        findings.refuse(
            f"cannot share the target embedding/head: hidden_size={config.hidden_size} vs {target.hidden_size}",
            "equal widths, or a checkpoint that ships both matrices",
            f"The matrices do not fit. {OTHER_TARGET}",
        )
    if config.draft_vocab_size > target.vocab_size:
        findings.note(
            f"draft logits beyond the target's {target.vocab_size} tokens are cropped "
            f"(the head has {config.draft_vocab_size} rows)"
        )


def check_d2t_range(d2t: torch.Tensor, target_vocab_size: int) -> None:
    """Refuse a table of offsets [D] that reaches past the target's vocabulary."""
    largest = len(d2t) - 1 + int(d2t[-1])
    if largest >= target_vocab_size:
        raise refusal(
            f"d2t is not an offset table of this target: entry {len(d2t) - 1} maps to {largest}",
            f"ids below {target_vocab_size}",
            f"The target has no such token. {OTHER_TARGET}",
        )
