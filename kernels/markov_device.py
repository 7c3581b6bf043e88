"""Device functions of the Markov chain: noise, tiles of logits in the order of tensor cores, words of a race.

Columns are handled in fours: a tile of TILE columns is held as four blocks [rows, TILE / 4] whose element g belongs to
column 4 g + j. A key of a race, in base-2 logarithms and float32, is

    key = logits (log2(e) / T) - log2(E)        greedy rows: key = logits

of a token, or of a group with its log2 mass in the place of the first term; E is a unit exponential of
`dspark.sampling.Streams`. The largest key wins, the lowest number among equals. A race travels between thread blocks
as one 64-bit word, so that the maximum of words is the winner:

    bits 63..32  the key as an integer of the same order
    bits 31..8   2^24 - 1 - number, the complement of its 24 bits
    bits 7..0    number of the step modulo 256, by which a reader sees that the word is this step's
"""

from dspark.kernels import tl, triton
from dspark.kernels.noise import INTERPRETED, cell, exponential, fast_exp2, fast_log2
from dspark.kernels.philox import PER_GROUP, PER_TOKEN, SINGLE, philox4x32

MAX_ID = 2**24 - 1  # of a race word

_INTERPRETED = tl.constexpr(INTERPRETED)
_MAX_ID = tl.constexpr(MAX_ID)
_PER_TOKEN, _SINGLE, _PER_GROUP = tl.constexpr(PER_TOKEN), tl.constexpr(SINGLE), tl.constexpr(PER_GROUP)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log2_exponential(word):
    """log2 of E / ln 2, E the unit exponential of a random word. The missing constant is the same in every key."""
    return fast_log2(exponential(word))


@triton.jit
def _wide_product(word, MULTIPLIER: tl.constexpr):
    """word times a 32-bit constant, uint64, in one instruction; Triton's own widening product takes two."""
    if MULTIPLIER == 0xD2511F53:
        return tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, 0xD2511F53;", "=l,r", [word], dtype=tl.uint64, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, 0xCD9E8D57;", "=l,r", [word], dtype=tl.uint64, is_pure=True, pack=1
        )


@triton.jit
def draft_words(counter, position, key_low, key_high, KIND: tl.constexpr):
    """The four words of `philox4x32` at counter (counter, position, 0, KIND): numbers of purpose DRAFT. Operands may
    have size 1 along an axis; the first rounds then work on fewer numbers.
    """
    zero = tl.zeros([1, 1], tl.uint32)
    if _INTERPRETED:
        return philox4x32(counter, position, zero, zero + KIND, key_low, key_high)
    else:
        c0, c1, c2, c3, k0, k1 = counter, position, zero, zero + KIND, key_low, key_high
        for _ in tl.static_range(10):
            product0, product1 = _wide_product(c0, 0xD2511F53), _wide_product(c2, 0xCD9E8D57)
            c0, c1 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0, product1.to(tl.uint32)
            c2, c3 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1, product0.to(tl.uint32)
            k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        return c0, c1, c2, c3


@triton.jit
def noise_of_groups(four, position, key_low, key_high):
    """`log2_exponential` of the four groups 4 four + 0..3: four [1, G], the others [R, 1]; uint32."""
    w0, w1, w2, w3 = draft_words(four, position, key_low, key_high, _PER_GROUP)
    return log2_exponential(w0), log2_exponential(w1), log2_exponential(w2), log2_exponential(w3)


@triton.jit
def uniform_number(position, key_low, key_high):
    """The uniform number of a draw, as `cell` has it; [R, 1] uint32 to [R, 1] float32."""
    word, _, _, _ = draft_words(tl.zeros([1, 1], tl.uint32), position, key_low, key_high, _SINGLE)
    return cell(word)


@triton.jit
def noise_of_id(token, position, key_low, key_high, nothing):
    """`log2_exponential` of single tokens: token [1, G] int32, the others [R, 1] uint32.

    `nothing` is 0. From a loop, one that the compiler can't know keeps it from holding the round keys in registers.
    """
    return _noise_of_one(token, position, key_low + nothing, key_high + nothing, _PER_TOKEN)


@triton.jit
def noise_of_group(group, position, key_low, key_high):
    """`log2_exponential` of single groups: group [1, G] int32, the others [R, 1] uint32."""
    return _noise_of_one(group, position, key_low, key_high, _PER_GROUP)


@triton.jit
def _noise_of_one(number, position, key_low, key_high, KIND: tl.constexpr):
    w0, w1, w2, w3 = draft_words((number // 4).to(tl.uint32), position, key_low, key_high, KIND)
    which = number % 4
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return log2_exponential(word)


@triton.jit
def bfloat16_bits(value):
    """Bits of the nearest bfloat16, ties to even, as int32 0..65535; the interpreter's own conversion cuts."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def bfloat16_pair(low, high):
    """Two float32 blocks rounded to bfloat16, packed into int32: `low` in the low half."""
    if _INTERPRETED:
        return bfloat16_bits(low) | (bfloat16_bits(high) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def low_half(pair):
    """The low bfloat16 of a packed pair, as float32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pair):
    """The high bfloat16 of a packed pair, as float32."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(value, KIND: tl.constexpr):
    """float32 block rounded to the dtype `KIND` names ("bf16" or "fp32"), as float32."""
    if KIND == "bf16":
        return low_half(bfloat16_pair(value, value))
    else:
        return value


@triton.jit
def read_weight(pointers, mask, FP8: tl.constexpr):
    """A block of W2 as stored, bytes of e4m3 widened to float16 (float32 in the interpreter), exactly:
    the hardware has one instruction for two of them, and none to bfloat16."""
    if FP8:
        raw = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
        if _INTERPRETED:
            bits = raw.to(tl.int32)
            return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        else:
            return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def weight_tile(
    w2_ptr, tile, num_columns, WHOLE: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The rows of W2 of a tile, [TILE, BLOCK_R], in an order in which threads of the product own fours of columns.

    Tensor cores leave a thread columns 2 l + {0, 1} of every 8, l its place among four, and give the WARPS that stand
    side by side 8 columns in turn. So row ((2 h + t) WARPS + w) 8 + 2 l + b of the tile is column
    w TILE / WARPS + 16 h + 4 l + 2 t + b: a thread has both pairs of a four, and a warp neighbouring columns.
    """
    c = tl.arange(0, TILE)
    warp, high = c // 8 % WARPS, c // (16 * WARPS)
    local = warp * (TILE // WARPS) + high * 16 + (c // 2 % 4) * 4 + (c // (8 * WARPS) % 2) * 2 + c % 2
    r = tl.arange(0, BLOCK_R)
    start = (tl.zeros([], tl.int64) + tile) * TILE
    at = w2_ptr + start * RANK + local[:, None] * RANK + r[None, :]
    if WHOLE and RANK == BLOCK_R:
        return read_weight(at, None, FP8)
    else:
        return read_weight(at, (local < num_columns - start)[:, None] & (r < RANK)[None, :], FP8)


@triton.jit
def four_columns(product, BLOCK_B: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr):
    """A product [BLOCK_B, TILE] in the order of `weight_tile`, as four blocks [BLOCK_B, TILE / 4]."""
    parts = tl.reshape(product, [BLOCK_B, TILE // (16 * WARPS), 2, WARPS, 4, 2])
    parts = tl.reshape(tl.permute(parts, (0, 3, 1, 4, 2, 5)), [BLOCK_B, TILE // 4, 2, 2])
    even, odd = tl.split(parts)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def feature_rows(index, live, rows_ptr, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Rows `index` [B] of a matrix [n, RANK]: [B, BLOCK_R], zero where not live."""
    r = tl.arange(0, BLOCK_R)
    at = rows_ptr + index.to(tl.int64)[:, None] * RANK + r[None, :]
    return tl.load(at, mask=live[:, None] & (r < RANK)[None, :], other=0.0)


@triton.jit
def bias_of(features, weight):
    """features [B, BLOCK_R] times weight [TILE, BLOCK_R] transposed, in float32: [B, TILE]."""
    if _INTERPRETED:
        return tl.dot(features.to(tl.float32), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    else:
        if weight.dtype == tl.float16:  # of an 8-bit W2; features beyond float16 would be of no trained head
            features = tl.minimum(tl.maximum(features.to(tl.float32), -65504.0), 65504.0)
        return tl.dot(features.to(weight.dtype), tl.trans(weight), input_precision="ieee")


@triton.jit
def read_columns(base_ptr, row, four, live, num_columns, WHOLE: tl.constexpr, PACKED: tl.constexpr):
    """Four float32 blocks [R, G]: columns 4 four + 0..3 of rows that start at element `row` [R]; 0 outside.

    PACKED takes four bfloat16 with one 8-byte load; words are numbered in 32 bits.
    """
    last = num_columns - four * 4
    if PACKED:
        mask = live[:, None]
        if not WHOLE:
            mask = mask & (last > 0)[None, :]
        at = base_ptr.to(tl.pointer_type(tl.int64)) + ((row // 4).to(tl.int32)[:, None] + four[None, :])
        words = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        return low_half(low), high_half(low), low_half(high), high_half(high)
    else:
        at = base_ptr + row[:, None] + four[None, :] * 4
        a = tl.load(at, mask=live[:, None] & (last > 0)[None, :], other=0.0).to(tl.float32)
        b = tl.load(at + 1, mask=live[:, None] & (last > 1)[None, :], other=0.0).to(tl.float32)
        c = tl.load(at + 2, mask=live[:, None] & (last > 2)[None, :], other=0.0).to(tl.float32)
        d = tl.load(at + 3, mask=live[:, None] & (last > 3)[None, :], other=0.0).to(tl.float32)
        return a, b, c, d


@triton.jit
def write_columns(
    cache_ptr, row, four, live, num_columns, low, high, a, b, c, d, WHOLE: tl.constexpr, PACKED: tl.constexpr
):
    """The inverse of `read_columns`: packed pairs `low` and `high`, or the four blocks, representable in the cache."""
    last = num_columns - four * 4
    if PACKED:
        mask = live[:, None]
        if not WHOLE:
            mask = mask & (last > 0)[None, :]
        words = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        tl.store(
            cache_ptr.to(tl.pointer_type(tl.int64)) + ((row // 4).to(tl.int32)[:, None] + four[None, :]),
            words,
            mask=mask,
        )
    else:
        at = cache_ptr + row[:, None] + four[None, :] * 4
        tl.store(at, a, mask=live[:, None] & (last > 0)[None, :])
        tl.store(at + 1, b, mask=live[:, None] & (last > 1)[None, :])
        tl.store(at + 2, c, mask=live[:, None] & (last > 2)[None, :])
        tl.store(at + 3, d, mask=live[:, None] & (last > 3)[None, :])


@triton.jit
def row_scales(temperature):
    """Factor of the logits in a key, and whether noise is added: log2(e) / T and 1, or 1 and 0 for greedy rows."""
    noisy = temperature > 0.0
    # Below T = 1e-30 the factor would overflow; there the noise has long been lost in the rounding of the key.
    scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
    return tl.where(noisy, scale, 1.0), tl.where(noisy, 1.0, 0.0)


@triton.jit
def race_word(key, token):
    """Word of a key and an id, low byte zero; see the top of this file."""
    bits = (key + 0.0).to(tl.int32, bitcast=True)  # the two zeros are one key
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | ((token ^ _MAX_ID).to(tl.int64) << 8)


@triton.jit
def renumbered(word, number):
    """A race word with the same key and another number."""
    return (word & -4294967296) | ((number ^ _MAX_ID).to(tl.int64) << 8)


@triton.jit
def race_winner(word):
    """Id of a race word."""
    return ((word >> 8) & _MAX_ID).to(tl.int32) ^ _MAX_ID


@triton.jit
def joined_log2_mass(parts, noisy, AXIS: tl.constexpr):
    """Logarithm of the sum of 2^part along an axis; greedy rows: the largest part."""
    peak = tl.max(parts, axis=AXIS)
    total = tl.sum(fast_exp2(parts - tl.expand_dims(peak, AXIS)), axis=AXIS)
    return tl.where(noisy > 0.0, (peak + fast_log2(total)) * _LN2, peak)


@triton.jit
def prefetch_rows(matrix_ptr, row, BYTES: tl.constexpr):
    """Bring rows [n] of BYTES each into the L2 cache: one of them will be read, and what is read next waits for it."""
    if not _INTERPRETED:
        at = matrix_ptr.to(tl.int64) + row * BYTES
        for offset in tl.static_range(0, BYTES, 128):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at + offset], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def after_barrier(pointer):
    """The pointer, once all threads of the program have written what they were to write. `tl.debug_barrier` does the
    same, and keeps a loop around it from being pipelined."""
    if _INTERPRETED:
        return pointer
    else:
        nothing = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [tl.zeros([], tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
        return pointer + tl.multiple_of(nothing, 16)
