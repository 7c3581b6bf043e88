"""Rejection sampling of drafted blocks, from the logits themselves, in two launches.

Logits are read once where a step accepts everything, and the row of the rejection twice otherwise; rows after it
mostly not at all (`dspark.kernels.rejection_device`). Nothing waits for the device. With a `Workspace` and outputs of
the caller's own, a call can be captured in a CUDA graph.

Read `dspark.kernels.rejection_ref` first: `verify_ref` is the definition.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from dspark.kernels import HAS_TRITON
from dspark.kernels.rejection_device import NO_REJECTION
from dspark.kernels.rejection_emit import emit_kernel
from dspark.kernels.rejection_judge import judge_kernel, overlap_kernel
from dspark.kernels.rejection_ref import MAX_LISTED, Block, DraftLaw, Verified, raise_for_status, verify_ref
from dspark.kernels.together import launches_together

__all__ = ["Block", "DraftLaw", "Verified", "Workspace", "raise_for_status", "verify", "verify_ref"]

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS, FLOATS = (torch.int32, torch.int64), (torch.float32, torch.float64)


class Tile(NamedTuple):
    """Tokens that a thread block takes at a time, its warps, and the registers of a thread (the compiler's choice if
    None).
    """

    tokens: int
    warps: int
    registers: int | None = None


# By measurement, as are the numbers below.
JUDGE_TILE = Tile(4096, 4)
EMIT_TILE = Tile(2048, 4, 96)

# (tiles of a launch, tiles a thread block then takes): what a block does before and after its tiles, two chains of
# loads and an atomic, costs about as much as a tile, but small launches need every block that they can have.
JUDGE_EACH = ((4000, 2), (0, 1))
EMIT_EACH = ((12000, 4), (4000, 2), (0, 1))

# Parts of a row that the last block has room for, at least: one compiled kernel serves most vocabularies.
JUDGE_PARTS, EMIT_PARTS = 64, 128


class Workspace:
    """Device memory between the two launches; put back in order by every call, so that it serves any number.

    One per stream: calls that overlap in time must not share it. A captured graph keeps using the one it was captured
    with, which must then live as long as the graph.
    """

    def __init__(self, batch: int, num_draft_tokens: int, vocab_size: int, device: torch.device | str) -> None:
        self.capacity = (batch, num_draft_tokens, vocab_size)
        lines = batch * max(num_draft_tokens, 1)
        judge_parts, emit_parts = (-(-vocab_size // tile.tokens) for tile in (JUDGE_TILE, EMIT_TILE))
        self.first = torch.full((batch,), NO_REJECTION, dtype=torch.int32, device=device)
        self.judge_arrived = torch.zeros(lines, dtype=torch.int32, device=device)
        self.emit_arrived = torch.zeros(batch, dtype=torch.int32, device=device)
        self.judge_parts = torch.empty((lines, 4, judge_parts), dtype=torch.float32, device=device)
        self.emit_parts = torch.empty((batch, 2, emit_parts), dtype=torch.float32, device=device)
        self.winners = torch.empty((batch, emit_parts), dtype=torch.int32, device=device)
        self.rows = torch.empty((lines, 4), dtype=torch.float32, device=device)
        self.flags = torch.empty(lines, dtype=torch.int32, device=device)

    def holds(self, batch: int, num_draft_tokens: int, vocab_size: int) -> bool:
        """Whether a call of this size fits."""
        asked = (batch, num_draft_tokens, vocab_size)
        return all(have >= need for have, need in zip(self.capacity, asked, strict=True))


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def _shared_workspace(batch: int, num_draft_tokens: int, vocab_size: int, device: torch.device) -> Workspace:
    """That of the current stream, replaced by a larger one where it is too small."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _workspaces.get((device, stream))
    if found is None or not found.holds(batch, num_draft_tokens, vocab_size):
        asked = (batch, num_draft_tokens, vocab_size)
        size = asked if found is None else tuple(max(a, b) for a, b in zip(asked, found.capacity, strict=True))
        found = _workspaces[device, stream] = Workspace(*size, device)
    return found


def verify(
    block: Block,
    law: DraftLaw,
    num_draft_tokens: int,
    *,
    overlap: bool = False,
    workspace: Workspace | None = None,
    out: Verified | None = None,
) -> Verified:
    """Verify drafted blocks; no synchronisation.

    Args:
        block: logits, drafts and the requests they belong to.
        law: what the drafts were drawn from.
        num_draft_tokens: K >= 0, the most drafts of a request.
        overlap: also sum min(p, q) of every offered draft, which reads all rows of p and q once more.
        workspace: of the caller's own; a shared one of the current stream if None.
        out: outputs to write, `Verified.empty`; new ones if None.

    Returns:
        Tokens, counts and status. A request's row depends on its own inputs only.

    Raises:
        ValueError: shapes or dtypes disagree. Values are not looked at; see `Verified.status`.

    Source: `verify_ref`.
    """
    _check(block, law, num_draft_tokens)
    batch, vocab_size, device = len(block.row_starts) - 1, block.logits.shape[1], block.logits.device
    if not (HAS_TRITON and device.type == "cuda"):
        return verify_ref(block, law, num_draft_tokens, overlap=overlap)
    out = Verified.empty(batch, num_draft_tokens, device) if out is None else out
    if batch == 0:
        return out
    if workspace is None:
        workspace = _shared_workspace(batch, num_draft_tokens, vocab_size, device)
    elif not workspace.holds(batch, num_draft_tokens, vocab_size):
        raise ValueError(
            f"workspace of {workspace.capacity} (requests, drafts, vocabulary) is too small for"
            f" {(batch, num_draft_tokens, vocab_size)}: make it for the largest step"
        )
    return launch_verify(block, law, workspace, out, overlap=overlap)


class _Launch(NamedTuple):
    """What of a launch does not change from step to step: parts of a row, and the constants it is compiled with."""

    parts: int
    constants: dict[str, int]


@lru_cache(maxsize=256)
def _launch(tile: Tile, at_least: int, vocab_size: int, num_draft_tokens: int, num_ids: int) -> _Launch:
    parts = -(-vocab_size // tile.tokens)
    constants = {
        "WIDTH": max(16, _power_of_two(num_draft_tokens + 1)),
        "IDS": max(16, _power_of_two(num_ids)),
        "BLOCK": tile.tokens,
        "PARTS": max(at_least, _power_of_two(parts)),
        "num_warps": tile.warps,
    }
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    return _Launch(parts, constants)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 1


def _tiles_each(plan: tuple[tuple[int, int], ...], total: int) -> int:
    """Tiles that a thread block takes one after the other. It changes no result, since each is summed alone."""
    return next(tiles for least, tiles in plan if total >= least)


def launch_verify(
    block: Block, law: DraftLaw, workspace: Workspace, out: Verified, *, overlap: bool = False
) -> Verified:
    """The kernels, for K of `out` and at least one request. Same contract as `verify`."""
    batch, num_draft_tokens = out.tokens.shape[0], out.tokens.shape[1] - 1
    logits, vocab_size = block.logits, block.logits.shape[1]
    unused = workspace.rows  # stands in for tensors that are not there
    has_q, listed, stored = law.values is not None, law.ids is not None, law.logsumexp is not None
    num_ids = law.ids.shape[2] if listed else 0
    rows = (logits, block.tokens, block.row_starts)
    state = (unused if block.slots is None else block.slots, block.temperature)
    draws = (
        unused if law.slots is None else law.slots,
        law.values if has_q else unused,
        law.ids if listed else unused,
        block.temperature if law.temperature is None else law.temperature,
    )
    sizes = (batch, num_draft_tokens, vocab_size, num_ids)
    strides = (
        logits.stride(0),
        *(law.values.stride()[:2] if has_q else (0, 0)),
        *(law.ids.stride()[:2] if listed else (0, 0)),
    )
    forms = {
        "STATES": block.slots is not None,
        "SLOTS": law.slots is not None,
        "HAS_Q": has_q,
        "DENSE": has_q and not listed,
        "PROBS": law.probs,
    }
    together = bool(num_draft_tokens) and launches_together(logits.device)
    judge = _launch(JUDGE_TILE, JUDGE_PARTS, vocab_size, num_draft_tokens, num_ids)
    emit = _launch(EMIT_TILE, EMIT_PARTS, vocab_size, num_draft_tokens, num_ids)
    judge_tiles = _tiles_each(JUDGE_EACH, judge.parts * batch * num_draft_tokens)
    emit_tiles = _tiles_each(EMIT_EACH, emit.parts * batch)
    judge_grid = (-(-judge.parts // judge_tiles) * batch * num_draft_tokens,)
    if num_draft_tokens:
        judge_kernel[judge_grid](
            *rows,
            block.positions,
            *state,
            block.seeds,
            *draws,
            law.logsumexp if stored else unused,
            workspace.first,
            workspace.judge_arrived,
            workspace.judge_parts,
            workspace.rows,
            workspace.flags,
            *sizes,
            judge.parts,
            judge_tiles,
            *strides,
            law.logsumexp.stride(0) if stored else 0,
            int(not overlap),
            **forms,
            STORED=stored,
            TOGETHER=together,
            **judge.constants,
        )
    emit_kernel[(-(-emit.parts // emit_tiles) * batch,)](
        *rows,
        block.positions,
        *state,
        block.seeds,
        *draws,
        workspace.first,
        workspace.judge_arrived,
        workspace.emit_arrived,
        workspace.emit_parts,
        workspace.winners,
        workspace.rows,
        workspace.flags,
        out.tokens,
        out.num_emitted,
        out.num_accepted,
        out.status,
        *sizes,
        emit.parts,
        emit_tiles,
        *strides,
        **forms,
        TOGETHER=together,
        launch_pdl=together,
        **emit.constants,
    )
    if not overlap:
        return out
    parts = torch.empty((batch, num_draft_tokens, judge.parts), dtype=torch.float32, device=logits.device)
    if num_draft_tokens:
        overlap_kernel[(judge.parts * batch * num_draft_tokens,)](
            *rows,
            *state,
            *draws,
            workspace.rows,
            parts,
            *sizes,
            judge.parts,
            *strides,
            **forms,
            **judge.constants,
        )
    overlaps = parts.sum(-1)
    return replace(out, overlap=overlaps)


def _check(block: Block, law: DraftLaw, num_draft_tokens: int) -> None:
    """Refuse what the kernels would read wrongly: shapes, dtypes and strides."""
    batch, num_rows = len(block.row_starts) - 1, block.logits.shape[0]
    states = batch if block.slots is None else len(block.seeds)
    shapes = [
        ("tokens", block.tokens, num_rows, INTEGERS),
        ("positions", block.positions, num_rows, (torch.int64,)),
        ("row_starts", block.row_starts, batch + 1, INTEGERS),
        ("temperature", block.temperature, states, FLOATS),
        ("seeds", block.seeds, states, (torch.int64,)),
        ("slots of the requests", block.slots, batch, INTEGERS),
        ("slots of the drafts", law.slots, batch, INTEGERS),
        ("temperature of the drafts", law.temperature, states, FLOATS),
    ]
    for name, value, length, dtypes in shapes:
        if value is not None and (value.shape != (length,) or value.dtype not in dtypes or not value.is_contiguous()):
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(
                f"{name}: expected contiguous {expected} [{length}], got {value.dtype} {list(value.shape)}"
            )
    _check_rows("logits", block.logits, 2)
    if law.values is not None:
        _check_values(law, law.values, num_draft_tokens, block.logits.shape[1])
    elif law.ids is not None or law.logsumexp is not None:
        raise ValueError("ids or logsumexp without values: a one-hot q has neither; pass the values they belong to")


def _dense(rows: torch.Tensor) -> bool:
    """Whether the entries of a row lie side by side; the stride of a single entry may be anything."""
    return rows.shape[-1] <= 1 or rows.stride(-1) == 1


def _check_rows(name: str, value: torch.Tensor, ndim: int) -> None:
    if value.ndim != ndim or value.dtype not in ROW_DTYPES or not _dense(value):
        raise ValueError(
            f"{name}: expected {ndim} dimensions, the last contiguous, in float32, bfloat16 or float16;"
            f" got {value.dtype} {list(value.shape)} with strides {value.stride()}"
        )


def _check_values(law: DraftLaw, values: torch.Tensor, num_draft_tokens: int, vocab_size: int) -> None:
    _check_rows("values", values, 3)
    shape, stored = list(values.shape), law.logsumexp
    if shape[1] < num_draft_tokens:
        raise ValueError(
            f"values {shape} hold {shape[1]} positions a request, fewer than the {num_draft_tokens} drafts"
        )
    if law.ids is None:
        if shape[2] != vocab_size:
            raise ValueError(
                f"values {shape} cover {shape[2]} tokens, the target {vocab_size}: cut the padding, or give the ids of"
                " the columns"
            )
    elif list(law.ids.shape) != shape or law.ids.dtype not in INTEGERS or not _dense(law.ids):
        raise ValueError(f"ids: expected int32 or int64 {shape}, got {law.ids.dtype} {list(law.ids.shape)}")
    elif shape[2] > MAX_LISTED:
        raise ValueError(f"{shape[2]} ids a row, of at most {MAX_LISTED}: pass q over the vocabulary")
    if stored is not None:
        if law.probs or law.ids is not None:
            raise ValueError(
                "logsumexp belongs to logits over the vocabulary: q of probabilities or of a list needs none"
            )
        if list(stored.shape) != shape[:2] or stored.dtype != torch.float32 or not _dense(stored):
            raise ValueError(f"logsumexp: expected float32 {shape[:2]}, got {stored.dtype} {list(stored.shape)}")
