"""Markov head and confidence head, from config and tensors together.

The tensors decide what exists, the config must agree. A head that is stated but absent, or present but not stated, is
refused: left out silently it changes the drafts or their confidence, and half loaded it does both.
"""

from dataclasses import dataclass
from typing import Any

from dspark.config import ConfidenceKind, MarkovKind
from dspark.families.fields import Fields, Found, integer
from dspark.families.findings import Findings, refusal
from dspark.families.names import NamedTensors

KIND_TENSORS = {"vanilla": (), "gated": ("gate_proj",), "rnn": ("joint_proj",)}
WRONG_BIAS = "The bias would be computed by another formula."
NO_BIAS = "Without the Markov bias every draft after the first ignores the token before it."


@dataclass(frozen=True)
class HeadDefaults:
    """What a packaging's own schema says where a key is absent; None means that the key is required."""

    markov_rank: int | None = None
    markov_kind: str | None = None
    confidence_with_markov: bool | None = None


def read_heads(
    fields: Fields, tensors: NamedTensors, hidden_size: int, defaults: HeadDefaults, findings: Findings
) -> dict[str, Any]:
    """Kind and size of both heads, named as in `DrafterConfig`.

    Raises:
        CheckpointError: config and tensors disagree, or the kind is unknown.
    """
    rank = _markov_rank(fields, tensors, defaults, findings)
    kind = _markov_kind(fields, tensors, rank, defaults, findings)
    confidence = _confidence(fields, tensors, (hidden_size, rank), defaults, findings)
    return {"markov_kind": kind, "markov_rank": rank, "confidence": confidence}


def _markov_rank(fields: Fields, tensors: NamedTensors, defaults: HeadDefaults, findings: Findings) -> int:
    found = fields.find("markov_rank", "dspark_markov_rank")
    if found is None and defaults.markov_rank is not None:
        findings.assume(f"assumed markov_rank={defaults.markov_rank}: absent, the packaging's default")
        found = Found("markov_rank", defaults.markov_rank)
    columns = tensors.shape("markov_head.markov_w1.weight")
    if found is None:
        state = "no Markov head found either" if columns is None else f"but markov_w1 has shape {list(columns)}"
        raise refusal(
            f"markov_rank is missing, {state}",
            "markov_rank, 0 for a drafter without a Markov head",
            "A plain DFlash drafter has other serving rules. " + NO_BIAS,
            "Add markov_rank to config.json.",
        )
    rank = integer(found, 0, NO_BIAS)
    if columns is not None and (len(columns) != 2 or columns[1] != rank):
        raise refusal(
            f"{found} but markov_w1 has shape {list(columns)}",
            f"{columns[-1]} columns and markov_rank to agree",
            f"{NO_BIAS} Correct markov_rank in config.json.",
        )
    return rank


def _markov_kind(
    fields: Fields, tensors: NamedTensors, rank: int, defaults: HeadDefaults, findings: Findings
) -> MarkovKind:
    stored = {name.split(".")[1] for name in tensors.sources if name.startswith("markov_head.")}
    if rank == 0:  # tensors of a head would be unexpected ones
        findings.note("no Markov head (markov_rank=0): drafts of a block do not depend on one another")
        return "none"
    found = fields.find("markov_head_type", "dspark_markov_head_type")
    if found is None and defaults.markov_kind is not None:
        found = Found("markov_head_type", defaults.markov_kind)
        findings.assume(f"assumed {found}: absent, the packaging's default")
    kind = "" if found is None else str(found.value).lower()
    if found is None or kind not in KIND_TENSORS:
        raise refusal(
            "markov_head_type is missing" if found is None else f"unsupported {found}",
            f"one of {', '.join(KIND_TENSORS)}",
            f"{WRONG_BIAS} State the kind in config.json, or use a drafter with one of these heads.",
        )
    needed = {"markov_w1", "markov_w2", *KIND_TENSORS[kind]}
    if stored != needed:
        raise refusal(
            f"{found} requires {', '.join(sorted(needed))}; found {', '.join(sorted(stored)) or 'none of them'}",
            "exactly the tensors of that head",
            f"{WRONG_BIAS} Correct markov_head_type, or fetch the complete checkpoint.",
        )
    return kind  # type: ignore[return-value]  # one of KIND_TENSORS, which are the kinds


def _confidence(
    fields: Fields, tensors: NamedTensors, sizes: tuple[int, int], defaults: HeadDefaults, findings: Findings
) -> ConfidenceKind:
    hidden, rank = sizes
    enabled, with_markov = fields.flag("enable_confidence_head"), fields.flag("confidence_head_with_markov")
    shape = tensors.shape("confidence_head.proj.weight")
    if enabled is not None and enabled.value and with_markov is not None and with_markov.value and rank == 0:
        raise refusal(
            f"{with_markov} with markov_rank=0",
            "markov_rank > 0, or false",
            "The confidence head would read the embedding of a Markov head that does not exist.",
            "Set confidence_head_with_markov to false in config.json.",
        )
    if shape is None:
        return "none"
    if enabled is None:
        findings.note("confidence head: enable_confidence_head is absent, its tensors are present, so it is built")
    width = shape[-1] if shape else 0
    expects_markov = with_markov.value if with_markov is not None else defaults.confidence_with_markov
    if expects_markov is None:
        findings.assume(
            f"confidence head: inputs taken from its width {width}, as confidence_head_with_markov is absent"
        )
        expects_markov = rank > 0 and width == hidden + rank
    wanted = hidden + rank if expects_markov else hidden
    if width != wanted:
        raise refusal(
            f"confidence head takes {width} inputs (confidence_head.proj.weight {list(shape)})",
            f"{wanted} (hidden_size={hidden}, markov_rank={rank}, confidence_head_with_markov={expects_markov})",
            "It would read other features than in training. Correct confidence_head_with_markov in config.json.",
        )
    return "hidden+markov" if expects_markov and rank else "hidden"
