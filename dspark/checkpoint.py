"""Load a drafter checkpoint: recognise, resolve, check everything, then read each tensor once into its place.

The module is built without storage and every weight is assigned as it comes from the file, so peak memory is the
drafter plus one tensor. Nothing is defaulted or left out silently: what the files do not settle is logged, and what
contradicts itself is refused with all problems at once.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from dspark.confidence import HEAD_TENSORS, ConfidenceCalibration, head_digest, read_calibration
from dspark.config import DrafterConfig
from dspark.drafter import Drafter
from dspark.families import Container, Findings, Layout, Resolved, resolve_container
from dspark.families.container import DTYPES, open_container
from dspark.families.findings import CheckpointError, refusal
from dspark.families.names import FLOATING, NamedTensors, TensorSource
from dspark.families.target import TargetFacts, check_d2t_range, find_target_problems
from dspark.families.vocabulary import check_tables

logger = logging.getLogger("dspark")


def load_drafter(
    path: str | Path,
    *,
    target: TargetFacts | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
    calibrated: bool = True,
) -> Drafter:
    """Load a drafter from a folder or a Hub id.

    Args:
        path: folder with config.json and safetensors files, or "owner/name" on the Hub (only JSON and safetensors are
            fetched).
        target: the model to draft for. Needed to check that the two belong together, and for the embedding or head if
            the checkpoint ships none; without it such a drafter refuses to propose until `Drafter.share` is called.
        device: where the weights go.
        dtype: floating type of the weights; None keeps the checkpoint's own (where it mixes types, that of most of
            its bytes).
        layout: "anchor" or "fill" (1+N), the block layout of a checkpoint that does not state it; one that states the
            other is refused.
        calibrated: False leaves the calibration in the folder unread, and the confidences as the head gives them.

    Returns:
        The drafter in eval mode with frozen weights, its confidences calibrated if the folder holds a calibration.
        `config.notes` lists the choices made.

    Raises:
        CheckpointError: anything that would make it draft unlike it was trained, with every problem that was found.
    """
    findings = Findings()
    calibration, config, tensors = open_checkpoint(path, target, layout, findings, calibrated)
    dtype = dtype or stored_dtype(tensors, findings)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise CheckpointError(
            f"{path}: dtype={dtype}; expected float64, float32, bfloat16 or float16. Weights would be rounded away."
        )
    config = replace(config, notes=tuple(findings.notes))
    drafter = _build(config, tensors, torch.device(device), dtype, str(path))
    drafter.calibrate(calibration)
    if target is not None:
        drafter.share(target.input_embedding, target.output_head, target.vocab_size)
    for note in findings.notes:
        logger.log(logging.WARNING if note in findings.assumptions else logging.INFO, "%s: %s", path, note)
    return drafter


def open_checkpoint(
    path: str | Path, target: TargetFacts | None, layout: Layout | None, findings: Findings, calibrated: bool = True
) -> tuple[ConfidenceCalibration | None, DrafterConfig, NamedTensors]:
    """Everything about a checkpoint but its weights: calibration (None unless `calibrated`), record and tensors.

    Raises:
        CheckpointError: with every problem that was found.
    """
    container = findings.attempt(open_container, path)
    resolved = None if container is None else check_files(container, target, layout, findings)
    calibration = None
    if container is not None and resolved is not None and calibrated:
        calibration = findings.attempt(stored_calibration, container, resolved)
    findings.raise_problems(str(path))
    assert resolved is not None, "a problem was found, and not raised"
    return calibration, *resolved.complete()


def check_files(
    container: Container, target: TargetFacts | None, layout: Layout | None, findings: Findings
) -> Resolved | None:
    """All checks that need no weights: config, names, shapes, vocabulary tables, and the target if given.

    Args:
        container: config and tensor headers.
        target: the target, or None to check the files alone.
        layout: block layout of a checkpoint that does not state it.
        findings: receives every problem and note.

    Returns:
        What could be resolved; None where the packaging is not supported.
    """
    target_vocab_size = None if target is None else target.vocab_size
    resolved = resolve_container(container, layout, target_vocab_size, findings)
    if resolved is None or resolved.tensors is None:
        return resolved
    tables = {name: findings.attempt(_read_table, resolved.tensors, name) for name in ("d2t", "t2d")}
    if resolved.config is not None:
        vocab_size, together = resolved.config.vocab_size, resolved.dialect.tables_together
        findings.attempt(check_tables, tables["d2t"], tables["t2d"], vocab_size, together)
        if target is not None:
            find_target_problems(resolved.config, target, findings)
            if tables["d2t"] is not None and len(tables["d2t"]):
                findings.attempt(check_d2t_range, tables["d2t"], target.vocab_size)
    return resolved


def stored_calibration(container: Container, resolved: Resolved) -> ConfidenceCalibration | None:
    """The calibration of the confidence head that lies in the checkpoint's folder, None if there is none.

    Raises:
        CheckpointError: the file is damaged or does not belong to this checkpoint.
    """
    config, tensors = resolved.config, resolved.tensors
    if config is None or tensors is None:  # a problem of the checkpoint itself, which is reported as such
        return None
    digest = stored_head_digest(tensors) if config.confidence != "none" else None
    return read_calibration(container.folder, config.max_draft_tokens, digest)


def stored_head_digest(tensors: NamedTensors) -> str:
    """`head_digest` of the confidence head as the files hold it."""
    stored = {name: tensors.sources[name] for name in HEAD_TENSORS if name in tensors.sources}
    return head_digest(read_tensors(stored, torch.device("cpu")))


def stored_dtype(tensors: NamedTensors, findings: Findings) -> torch.dtype:
    """Floating type of most of the checkpoint's weight bytes."""
    size: dict[str, int] = {}
    for source in tensors.sources.values():
        if source.dtype in FLOATING:
            elements = torch.Size(source.shape).numel()
            size[source.dtype] = size.get(source.dtype, 0) + elements * DTYPES[source.dtype].itemsize
    main = max(size, key=lambda name: size[name])
    if len(size) > 1:
        findings.note(f"weights of types {', '.join(sorted(size))} are loaded as {main}; --dtype (dtype=) chooses")
    return DTYPES[main]


def read_tensors(sources: Mapping[str, TensorSource], device: torch.device) -> Iterable[tuple[str, torch.Tensor]]:
    """Canonical tensors one after another, on `device`, each file opened once; of fused ones their rows."""
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt", device=str(device)))
            for file in sorted({source.stored.file for source in sources.values()})
        }
        for name, source in sources.items():
            file, start = opened[source.stored.file], source.start
            if start is None:
                yield name, file.get_tensor(source.stored.name)
            else:
                yield name, file.get_slice(source.stored.name)[start : start + source.shape[0]]


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity (an unloaded matrix is saved as NaN by one of the trainers)."""
    smallest, largest = torch.aminmax(tensor)  # NaN propagates; needs no mask as large as the tensor
    if not bool(torch.isfinite(smallest) & torch.isfinite(largest)):
        raise refusal(
            f"{name} contains non-finite values",
            "finite weights",
            "The checkpoint was probably saved before the verifier's weights were loaded; every logit would be NaN.",
            "Fetch or export the checkpoint again.",
        )


def _read_table(tensors: NamedTensors, name: str) -> torch.Tensor | None:
    source = tensors.sources.get(name)
    if source is None:
        return None
    return next(tensor for _, tensor in read_tensors({name: source}, torch.device("cpu")))


def _build(
    config: DrafterConfig, tensors: NamedTensors, device: torch.device, dtype: torch.dtype, path: str
) -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(config)
    findings, state = Findings(), {}
    # On a CPU the tensors read are views of the mapped file: they would change with it, and have its alignment, so that
    # the same weights stored differently would round differently. Each is copied, one at a time.
    is_mapped = device.type == "cpu"
    for name, tensor in read_tensors({n: s for n, s in tensors.sources.items() if n != "t2d"}, device):
        if name == "d2t":
            state[name] = tensor.to(torch.int64, copy=is_mapped)
            continue
        findings.attempt(check_finite, name, tensor)
        state[name] = tensor.to(dtype, copy=is_mapped)
    findings.raise_problems(path)
    if drafter.d2t is not None and "d2t" not in state:
        # Only reached when the target has no more tokens than the head has rows, and the embedding has extra ones: the
        # draft ids are the target's own, and head rows beyond them are padding to crop.
        drafter.d2t = None
    drafter.load_state_dict(state, strict=True, assign=True)
    unset = [name for name, value in (*drafter.named_parameters(), *drafter.named_buffers()) if value.is_meta]
    assert not unset, f"tensors without storage after loading: {unset}"
    return drafter.eval().requires_grad_(False)
