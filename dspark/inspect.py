"""What a checkpoint is and whether it would load, without loading it: the content of `dspark inspect`.

Runs the checks of `dspark.checkpoint`, keeps going after a problem, and reads each weight once to look for non-finite
values. It needs no target; with one, it also says whether the two belong together.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint import check_files, check_finite, read_tensors, stored_calibration
from dspark.confidence import CALIBRATION_FILE
from dspark.config import DrafterConfig
from dspark.families import Container, Family, Findings, Layout, Resolved, recognise
from dspark.families.container import DTYPES, StoredTensor, open_container, read_config
from dspark.families.expected import TABLES, expected_shapes
from dspark.families.names import NamedTensors
from dspark.families.target import TargetFacts
from dspark.terminal import align, count

SHAREABLE = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the checkpoint: `role` says whether it is used; `stored_as` is its name in the file where that
    differs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    stored_as: str | None = None

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * (DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0)


@dataclass(frozen=True)
class TargetFit:
    """The target that a checkpoint was held against, by its name and sizes.

    `fits` is None where problems of the checkpoint itself leave it open; what does not fit is among the refusals.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    fits: bool | None

    @property
    def verdict(self) -> str:
        """One line: yes, no or not known, and the sizes."""
        answer = {True: "yes", False: "no, see the refusals", None: "not known, see the refusals"}[self.fits]
        layers = count(self.num_layers, "layer")
        return f"{answer} ({layers}, hidden size {self.hidden_size}, vocabulary {self.vocab_size})"


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_checkpoint`.

    Attributes:
        path: as it was given.
        family: packaging that was recognised, None if none was.
        supported: whether that packaging can be loaded at all.
        config: the canonical record, None where a problem stands in its way.
        tensors: every tensor of the files, those that are not used included.
        ownership: where embedding and head come from.
        calibration: one line on the confidence head's calibration, or that there is none.
        target: the target that was given and whether the checkpoint fits it, None without one.
        notes: choices that loading would make.
        refusals: every problem for which loading would be refused; empty means that it would load.
    """

    path: str
    family: str | None
    supported: bool
    config: DrafterConfig | None
    tensors: tuple[TensorRow, ...]
    ownership: Mapping[str, str]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]
    calibration: str | None = None
    target: TargetFit | None = None

    @property
    def loadable(self) -> bool:
        return not self.refusals

    @property
    def num_parameters(self) -> int:
        """Elements of all weights that are used; vocabulary tables do not count."""
        unused = {"ignored", "not used"}
        return sum(row.num_elements for row in self.tensors if row.name not in TABLES and row.role not in unused)

    @property
    def num_bytes(self) -> int:
        """Bytes of every tensor in the files."""
        return sum(row.num_bytes for row in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; totals are None where no tensor could be read."""
        found = asdict(self)
        if self.config is not None:
            found["config"]["max_draft_tokens"] = self.config.max_draft_tokens
        totals = {"num_parameters": self.num_parameters, "num_bytes": self.num_bytes}
        return found | {"loadable": self.loadable} | (totals if self.tensors else dict.fromkeys(totals))

    def to_text(self) -> str:
        """Aligned tables for people: verdict first, then record, tensors, notes and refusals. What could not be read is
        left out.
        """
        facts = {"checkpoint": self.path}
        if self.family or self.tensors:
            facts["packaging"] = self.family or "not recognised"
        problems = count(len(self.refusals), "problem")
        facts["verdict"] = "would load" if self.loadable else f"would be refused, {problems} below"
        if self.target is not None:
            facts |= {"target": self.target.name, "fits target": self.target.verdict}
        if self.tensors:
            facts["parameters"] = f"{self.num_parameters:,}"
            facts["size"] = f"{self.num_bytes / 1e6:,.2f} MB in {count(len(self.tensors), 'tensor')}"
        facts |= self.ownership
        if self.calibration is not None:
            facts["confidence"] = self.calibration
        parts = [align(list(facts.items()))]
        if self.config is not None:
            parts.append("record\n" + align(_record(self.config), indent="  "))
        if self.tensors:
            rows = [(row.name, row.dtype, str(list(row.shape)), row.role) for row in self.tensors]
            parts.append("tensors\n" + align(rows, indent="  "))
        for title, lines in (("notes", self.notes), ("refusals", self.refusals)):
            if lines:
                parts.append("\n".join([title, *(f"  - {line}" for line in lines)]))
        return "\n\n".join(parts) + "\n"


def inspect_checkpoint(
    path: str | Path, target: TargetFacts | None = None, layout: Layout | None = None, target_name: str | None = None
) -> Inspection:
    """Examine a checkpoint without building it; problems are reported, never raised.

    Args:
        path: folder or Hub id.
        target: the model it is to draft for, or None.
        layout: block layout of a checkpoint that does not state it, as for `load_drafter`.
        target_name: words on the target for the report; default: the target.
    """
    findings = Findings()
    container = findings.attempt(open_container, path)
    if container is None:
        family = Findings().attempt(_family_by_config, Path(path))  # its problem, if any, is one of those found above
        resolved = None
    else:
        family = findings.attempt(recognise, container.raw, container.tensors)
        resolved = check_files(container, target, layout, findings)
    fit = None
    if target is not None:
        fits = None if container is None else _fits(container, resolved, target, layout)
        sizes = (target.num_layers, target.hidden_size, target.vocab_size)
        fit = TargetFit(target_name or "the target", *sizes, fits)
    ownership: dict[str, str] = {}
    calibration = None
    if container is not None and resolved is not None and resolved.tensors is not None:
        _check_weights(resolved.tensors, findings)
        ownership = _ownership(resolved.tensors, target)
        calibration = _calibration(container, resolved, findings)
    return Inspection(
        path=str(path),
        family=None if family is None else family.name,
        supported=family is not None and family.supported,
        config=None if resolved is None else resolved.config,
        tensors=() if container is None else _rows(container, resolved),
        ownership=ownership,
        notes=tuple(findings.notes),
        refusals=tuple(findings.problems),
        calibration=calibration,
        target=fit,
    )


def _family_by_config(folder: Path) -> Family | None:
    """The packaging of a folder whose weights cannot be read, None where there is no config to tell it by."""
    return recognise(read_config(folder)) if (folder / "config.json").is_file() else None


def _fits(container: Container, resolved: Resolved | None, target: TargetFacts, layout: Layout | None) -> bool | None:
    """Whether the target adds no problem to those of the files; None where these leave it open."""
    if resolved is None or resolved.config is None or resolved.tensors is None:
        return None
    alone, together = Findings(), Findings()
    check_files(container, None, layout, alone)
    check_files(container, target, layout, together)
    return set(together.problems) <= set(alone.problems)


def _calibration(container: Container, resolved: Resolved, findings: Findings) -> str | None:
    """One line on the confidence head; None where it cannot be said."""
    if resolved.config is None:
        return None
    if resolved.config.confidence == "none":
        findings.attempt(stored_calibration, container, resolved)
        return "no confidence head"
    num_problems = len(findings.problems)
    found = findings.attempt(stored_calibration, container, resolved)
    if len(findings.problems) > num_problems:
        return f"{CALIBRATION_FILE} cannot be used, see the refusals"
    return found.summary() if found is not None else f"not calibrated (no {CALIBRATION_FILE})"


def _check_weights(tensors: NamedTensors, findings: Findings) -> None:
    weights = {name: source for name, source in tensors.sources.items() if name not in TABLES}
    for name, tensor in read_tensors(weights, CPU):
        if tensor.numel():
            findings.attempt(check_finite, name, tensor)


def _ownership(tensors: NamedTensors, target: TargetFacts | None) -> dict[str, str]:
    """Where each shareable matrix comes from, and whether an own one is a copy of the target's."""
    found = {}
    for role, name in SHAREABLE.items():
        if name not in tensors.sources:
            found[role] = "the target's (the checkpoint has none)"
            continue
        found[role] = "own"
        if target is not None:
            theirs = target.input_embedding if role == "embedding" else target.output_head
            (_, own), *_ = read_tensors({name: tensors.sources[name]}, CPU)
            same = own.shape == theirs.shape and torch.equal(own, theirs.detach().to(CPU, own.dtype))
            found[role] = "own, equal to the target's" if same else "own, different from the target's"
    return found


def _rows(container: Container, resolved: Resolved | None) -> tuple[TensorRow, ...]:
    if resolved is None or resolved.tensors is None:
        return tuple(_stored_row(tensor, "unknown") for tensor in container.tensors.values())
    used = set(expected_shapes(resolved.config)) | TABLES if resolved.config is not None else None
    rows = []
    for name, source in resolved.tensors.sources.items():
        role = "used" if used is None or name in used else "not used"
        stored_as = source.stored.name if source.stored.name != name else None
        rows.append(TensorRow(name, source.shape, source.dtype, role, stored_as))
    ignored = (container.tensors[name] for name in resolved.tensors.ignored)
    return (*rows, *(_stored_row(tensor, "ignored") for tensor in ignored))


def _stored_row(tensor: StoredTensor, role: str) -> TensorRow:
    return TensorRow(tensor.name, tensor.shape, tensor.dtype, role)


def _record(config: DrafterConfig) -> list[tuple[str, str]]:
    values = {name: value for name, value in vars(config).items() if name != "notes"}
    rope = config.rope
    values["rope"] = f"{rope.rope_type}, theta {rope.theta:g}" + "".join(
        f", {k} {_number(v)}" for k, v in rope.scaling.items()
    )
    values["layers"] = "; ".join(
        f"{'causal' if layer.causal else 'bidirectional'}, "
        + ("full context" if layer.window is None else f"window {layer.window}")
        for layer in config.layers
    )
    values["max_draft_tokens"] = config.max_draft_tokens
    return [(name, _number(value)) for name, value in values.items()]


def _number(value: Any) -> str:
    """A value as people write it: 1e-05 for a float that float32 made 9.999999747378752e-06."""
    return f"{value:g}" if isinstance(value, float) else str(value)
