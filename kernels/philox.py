"""Philox4x32-10: random words that are a pure function of a key and a counter.

One round multiplies two of the four 32-bit counter words, swaps the halves of the products and mixes in the key:

    c0, c1, c2, c3  <-  hi(M1 c2) ^ c1 ^ k0,  lo(M1 c2),  hi(M0 c0) ^ c3 ^ k1,  lo(M0 c0)

and the key moves on by (W0, W1) after it; ten rounds make the output. There is no state to carry: any word can be
computed alone, in any order, on any device, which is what makes a request's random numbers independent of the batch
around it.
Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3, and the
    known-answer vectors of Random123.

Read `philox_ref` first: it is the definition. The numpy and the Triton forms below give the same bits. The two public
functions read *rows*: row r has a key and the counter words 1..3, and its word w is word w % 4 of the output for
counter (w // 4, *counter[r]).
"""

from collections.abc import Sequence

import numpy as np
import torch

from dspark.kernels import HAS_TRITON, tl, triton

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments
ROUNDS = 10
WORD = 0xFFFFFFFF

# Last counter word of the library's random streams, `dspark.sampling.Streams`: within a purpose, numbers tied to token
# ids, single ones and those tied to groups of columns are kept apart.
PER_TOKEN, SINGLE, PER_GROUP = 0, 1, 2

# Counters per numpy call: six buffers of this many uint64 stay in the L2 cache, and the calls are long enough to hide
# their overhead. On one Zen 4 core, 8 rows of 49152 words take 2.4 ms with 12288 and 3.4 ms with 4096.
NUMPY_CHUNK = 16384

_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS = tl.constexpr(ROUNDS)


def philox_ref(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The definition, in PyTorch.

    Args:
        counter: four int64 tensors of broadcastable shapes; 32-bit words, values 0..2**32-1.
        key: two int64 tensors, likewise.

    Returns:
        Four int64 tensors of the broadcast shape; values 0..2**32-1.

    Source: Salmon et al. 2011, section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product wraps into the sign bit; masking after the shift recovers the unsigned high word.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product1 >> 32 & WORD) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> 32 & WORD) ^ c3 ^ k1, product0 & WORD
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Device function: the four output words of one counter; all arguments and results are uint32 blocks."""
    for _ in tl.static_range(_ROUNDS):
        product0 = c0.to(tl.uint64) * _M0
        product1 = c2.to(tl.uint64) * _M1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + _W0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + _W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _load_row(key_ptr, counter_ptr, row, like):
    """The two key words and the counter words 1..3 of a row, as uint32 blocks of the shape of `like`."""
    zero = (like * 0).to(tl.uint32)
    k0 = zero + tl.load(key_ptr + row * 2).to(tl.uint32)
    k1 = zero + tl.load(key_ptr + row * 2 + 1).to(tl.uint32)
    c1 = zero + tl.load(counter_ptr + row * 3).to(tl.uint32)
    c2 = zero + tl.load(counter_ptr + row * 3 + 1).to(tl.uint32)
    c3 = zero + tl.load(counter_ptr + row * 3 + 2).to(tl.uint32)
    return k0, k1, c1, c2, c3


@triton.jit
def _philox_rows_kernel(key_ptr, counter_ptr, out_ptr, num_words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: rows * num_words overflows int32
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k0, k1, c1, c2, c3 = _load_row(key_ptr, counter_ptr, row, block)
    w0, w1, w2, w3 = philox4x32(block.to(tl.uint32), c1, c2, c3, k0, k1)
    word = block.to(tl.int64) * 4
    out = out_ptr + row * num_words + word
    tl.store(out, w0, mask=word < num_words)
    tl.store(out + 1, w1, mask=word + 1 < num_words)
    tl.store(out + 2, w2, mask=word + 2 < num_words)
    tl.store(out + 3, w3, mask=word + 3 < num_words)


@triton.jit
def _philox_at_kernel(key_ptr, counter_ptr, index_ptr, out_ptr, num_indices, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_indices
    index = tl.load(index_ptr + row * num_indices + column, mask=inside, other=0)
    k0, k1, c1, c2, c3 = _load_row(key_ptr, counter_ptr, row, column)
    w0, w1, w2, w3 = philox4x32((index // 4).to(tl.uint32), c1, c2, c3, k0, k1)
    which = index % 4
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    tl.store(out_ptr + row * num_indices + column, word, mask=inside)


# Counters per program. A round is a dozen integer instructions, so that a few hundred counters already hide the launch.
TRITON_BLOCK = 256


def _philox_numpy(c0: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rounds on counters (c0, *row[:, 2:]), keys row[:, :2]; c0 [r, n] and row [r, 5] are uint64. Writes into c0."""
    k0, k1, *rest = (row[:, i : i + 1] for i in range(5))
    c1, c2, c3 = (np.broadcast_to(word, c0.shape).copy() for word in rest)
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    shift, word = np.uint64(32), np.uint64(WORD)
    for _ in range(ROUNDS):
        np.multiply(c0, np.uint64(MULTIPLIERS[0]), out=product0)
        np.multiply(c2, np.uint64(MULTIPLIERS[1]), out=product1)
        for new, product, old, key in ((c0, product1, c1, k0), (c2, product0, c3, k1)):
            np.right_shift(product, shift, out=new)
            np.bitwise_xor(new, old, out=new)
            np.bitwise_xor(new, key, out=new)
        np.bitwise_and(product1, word, out=c1)
        np.bitwise_and(product0, word, out=c3)
        k0, k1 = k0 + np.uint64(WEYL[0]) & word, k1 + np.uint64(WEYL[1]) & word
    return c0, c1, c2, c3


def _numpy_rows(key: torch.Tensor, counter: torch.Tensor) -> np.ndarray:
    """[R, 5] uint64: key words, then counter words 1..3."""
    return (torch.cat([key, counter], dim=1) & WORD).numpy().astype(np.uint64)


def _chunks(num_rows: int, num_columns: int) -> list[tuple[slice, slice]]:
    """Tiles of about NUMPY_CHUNK cells that cover [num_rows, num_columns]."""
    width = min(max(num_columns, 1), NUMPY_CHUNK)
    height = max(NUMPY_CHUNK // width, 1)
    return [
        (slice(top, top + height), slice(left, left + width))
        for top in range(0, num_rows, height)
        for left in range(0, num_columns, width)
    ]


def _rows_torch(key: torch.Tensor, counter: torch.Tensor, num_words: int) -> torch.Tensor:
    """`philox_rows` [R, num_words] by the definition, on any device."""
    num_blocks = -(-num_words // 4)
    block = torch.arange(num_blocks, device=key.device).expand(len(key), num_blocks)
    words = philox_ref((block, *counter[:, :, None].unbind(1)), key[:, :, None].unbind(1))
    return torch.stack(words, -1).flatten(1)[:, :num_words].to(torch.uint32)


def _rows_numpy(key: torch.Tensor, counter: torch.Tensor, num_words: int) -> torch.Tensor:
    """`philox_rows` [R, num_words] on a CPU."""
    num_rows, num_blocks = len(key), -(-num_words // 4)
    rows = _numpy_rows(key, counter)
    out = np.empty((num_rows, num_blocks, 4), np.uint32)
    for r, b in _chunks(num_rows, num_blocks):
        columns = np.arange(num_blocks, dtype=np.uint64)[b]
        for i, word in enumerate(_philox_numpy(np.tile(columns, (len(rows[r]), 1)), rows[r])):
            out[r, b, i] = word
    return torch.from_numpy(out.reshape(num_rows, num_blocks * 4))[:, :num_words]


def _rows_triton(key: torch.Tensor, counter: torch.Tensor, num_words: int) -> torch.Tensor:
    """`philox_rows` [R, num_words] on a GPU."""
    out = torch.empty((len(key), num_words), dtype=torch.uint32, device=key.device)
    if out.numel():
        grid = (len(key), -(-num_words // (4 * TRITON_BLOCK)))
        _philox_rows_kernel[grid](key.contiguous(), counter.contiguous(), out, num_words, BLOCK=TRITON_BLOCK)
    return out


def _at_torch(key: torch.Tensor, counter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`philox_at` [R, n] by the definition, on any device."""
    words = torch.stack(philox_ref((index // 4, *counter[:, :, None].unbind(1)), key[:, :, None].unbind(1)), -1)
    return words.gather(-1, (index % 4)[..., None])[..., 0].to(torch.uint32)


def _at_numpy(key: torch.Tensor, counter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`philox_at` [R, n] on a CPU."""
    rows, indices = _numpy_rows(key, counter), index.numpy()
    out = np.empty(indices.shape, np.uint32)
    for r, c in _chunks(*indices.shape):
        tile = indices[r, c]
        out[r, c] = np.choose(tile % 4, _philox_numpy((tile // 4).astype(np.uint64), rows[r]))
    return torch.from_numpy(out)


def _at_triton(key: torch.Tensor, counter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`philox_at` [R, n] on a GPU."""
    out = torch.empty(index.shape, dtype=torch.uint32, device=key.device)
    if out.numel():
        grid = (len(key), -(-index.shape[1] // TRITON_BLOCK))
        arguments = (key.contiguous(), counter.contiguous(), index.contiguous(), out, index.shape[1])
        _philox_at_kernel[grid](*arguments, BLOCK=TRITON_BLOCK)
    return out


def _check_rows(key: torch.Tensor, counter: torch.Tensor) -> None:
    """Refuse rows that are not int64 [R, 2] and [R, 3] on one device."""
    for name, rows, width in (("key", key, 2), ("counter", counter, 3)):
        if rows.ndim != 2 or rows.shape[1] != width or rows.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [R, {width}], got {rows.dtype} {tuple(rows.shape)}")
    if len(key) != len(counter) or key.device != counter.device:
        raise ValueError(
            f"key and counter must have as many rows on one device, got {len(key)} on {key.device}"
            f" and {len(counter)} on {counter.device}"
        )


def philox_rows(key: torch.Tensor, counter: torch.Tensor, num_words: int) -> torch.Tensor:
    """The first words of every row.

    Args:
        key: [R, 2] int64; 32-bit words, low word first.
        counter: [R, 3] int64; counter words 1, 2 and 3 of the row.
        num_words: how many words, 0..2**34.

    Returns:
        [R, num_words] uint32; the bits of `philox_ref`, whatever the device.

    Raises:
        ValueError: key or counter has another shape or dtype, or they lie on different devices.

    Source: `philox_ref`.
    """
    _check_rows(key, counter)
    if key.device.type == "cpu":
        return _rows_numpy(key, counter, num_words)
    if key.device.type == "cuda" and HAS_TRITON:
        return _rows_triton(key, counter, num_words)
    return _rows_torch(key, counter, num_words)


def philox_at(key: torch.Tensor, counter: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Chosen words of every row: `philox_rows(...)` at `index`, without computing the others.

    Args:
        key: [R, 2] int64; 32-bit words, low word first.
        counter: [R, 3] int64; counter words 1, 2 and 3 of the row.
        index: [R, n] int64; word numbers, 0 <= index < 2**34.

    Returns:
        [R, n] uint32.

    Raises:
        ValueError: an input has another shape or dtype, or they lie on different devices.

    Source: `philox_ref`.
    """
    _check_rows(key, counter)
    if index.ndim != 2 or len(index) != len(key) or index.dtype != torch.int64 or index.device != key.device:
        raise ValueError(
            f"index must be int64 [{len(key)}, n] on {key.device},"
            f" got {index.dtype} {tuple(index.shape)} on {index.device}"
        )
    if key.device.type == "cpu":
        return _at_numpy(key, counter, index)
    if key.device.type == "cuda" and HAS_TRITON:
        return _at_triton(key, counter, index)
    return _at_torch(key, counter, index)
