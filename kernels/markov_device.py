"""Device functions of the Markov chain: noise, the race of one vocabulary tile, features of a token.

Columns are handled in groups of four, because one Philox output is the noise of four consecutive token ids: a tile is
BLOCK_G groups, held as four [rows, BLOCK_G] blocks whose element g belongs to column 4 g + j.

A token's key in the race, in base-2 logarithms and float32, is

    key = logit * (log2(e) / T) - log2(E)        greedy rows: key = logit

with E the unit exponential of `dspark.sampling.Streams`; the largest key wins, the lowest id among equals. The winner
minimises E / p, as in `dspark.sampling.sample`. A race travels between thread blocks as one 64-bit word, so that the
maximum of words is the winner:

    bits 63..32  the key as an integer of the same order
    bits 31..8   2^24 - 1 - id, the complement of its 24 bits
    bits 7..0    number of the step modulo 256, by which a reader sees that the word is this step's
"""

import os

from dspark.kernels import tl, triton
from dspark.kernels.philox import philox4x32

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_ID = 2**24 - 1  # of a race word

_INTERPRETED = tl.constexpr(INTERPRETED)
_MAX_ID = tl.constexpr(MAX_ID)
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number
_WORST_WORD = tl.constexpr(-(2**63))
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log2_exponential(word):
    """log2 of the unit exponential that a random word stands for; relative error of E below 1e-6.

    E = -log1p(-u). Near u = 0, where winners come from, 1 - u has lost the digits of u, and the series is taken.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = 0.30183047 * u + 0.16648944
    series = series * u + 0.25318614
    series = series * u + 0.33322987
    series = series * u + 0.50000054
    series = series * u + 1.0
    return tl.log2(tl.where(u < 0.25, series * u, tl.log2(1.0 - u) * -_LN2))


@triton.jit
def noise_of_group(group, position, key_low, key_high):
    """log2 E of the four tokens 4 group + 0..3 at the draft purpose: group [1, G], the others [R, 1]; uint32."""
    zero = tl.zeros([1, 1], tl.uint32)
    w0, w1, w2, w3 = philox4x32(group, position, zero, zero, key_low, key_high)
    return log2_exponential(w0), log2_exponential(w1), log2_exponential(w2), log2_exponential(w3)


@triton.jit
def noise_of_id(token, position, key_low, key_high):
    """log2 E of single tokens: token [1, G] int32, the others [R, 1] uint32."""
    zero = tl.zeros([1, 1], tl.uint32)
    w0, w1, w2, w3 = philox4x32((token // 4).to(tl.uint32), position, zero, zero, key_low, key_high)
    which = token % 4
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
        if _INTERPRETED:
            return (bfloat16_bits(value) << 16).to(tl.float32, bitcast=True)
        else:
            return value.to(tl.bfloat16).to(tl.float32)
    else:
        return value


@triton.jit
def read_weight(pointers, mask, FP8: tl.constexpr):
    """A block of W2 as stored, bytes of e4m3 widened to bfloat16 (float32 in the interpreter), exactly."""
    if FP8:
        raw = tl.load(pointers, mask=mask, other=0)
        if _INTERPRETED:
            bits = raw.to(tl.int32)
            return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        else:
            return raw.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def weight_block(
    w2_ptr, tile, J: tl.constexpr, num_columns,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows 4 g + J of a tile of W2: [BLOCK_G, BLOCK_R]."""
    local = tl.arange(0, BLOCK_G) * 4 + J
    r = tl.arange(0, BLOCK_R)
    start = (tl.zeros([], tl.int64) + tile) * (4 * BLOCK_G)
    mask = (local < num_columns - start)[:, None]
    if RANK != BLOCK_R:
        mask = mask & (r < RANK)[None, :]
    return read_weight(w2_ptr + start * RANK + local[:, None] * RANK + r[None, :], mask, FP8)


@triton.jit
def bias_of(features, weight, FMA: tl.constexpr):
    """features [R, BLOCK_R] times weight [BLOCK_G, BLOCK_R] transposed, accumulated in float32: [R, BLOCK_G]."""
    if FMA:
        return tl.sum(weight.to(tl.float32)[None, :, :] * features.to(tl.float32)[:, None, :], axis=2)
    elif _INTERPRETED:
        return tl.dot(features.to(tl.float32), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(features.to(weight.dtype), tl.trans(weight), input_precision="ieee")


@triton.jit
def read_columns(base_ptr, row, group, live, num_columns, PACKED: tl.constexpr):
    """Four float32 blocks [R, G]: columns 4 group + 0..3 of rows that start at element `row` [R]; 0 outside.

    PACKED takes the four bfloat16 of a group with one 8-byte load.
    """
    if PACKED:
        words = tl.load(
            base_ptr.to(tl.pointer_type(tl.int64)) + (row // 4)[:, None] + group[None, :],
            mask=live[:, None] & (group * 4 < num_columns)[None, :],
            other=0,
        )
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        return low_half(low), high_half(low), low_half(high), high_half(high)
    else:
        at = base_ptr + row[:, None] + group[None, :] * 4
        last = num_columns - group * 4
        a = tl.load(at, mask=live[:, None] & (last > 0)[None, :], other=0.0).to(tl.float32)
        b = tl.load(at + 1, mask=live[:, None] & (last > 1)[None, :], other=0.0).to(tl.float32)
        c = tl.load(at + 2, mask=live[:, None] & (last > 2)[None, :], other=0.0).to(tl.float32)
        d = tl.load(at + 3, mask=live[:, None] & (last > 3)[None, :], other=0.0).to(tl.float32)
        return a, b, c, d


@triton.jit
def write_columns(cache_ptr, row, group, live, num_columns, a, b, c, d, PACKED: tl.constexpr):
    """The inverse of `read_columns`; values are already representable in the cache's dtype."""
    if PACKED:
        low, high = bfloat16_pair(a, b), bfloat16_pair(c, d)
        words = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        tl.store(
            cache_ptr.to(tl.pointer_type(tl.int64)) + (row // 4)[:, None] + group[None, :],
            words,
            mask=live[:, None] & (group * 4 < num_columns)[None, :],
        )
    else:
        at = cache_ptr + row[:, None] + group[None, :] * 4
        last = num_columns - group * 4
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
def race_step(best, best_id, key, token, ORDERED: tl.constexpr):
    """Best key and its id after one more block of candidates. ORDERED: the new ids are above the old ones."""
    better = key > best
    if not ORDERED:
        better = better | ((key == best) & (token < best_id))
    return tl.where(better, key, best), tl.where(better, token, best_id)


@triton.jit
def mass_step(top, mass, x0, x1, x2, x3):
    """Running maximum, and sum of 2^(x - maximum), after four more blocks."""
    new = tl.maximum(top, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
    added = tl.exp2(x0 - new) + tl.exp2(x1 - new) + (tl.exp2(x2 - new) + tl.exp2(x3 - new))
    return new, mass * tl.exp2(top - new) + added


@triton.jit
def race_word(key, token):
    """Word of a key and an id, low byte zero; see the top of this file."""
    bits = key.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | ((token ^ _MAX_ID).to(tl.int64) << 8)


@triton.jit
def race_winner(word):
    """Id of a race word."""
    return ((word >> 8) & _MAX_ID).to(tl.int32) ^ _MAX_ID


@triton.jit
def log2_mass(top, mass, noisy, AXIS: tl.constexpr):
    """log2 of the sum of 2^x along an axis from running maxima and masses; greedy rows: the maximum."""
    peak = tl.max(top, axis=AXIS)
    total = tl.sum(mass * tl.exp2(top - tl.expand_dims(peak, AXIS)), axis=AXIS)
    return tl.where(noisy > 0.0, peak + tl.log2(tl.maximum(total, 1e-37)), peak)  # a part may hold -inf alone


@triton.jit
def joined_log2_mass(parts, noisy, AXIS: tl.constexpr):
    """`log2_mass` of the parts that thread blocks computed."""
    peak = tl.max(parts, axis=AXIS)
    total = tl.sum(tl.exp2(parts - tl.expand_dims(peak, AXIS)), axis=AXIS)
    return tl.where(noisy > 0.0, (peak + tl.log2(total)) * _LN2, peak)
