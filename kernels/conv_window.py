"""The short causal convolution in front of KDA, with a history that is rolled back by a cursor.

    y_p = silu(sum_{i < W} w[:, i] x_{p - W + 1 + i})          depthwise, width W, x = 0 before the first token

The inputs of recent tokens lie in a ring of R rows a slot, the token at ring row `cursor` being the next one. A step
reads the W - 1 rows before the cursor and writes its T rows from the cursor on; accepting a tokens moves the cursor by
a and nothing else. With R >= W - 1 + T a step never overwrites a row that any outcome of it may still need, zero
accepted included.
Source: Kimi Linear, arXiv:2510.26692, section 3 (ShortConv); causal-conv1d for the layout of the weight.

Read `conv_window_ref` first.
"""

import torch
import torch.nn.functional as F

from dspark.kernels import tl, triton
from dspark.kernels.kda import compute_dtype, ring_rows, runs, runs_kernel
from dspark.kernels.kda_device import first_of_row, sigmoid_of, wait_for_previous_kernel
from dspark.kernels.kda_launch import launch_options


def conv_window_ref(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    cursor: torch.Tensor,
    num_rows: torch.Tensor,
    first_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, in PyTorch. Same contract as `conv_window`."""
    if first_token is not None:
        counts = torch.where(slots >= 0, num_rows, 0)
        index, inside = runs(first_token, counts, inputs.shape[1])
        line = torch.zeros_like(inputs)
        line[0, index[inside]] = conv_window_ref(inputs[0, index], weight, ring, slots, cursor, counts)[inside]
        return line
    num_tokens, history, capacity = inputs.shape[1], weight.shape[1] - 1, ring.shape[1]
    dtype = compute_dtype(inputs, weight)
    before = ring[slots.clamp_min(0)[:, None], ring_rows(cursor + capacity - history, history, capacity)]
    line = torch.cat([before, inputs], dim=1).to(dtype)
    mixed = sum(line[:, i : i + num_tokens] * weight[:, i].to(dtype) for i in range(history + 1))
    inside = (torch.arange(num_tokens, device=slots.device) < num_rows[:, None]) & (slots >= 0)[:, None]
    row, t = inside.nonzero(as_tuple=True)
    ring[slots[row], ring_rows(cursor, num_tokens, capacity)[row, t]] = inputs[row, t].to(ring.dtype)
    return torch.where(inside[..., None], F.silu(mixed), 0).to(inputs.dtype)


# (channels, warps) of a program: 4 channels a thread, of which every token of a row is on its way at once. With fewer
# programs than FULL_GRID the time is that of one thread's instructions, and a thread has one channel.
TILE, SPREAD_TILE, FULL_GRID = (512, 4), (128, 4), 132
UNROLLED = 16  # most tokens of which a thread keeps all inputs in registers


@triton.jit
def _conv_window_kernel(
    input_ptr, weight_ptr, ring_ptr, slots_ptr, cursor_ptr, num_rows_ptr, first_token_ptr, out_ptr,
    num_tokens, input_stride, ring_stride,
    CHANNELS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    if OVERLAP == 1:
        wait_for_previous_kernel()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    given = tl.load(num_rows_ptr + row).to(tl.int32)
    count = tl.where(slot >= 0, given, 0)
    cursor = tl.load(cursor_ptr + row).to(tl.int32)  # ring rows are small, and 64-bit remainders are slow
    first = first_of_row(first_token_ptr, row, num_tokens, PACKED)
    filled = given if PACKED else num_tokens
    column = tl.arange(0, BLOCK)
    begin = tl.program_id(0) * BLOCK
    lane = begin + column
    ring = ring_ptr + slot * ring_stride + begin
    weights, taps = weight_ptr + begin * WIDTH + column * WIDTH, ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.load(weights + i, mask=lane < CHANNELS, other=0.0).to(tl.float32),)  # noqa: RUF005 (no unpacking)
    if OVERLAP == 2:
        wait_for_previous_kernel()
    for start in range(0, filled, TOKENS):
        # Every input of these tokens is loaded before the first output is stored.
        line = ()
        for i in tl.static_range(1 - WIDTH, TOKENS):
            token = count * 0 + (start + i)
            value = tl.load(
                input_ptr + (first + token) * input_stride + begin + column,
                mask=lane < tl.where((token >= 0) & (token < count), CHANNELS, 0),
                other=0.0,
            )
            if i < 0:  # before the row's first token lies its history
                past = ring + ((cursor + CAPACITY + token) % CAPACITY) * CHANNELS
                value += tl.load(
                    past + column, mask=lane < tl.where((token < 0) & (count > 0), CHANNELS, 0), other=0.0
                ).to(value.dtype)
            line = line + (value,)  # noqa: RUF005
        for i in tl.static_range(TOKENS):
            mixed = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(WIDTH):
                mixed += line[i + j].to(tl.float32) * taps[j]
            mixed = tl.where(start + i < count, mixed * sigmoid_of(mixed), 0.0)
            out = out_ptr + (first + start + i) * CHANNELS + begin
            tl.store(
                out + column, mixed.to(out_ptr.dtype.element_ty), mask=lane < tl.where(start + i < filled, CHANNELS, 0)
            )
            place = ring + ((cursor + start + i) % CAPACITY) * CHANNELS
            recorded = line[i + WIDTH - 1].to(ring_ptr.dtype.element_ty)
            tl.store(place + column, recorded, mask=lane < tl.where(start + i < count, CHANNELS, 0))


def launch_conv_window(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    cursor: torch.Tensor,
    num_rows: torch.Tensor,
    first_token: torch.Tensor | None = None,
    rows_settled: bool = False,
) -> torch.Tensor:
    """Same contract as `conv_window`, wherever Triton runs."""
    num_tokens, channels = inputs.shape[1:]
    packed, batch = first_token is not None, len(slots)
    out = (torch.zeros if packed else torch.empty)(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    if packed:  # no row can be longer
        num_tokens = ring.shape[1] - weight.shape[1] + 1
    inputs = inputs.flatten(0, 1)
    spread = triton.cdiv(channels, TILE[0]) * batch < FULL_GRID
    block, num_warps = SPREAD_TILE if spread else TILE
    _conv_window_kernel[(triton.cdiv(channels, block), batch)](
        inputs, weight.contiguous(), ring, slots, cursor, num_rows, first_token if packed else slots, out,
        num_tokens, inputs.stride(0), ring.stride(0), CHANNELS=channels, CAPACITY=ring.shape[1],
        WIDTH=weight.shape[1], TOKENS=max(1, min(UNROLLED, num_tokens)), BLOCK=block, PACKED=packed,
        **launch_options(out, num_warps, rows_settled=rows_settled and weight.is_contiguous()),
    )  # fmt: skip
    return out


def conv_window(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    cursor: torch.Tensor,
    num_rows: torch.Tensor,
    first_token: torch.Tensor | None = None,
    *,
    rows_settled: bool = False,
) -> torch.Tensor:
    """Convolve T new tokens a row behind their history, and record them.

    Args:
        inputs: [B, T, C], or packed [1, N, C] with `first_token`; tokens of no row may hold anything.
        weight: [C, W], the last column meets the current token.
        ring: [N, R, C]; zero where a slot's history has not begun. Rows cursor .. cursor + num_rows - 1 (modulo R) are
            written, no other.
        slots: [B] int64, negative for padding rows.
        cursor: [B] int64, 0..R-1, ring row of the row's first token.
        num_rows: [B] int64, 0..T; packed, at most R - W + 1.
        first_token: [B] int64, index of each row's first token on the packed line.
        rows_settled: True promises that the kernel launched right before this call wrote none of `weight`, `slots`,
            `cursor`, `num_rows` and `first_token`: they may then be read before it ends.

    Returns:
        Like `inputs`; zero past `num_rows`, for padding rows, and for packed tokens of no row.

    Raises:
        ValueError: the ring is too short for the window and its history.

    Source: `conv_window_ref`.
    """
    check_ring(ring.shape[1], weight, inputs.shape[1] if first_token is None else 1)
    if runs_kernel(ring):
        return launch_conv_window(inputs, weight, ring, slots, cursor, num_rows, first_token, rows_settled)
    return conv_window_ref(inputs, weight, ring, slots, cursor, num_rows, first_token)


def check_ring(num_rows: int, weight: torch.Tensor, num_tokens: int) -> None:
    """Raise ValueError where a ring of `num_rows` is too short for `num_tokens` behind their history."""
    needed = weight.shape[1] - 1 + num_tokens
    if num_rows < needed:
        raise ValueError(
            f"a ring of {num_rows} rows is too short: {num_tokens} tokens behind a history of "
            f"{weight.shape[1] - 1} need {needed}; "
            "with fewer, a rejected token would overwrite history that rollback still reads"
        )
