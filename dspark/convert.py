"""Write a drafter in the other packaging: DeepSpec's flat config, or the one of speculators.

    source files -> canonical record and tensors -> config.json of the destination + model.safetensors

Weights are copied bit for bit under their canonical names, which both packagings share; what differs is the config:
where fields stand, how taps are counted, whether the layout is stated, what a missing field means. Everything is
written explicitly, so that no engine has to fill in a default. What the destination cannot express is refused with the
reason: a file that loads there and drafts otherwise is worse than none. The result is read back and compared before
it takes its place.

Source: DeepSpec (config of modeling/dspark) and speculators (models/dspark/config.py); the two tables of `families`.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from dspark.checkpoint import check_finite, open_checkpoint, read_tensors, stored_dtype
from dspark.confidence import CALIBRATION_FILE
from dspark.config import DrafterConfig
from dspark.convert_config import to_deepspec, to_speculators
from dspark.families import CheckpointError, Findings, Layout
from dspark.families.container import INDEX, SINGLE, local_folder
from dspark.families.findings import refusal
from dspark.families.target import TargetFacts
from dspark.outputs import check_output

Packaging = Literal["deepspec", "speculators"]
FAMILY: dict[Packaging, str] = {"deepspec": "DeepSpec Qwen3", "speculators": "speculators"}
MATRICES = {"embed_tokens.weight": "input_embedding", "lm_head.weight": "output_head"}
# Parts of the record that belong to a packaging and not to the drafter.
OWN_OF_PACKAGING = ("family", "notes", "num_target_layers", "verifier_name")


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        source: packaging of the source.
        destination: packaging of the result.
        config: the record of the result.
        num_tensors: tensors written.
        notes: what the source left open, and what the destination does not say.
    """

    source: str
    destination: str
    config: DrafterConfig
    num_tensors: int
    notes: tuple[str, ...]


def convert(
    source: str | Path,
    destination: str | Path,
    to: Packaging,
    *,
    layout: Layout | None = None,
    target: TargetFacts | None = None,
    verifier: str | None = None,
    force: bool = False,
) -> Conversion:
    """Convert a checkpoint.

    Args:
        source: folder or Hub id.
        destination: folder to make; its parents must exist.
        to: "deepspec" or "speculators".
        layout: block layout of a source that does not state it.
        target: the target; its embedding and head are written where the source has none, and all checks of loading are
            made against it.
        verifier: name of the target for a speculators config; default: what the source says.
        force: replace `destination` if it is there.

    Returns:
        What was written.

    Raises:
        CheckpointError: the source cannot be loaded, or the destination's packaging cannot express it; all reasons.
        ValueError: `destination` cannot be made, or exists and `force` was not given; `to` is unknown; or `verifier` is
            given where nothing takes it.
    """
    if to not in FAMILY:
        raise ValueError(f"to={to!r}: expected one of {', '.join(FAMILY)}")
    if verifier is not None and to != "speculators":
        raise ValueError(f"verifier={verifier!r}: only a speculators config names its target; leave it out for {to}")
    destination = Path(destination)
    check_destination(source, destination, force)
    findings = Findings()
    calibration, source_config, stored = open_checkpoint(source, target, layout, findings)
    dtype = stored_dtype(stored, findings)
    tensors = {name: tensor.clone() for name, tensor in read_tensors(stored.sources, torch.device("cpu"))}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            findings.attempt(check_finite, name, tensor)
    config = _with_target_matrices(source_config, tensors, target, dtype)
    if to == "speculators":
        config = replace(config, verifier_name=verifier or config.verifier_name)
        tensors |= _tables(config, tensors)
        raw = to_speculators(config, dtype, findings)
    else:
        tensors.pop("t2d", None)
        raw = to_deepspec(config, dtype, findings)
    findings.raise_problems(f"{source} cannot be written as a {to} checkpoint")
    files = {"config.json": json.dumps(raw, indent=2) + "\n"}
    if calibration is not None:
        files[CALIBRATION_FILE] = (local_folder(source) / CALIBRATION_FILE).read_text(encoding="utf-8")
    written = _write(destination, files, tensors, config, to)
    return Conversion(source_config.family, FAMILY[to], written, len(tensors), tuple(findings.notes))


def check_destination(source: str | Path, destination: str | Path, force: bool) -> None:
    """Refuse a destination that cannot be written, or that would lose what is there (ValueError)."""
    destination = Path(destination)
    if not destination.parent.is_dir():
        raise ValueError(f"{destination}: there is no folder {destination.parent} to make it in")
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{destination} is a file; give a folder")
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists; give another folder, or --force to replace what is in it")
    if destination.exists() and Path(source).exists() and destination.resolve() == Path(source).resolve():
        raise ValueError(f"{destination} is the source itself: converting in place could lose it; give another folder")
    check_output("DST", destination)
    check_output(f"DST {destination}: the folder above,", destination.parent)  # it is made beside its place


def same_drafter(first: DrafterConfig, second: DrafterConfig) -> list[str]:
    """Names of the fields in which two records describe different drafters."""
    return [
        name for name, value in vars(first).items() if name not in OWN_OF_PACKAGING and value != getattr(second, name)
    ]


def _with_target_matrices(
    config: DrafterConfig, tensors: dict[str, torch.Tensor], target: TargetFacts | None, dtype: torch.dtype
) -> DrafterConfig:
    """Add the matrices that the checkpoint takes from its target, and its depth, where the target is at hand."""
    if target is None:
        return config
    rows = {"embed_tokens.weight": config.vocab_size, "lm_head.weight": config.draft_vocab_size}
    for name, attribute in MATRICES.items():
        if name not in tensors:
            tensors[name] = getattr(target, attribute).detach()[: rows[name]].to("cpu", dtype).clone()
    layers = config.num_target_layers or target.num_layers
    return replace(config, owns_embedding=True, owns_head=True, num_target_layers=layers)


def _tables(config: DrafterConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """speculators stores `d2t` and `t2d` together; a source may have the first alone."""
    if "d2t" not in tensors or "t2d" in tensors:
        return {}
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    kept[torch.arange(config.draft_vocab_size) + tensors["d2t"].long()] = True
    return {"t2d": kept}


def _write(
    destination: Path,
    files: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    config: DrafterConfig,
    to: Packaging,
) -> DrafterConfig:
    """Write beside the destination, read back, and only then move it into its place."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch / SINGLE, {"format": "pt"})
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8")
        written = _read_back(scratch, tensors, config, to)
        scratch.chmod(0o755)  # mkdtemp's folders are private, and so are safetensors' files
        (scratch / SINGLE).chmod(0o644)
        if destination.exists():
            _replace_files(destination, scratch)
        else:
            scratch.rename(destination)
        return written
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace_files(destination: Path, scratch: Path) -> None:
    """Put the new files into a folder that exists; other files of the user stay, an old checkpoint's do not."""
    for stale in (*destination.glob("*.safetensors"), destination / INDEX, destination / CALIBRATION_FILE):
        stale.unlink(missing_ok=True)
    for file in scratch.iterdir():
        file.replace(destination / file.name)


def _read_back(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: DrafterConfig, to: Packaging
) -> DrafterConfig:
    """The record of what was written, which must be the same drafter with the same bits."""
    try:
        _, written, stored = open_checkpoint(folder, None, None, Findings())
    except CheckpointError as error:
        raise CheckpointError(f"the {to} checkpoint as it was written: {error}") from error
    differing = same_drafter(config, written)
    if differing or written.family != FAMILY[to]:
        changes = [f"{name}={getattr(config, name)!r} -> {getattr(written, name)!r}" for name in differing]
        raise refusal(
            f"read back, the {to} checkpoint is another drafter: {', '.join(changes) or written.family}",
            "the same record",
            f"It would draft otherwise. This drafter cannot be written as {to}.",
        )
    for name, tensor in read_tensors(stored.sources, torch.device("cpu")):
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name
    return written
