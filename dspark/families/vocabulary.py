"""Vocabularies: rows of embedding and head, and the `d2t` table between them.

`d2t` holds offsets: draft id i is target id `i + d2t[i]`. Read as absolute ids, or replaced by an arange, it sends
almost every draft to a wrong token.
"""

from collections.abc import Mapping
from typing import Any

import torch

from dspark.families.fields import Fields
from dspark.families.findings import Findings, refusal
from dspark.families.names import NamedTensors

OWNED = {
    "has_embed_tokens": "embed_tokens.weight",
    "has_lm_head": "lm_head.weight",
    "enable_confidence_head": "confidence_head.proj.weight",
}
WRONG_IDS = "Drafts would be proposed under the wrong token ids."


def read_draft_vocab_size(fields: Fields, tensors: NamedTensors, vocab_size: int, findings: Findings) -> int:
    """Rows of the drafter's output head."""
    stated = fields.optional_integer("draft_vocab_size", minimum=1, consequence=WRONG_IDS)
    if stated is not None:
        return stated
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        shape = tensors.shape(name)
        if shape and shape[0] != vocab_size:
            findings.assume(f"draft_vocab_size={shape[0]}: absent from the config, taken from the rows of {name}")
            return shape[0]
    return vocab_size


def check_ownership(raw: Mapping[str, Any], tensors: NamedTensors) -> None:
    """Refuse a config that says a part is shipped when it is not, or the reverse."""
    for key, name in OWNED.items():
        stated, present = Fields.of(raw).flag(key), name in tensors.sources
        if stated is not None and stated.value != present:
            raise refusal(
                f"{stated} but {name} is {'present' if present else 'missing'}",
                "config and tensors to agree",
                "The target's matrix, no head or random weights would stand in for the drafter's own, or the reverse. "
                "Fetch the complete checkpoint or correct the config.",
            )


def check_reduction(
    tensors: NamedTensors, draft_vocab_size: int, vocab_size: int, target_vocab_size: int | None
) -> None:
    """Refuse a reduced vocabulary without table or head, and a table without reduction.

    Args:
        tensors: canonical tensors.
        draft_vocab_size: D.
        vocab_size: V, rows of the input embedding.
        target_vocab_size: Vt where the target is known; without a table, D must then equal it instead of V.
    """
    shape, full = tensors.shape("d2t"), vocab_size if target_vocab_size is None else target_vocab_size
    if shape is not None:
        if draft_vocab_size >= vocab_size:
            raise refusal(
                f"d2t has shape {list(shape)}, but draft vocabulary {draft_vocab_size} of {vocab_size} is not reduced",
                "no d2t, or a smaller draft_vocab_size",
                f"{WRONG_IDS} Correct draft_vocab_size in config.json.",
            )
        if shape != (draft_vocab_size,):
            raise refusal(
                f"d2t has shape {list(shape)}, draft vocabulary is {draft_vocab_size}",
                f"[{draft_vocab_size}]",
                f"{WRONG_IDS} Fetch the checkpoint again, or correct draft_vocab_size.",
            )
    elif draft_vocab_size < full:
        raise refusal(
            f"reduced vocabulary ({draft_vocab_size} of {full}) needs a d2t table; the file has none",
            "d2t offsets",
            WRONG_IDS,
            "Fetch the complete checkpoint; if the target's vocabulary has this size, name it (--target, target=).",
        )
    if draft_vocab_size < full and "lm_head.weight" not in tensors.sources:
        raise refusal(
            f"reduced vocabulary ({draft_vocab_size} of {full}) needs its own lm_head; lm_head.weight is missing",
            f"lm_head.weight [{draft_vocab_size}, hidden_size]",
            "The target's head has other rows. Fetch the complete checkpoint.",
        )


def check_tables(d2t: torch.Tensor | None, t2d: torch.Tensor | None, vocab_size: int, needs_both: bool) -> None:
    """Check the contents of the tables.

    Args:
        d2t: [D] offsets, or None.
        t2d: [V] flags of the target ids that the drafter can propose, or None; used by training only.
        vocab_size: V.
        needs_both: the packaging always writes the two together.

    Raises:
        CheckpointError: types, lengths or contents are not those of an offset table, or the two disagree.
    """
    if d2t is None and t2d is None:
        return
    if d2t is None or (t2d is None and needs_both):
        present, lost = ("t2d", "d2t") if d2t is None else ("d2t", "t2d")
        raise refusal(
            f"t2d/d2t mismatch: {present} without {lost}", "both", WRONG_IDS, "Fetch the complete checkpoint."
        )
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise refusal(f"d2t has type {d2t.dtype}", "integers", WRONG_IDS, "Fetch the checkpoint again.")
    ids = torch.arange(len(d2t)) + d2t.long()
    if bad := _first_bad_entry(ids, vocab_size):
        raise refusal(
            f"d2t is not an offset table: entry {bad[0]} maps to {bad[1]}",
            f"i + d2t[i] strictly increasing and below {vocab_size}",
            f"{WRONG_IDS} Absolute ids in place of offsets look like this. Store d2t[i] = target_id - i.",
        )
    if t2d is not None:
        _check_t2d(t2d, ids, vocab_size)


def _first_bad_entry(ids: torch.Tensor, vocab_size: int) -> tuple[int, int] | None:
    bad = (ids < 0) | (ids >= vocab_size)
    bad[1:] |= ids[1:] <= ids[:-1]
    index = int(bad.int().argmax())
    return (index, int(ids[index])) if bool(bad[index]) else None


def _check_t2d(t2d: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> None:
    kept = t2d.flatten().bool().nonzero().flatten()
    if t2d.shape != (vocab_size,):
        problem = f"t2d has shape {list(t2d.shape)}, vocabulary is {vocab_size}"
    elif len(kept) != len(ids):
        problem = f"t2d keeps {len(kept)} ids, d2t has {len(ids)} entries"
    elif not torch.equal(kept, ids):
        index = int((kept != ids).int().argmax())
        problem = f"t2d's kept id {index} is {int(kept[index])}, d2t's is {int(ids[index])}"
    else:
        return
    raise refusal(f"t2d/d2t mismatch: {problem}", "the same ids in both", WRONG_IDS, "Fetch the checkpoint again.")
