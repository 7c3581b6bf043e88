"""The short convolution before KDA on vLLM's pages, without losing what a rejection needs.

    y_p = silu(sum_{i < W} w[:, i] x_{p - W + 1 + i})          depthwise, width W

A page [C, L] of vLLM holds the W - 1 inputs before the next token in its first columns; the rest, T - 1 columns for a
window of T tokens, is room for drafts. Verification leaves the first columns as they are and puts the window's inputs
behind them, the last of T into a spare row of the step because the page is one column short. After a kept tokens the
history is columns a .. a + W - 2 of that line, so a = 0 keeps the page's own: vLLM's update drops the oldest column
while it verifies, and can't go back to it.
Source: vLLM 0.33.0, model_executor/layers/mamba/ops/causal_conv1d.py for the layout; Kimi Linear, arXiv:2510.26692,
section 3.

Read `conv_verify_ref` and `conv_commit_ref` first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dspark.kernels import tl, triton
from dspark.kernels.kda import Rows, Window, compute_dtype, runs_kernel
from dspark.vllm.kda_state import CommitPlan

# Eight channels a thread are 16 bytes of bfloat16; see dspark.kernels.conv_window.
VERIFY_CHANNELS, VERIFY_WARPS = 512, 2
COMMIT_CHANNELS, COMMIT_WARPS = 256, 4


@dataclass(frozen=True)
class ConvPages:
    """Pages of one layer: `pages` [blocks, C, L], any strides; `spare` [rows of a step, C], contiguous."""

    pages: torch.Tensor
    spare: torch.Tensor

    def window(self, weight: torch.Tensor) -> Window:
        """The same, for a verification that convolves: what `conv_verify` reads and writes, it does."""
        return Window(weight, self.pages.transpose(1, 2), None, self.spare)


def check_pages(state: ConvPages, width: int, window: int) -> None:
    """Raise ValueError where a window does not fit behind the history."""
    columns = state.pages.shape[2]
    if columns < width + window - 2:
        raise ValueError(
            f"a convolution page of {columns} columns is too short for {window} tokens behind a history of "
            f"{width - 1}: it takes {width + window - 2}; an input that a later step reads would be lost"
        )


def conv_verify_ref(inputs: torch.Tensor, weight: torch.Tensor, state: ConvPages, rows: Rows) -> torch.Tensor:
    """The definition, in PyTorch. Same contract as `conv_verify`."""
    history, columns = weight.shape[1] - 1, state.pages.shape[2]
    dtype = compute_dtype(inputs, weight)
    out = torch.zeros_like(inputs, memory_format=torch.contiguous_format)
    for row, (slot, first, count) in enumerate(
        zip(rows.slots.tolist(), rows.first_token.tolist(), rows.num_rows.tolist(), strict=True)
    ):
        if slot < 0 or not count:
            continue
        new = inputs[first : first + count]
        line = torch.cat([state.pages[slot, :, :history].T, new]).to(dtype)
        mixed = sum(line[i : i + count] * weight[:, i].to(dtype) for i in range(history + 1))
        out[first : first + count] = F.silu(mixed).to(out.dtype)
        state.pages[slot, :, history : min(history + count, columns)] = new[: columns - history].T
        if history + count > columns:
            state.spare[row] = new[columns - history]
    return out


@triton.jit
def _conv_verify_kernel(  # noqa: PLR0913 (pointers, sizes and strides)
    input_ptr, weight_ptr, page_ptr, spare_ptr, out_ptr, slots_ptr, num_rows_ptr, first_ptr,
    channels, input_stride, page_stride, channel_stride, column_stride,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    slot, first = tl.load(slots_ptr + row), tl.load(first_ptr + row)
    given = tl.load(num_rows_ptr + row).to(tl.int32)
    if given == 0:
        return
    count = tl.where(slot >= 0, given, 0)
    begin, column = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    lane = begin + column
    page = page_ptr + slot * page_stride + begin * channel_stride + column * channel_stride
    known = lane < tl.where(count > 0, channels, 0)
    # A thread has its channels to itself, and all their inputs before it stores the first output.
    line, taps = (), ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight_ptr + lane * WIDTH + i, mask=lane < channels, other=0.0).to(tl.float32),)  # noqa: RUF005
    for i in tl.static_range(WIDTH - 1):
        line = line + (tl.load(page + i * column_stride, mask=known, other=0.0).to(input_ptr.dtype.element_ty),)  # noqa: RUF005
    for t in tl.static_range(WINDOW):
        source = input_ptr + (first + t) * input_stride + begin + column
        line = line + (tl.load(source, mask=lane < tl.where(t < count, channels, 0), other=0.0),)  # noqa: RUF005
    for t in tl.static_range(WINDOW):
        mixed = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(WIDTH):
            mixed += line[t + i].to(tl.float32) * taps[i]
        mixed = mixed / (1.0 + tl.exp(-tl.maximum(mixed, -80.0)))
        out = out_ptr + (first + t) * channels + begin + column
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=lane < tl.where(t < given, channels, 0))
        kept = line[t + WIDTH - 1]
        mine = lane < tl.where(t < count, channels, 0)
        if t + WIDTH - 1 < COLUMNS:
            tl.store(page + (t + WIDTH - 1) * column_stride, kept.to(page_ptr.dtype.element_ty), mask=mine)
        else:
            spare = spare_ptr + row.to(tl.int64) * channels + begin + column
            tl.store(spare, kept.to(spare_ptr.dtype.element_ty), mask=mine)


def launch_conv_verify(
    inputs: torch.Tensor, weight: torch.Tensor, state: ConvPages, rows: Rows, window: int
) -> torch.Tensor:
    """Same contract as `conv_verify`, wherever Triton runs."""
    channels, width = weight.shape
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _conv_verify_kernel[(triton.cdiv(channels, VERIFY_CHANNELS), len(rows.slots))](
        inputs, weight, state.pages, state.spare, out, rows.slots, rows.num_rows, rows.first_token,
        channels, inputs.stride(0), *state.pages.stride(),
        COLUMNS=state.pages.shape[2], WIDTH=width, WINDOW=window, BLOCK=VERIFY_CHANNELS, num_warps=VERIFY_WARPS,
    )  # fmt: skip
    return out


def conv_verify(inputs: torch.Tensor, weight: torch.Tensor, state: ConvPages, rows: Rows, window: int) -> torch.Tensor:
    """Convolve the packed tokens of a step behind their rows' history, and keep their inputs.

    Args:
        inputs: [N, C], contiguous within a token.
        weight: [C, W] contiguous, the last column meets the current token.
        state: the layer's pages; columns from W - 1 on and the rows' spare inputs are written, the history is not.
        rows: packed rows of the step, each with at most `window` tokens.
        window: most tokens of a row.

    Returns:
        [N, C] in the dtype of `inputs`; zero for padding rows. Tokens of no row hold anything.

    Raises:
        ValueError: the pages are too short.

    Source: `conv_verify_ref`.
    """
    check_pages(state, weight.shape[1], window)
    if runs_kernel(state.pages):
        return launch_conv_verify(inputs, weight, state, rows, window)
    return conv_verify_ref(inputs, weight, state, rows)


def conv_commit_ref(layers: Sequence[ConvPages], plan: CommitPlan, width: int) -> None:
    """The definition, in PyTorch. Same contract as `ConvTable.commit`."""
    history, written = width - 1, []
    targets = [(plan.destinations, plan.num_records)]
    if plan.boundary is not None:
        targets.append((plan.boundary.slots, plan.boundary.num_records))
    for layer in layers:
        for into, counts in targets:
            for row, (slot, to, count) in enumerate(
                zip(plan.rows.slots.tolist(), into.tolist(), counts.tolist(), strict=True)
            ):
                if slot >= 0 and to >= 0:
                    line = torch.cat([layer.pages[slot], layer.spare[row][:, None].to(layer.pages.dtype)], 1)
                    written.append((layer.pages, to, line[:, count : count + history].clone()))
    for pages, to, columns in written:  # all are read before any is written
        pages[to, :, :history] = columns


@triton.jit
def _kept_columns(page, spare, at, columns_before, mask, COLUMNS: tl.constexpr, column_stride):
    """Columns at .. of a page's line, the spare input being the one behind the page."""
    place = at + columns_before
    value = tl.load(page + place[None, :] * column_stride, mask=mask & (place < COLUMNS)[None, :], other=0.0)
    last = tl.load(spare + place[None, :] * 0, mask=mask & (place == COLUMNS)[None, :], other=0.0)
    return tl.where((place == COLUMNS)[None, :], last.to(value.dtype), value)


@triton.jit
def _conv_commit_kernel(  # noqa: PLR0913 (pointers, sizes and strides)
    page_ptr, spare_ptr, offsets_ptr, slots_ptr, counts_ptr, into_ptr, boundary_ptr, distance_ptr,
    channels, page_stride, channel_stride, column_stride,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, COLUMN_TILE: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(1), tl.program_id(2)
    slot, into = tl.load(slots_ptr + row), tl.load(into_ptr + row)
    if (slot < 0) | (into < 0):
        return
    column, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMN_TILE)
    mask = (column < channels)[:, None] & (j < WIDTH - 1)[None, :]
    layer_page = page_ptr + tl.load(offsets_ptr + layer * 2) + column[:, None] * channel_stride
    spare = spare_ptr + tl.load(offsets_ptr + layer * 2 + 1) + row.to(tl.int64) * channels + column[:, None]
    page = layer_page + slot * page_stride
    final = _kept_columns(page, spare, tl.load(counts_ptr + row), j, mask, COLUMNS, column_stride)
    if HAS_BOUNDARY:
        boundary = tl.load(boundary_ptr + row)
        crosses = (column < tl.where(boundary >= 0, channels, 0))[:, None] & (j < WIDTH - 1)[None, :]
        stored = _kept_columns(page, spare, tl.load(distance_ptr + row), j, crosses, COLUMNS, column_stride)
        tl.debug_barrier()  # the page may be its own destination, and another thread's column
        tl.store(layer_page + boundary * page_stride + j[None, :] * column_stride, stored, mask=crosses)
    else:
        tl.debug_barrier()
    tl.store(layer_page + into * page_stride + j[None, :] * column_stride, final, mask=mask)


class ConvTable:
    """Pages of all layers that one commit serves."""

    def __init__(self, layers: Sequence[ConvPages], width: int) -> None:
        """Take at least one layer, with a convolution of `width`.

        Raises:
            ValueError: the layers differ in shape, stride, dtype or device.
        """
        self.layers, self.width = tuple(layers), width
        first = self.layers[0]
        for index, layer in enumerate(self.layers):
            for name in ("pages", "spare"):
                mine, theirs = getattr(layer, name), getattr(first, name)
                if (mine.shape, mine.stride(), mine.dtype, mine.device) != (
                    theirs.shape, theirs.stride(), theirs.dtype, theirs.device,
                ):  # fmt: skip
                    raise ValueError(
                        f"layer {index} has {name} {tuple(mine.shape)} of strides {mine.stride()}, {mine.dtype} on "
                        f"{mine.device}, layer 0 {tuple(theirs.shape)} of {theirs.stride()}, {theirs.dtype} on "
                        f"{theirs.device}: one launch cannot serve both; give each kind its own table"
                    )
        distances = [
            [
                (mine.data_ptr() - theirs.data_ptr()) // mine.element_size()
                for mine, theirs in ((layer.pages, first.pages), (layer.spare, first.spare))
            ]
            for layer in self.layers
        ]
        self.offsets = torch.tensor(distances, dtype=torch.int64, device=first.pages.device)

    def commit(self, plan: CommitPlan) -> None:
        """Move what the rows keep into the history of their destination, and of the boundary they cross.

        Args:
            plan: of the same step as the last verification. Rows that keep nothing are left alone.

        Source: `conv_commit_ref`.
        """
        if runs_kernel(self.layers[0].pages):
            self.launch(plan)
        else:
            conv_commit_ref(self.layers, plan, self.width)

    def launch(self, plan: CommitPlan) -> None:
        """Same contract as `commit`, wherever Triton runs."""
        first, boundary = self.layers[0], plan.boundary
        channels, columns = first.pages.shape[1:]
        _conv_commit_kernel[(triton.cdiv(channels, COMMIT_CHANNELS), len(plan.destinations), len(self.layers))](
            first.pages, first.spare, self.offsets, plan.rows.slots, plan.num_records, plan.destinations,
            plan.destinations if boundary is None else boundary.slots,
            plan.destinations if boundary is None else boundary.num_records,
            channels, *first.pages.stride(),
            COLUMNS=columns, WIDTH=self.width, COLUMN_TILE=triton.next_power_of_2(self.width - 1),
            HAS_BOUNDARY=boundary is not None, BLOCK=COMMIT_CHANNELS, num_warps=COMMIT_WARPS,
        )  # fmt: skip
