"""The Markov chain over the whole draft vocabulary: what a program does with its columns at one step.

Every program owns some tiles of the vocabulary. Through them it computes and stores the corrected logits, and keeps
nothing but the log2 mass of every group of columns. Then it races its groups, reads the logits of the winner back,
draws the column, and publishes one race word a request: the group's key with the column. Which programs there are is
`markov_persistent`'s, how they agree `markov_exchange`'s.

A tile of logits is computed where tensor cores leave it: `weight_tile` orders the rows of W2 so that a thread of the
product owns whole fours of columns, the unit of base logits and of stored words, and a warp whole groups if it can.

Read `dspark.kernels.markov.chain_ref` first: it is the definition.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov import GROUP
from dspark.kernels.markov_device import (
    bfloat16_pair,
    four_columns,
    high_half,
    low_half,
    noise_of_groups,
    race_word,
    row_scales,
    uniform_number,
    write_columns,
)
from dspark.kernels.noise import fast_exp2, fast_log2

_GROUP = tl.constexpr(GROUP)
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number


@triton.jit
def request_rows(row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS: tl.constexpr):
    """Per-row values [R] of requests `row`: cache row, live, scale, noisy, position and key words (uint32)."""
    inside = row < batch
    if HAS_ROWS:
        cache_row = tl.load(cache_rows_ptr + row, mask=inside, other=-1)
    else:
        cache_row = tl.where(inside, row, -1).to(tl.int64)
    scale, noisy = row_scales(tl.load(temperature_ptr + row, mask=inside, other=0.0))
    seed = tl.load(seeds_ptr + row, mask=inside, other=0)
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    return cache_row, cache_row >= 0, scale, noisy, position, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)


@triton.jit
def corrected(
    base, product, tile, w2_scale_ptr, num_columns, logit_scale,
    SCALED: tl.constexpr, HAS_HEAD: tl.constexpr, FP8: tl.constexpr,
    BLOCK_B: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Logits of a tile, four blocks [R, TILE / 4], from its base logits, likewise, and `bias_of` it."""
    a, b, c, d = base
    if HAS_HEAD:
        b0, b1, b2, b3 = four_columns(product, BLOCK_B, TILE, WARPS)
        if FP8:
            four = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            s, last = w2_scale_ptr + four * 4, num_columns - four * 4
            b0 = b0 * tl.load(s, mask=last > 0, other=0.0)[None, :]
            b1 = b1 * tl.load(s + 1, mask=last > 1, other=0.0)[None, :]
            b2 = b2 * tl.load(s + 2, mask=last > 2, other=0.0)[None, :]
            b3 = b3 * tl.load(s + 3, mask=last > 3, other=0.0)[None, :]
        a, b, c, d = a + b0, b + b1, c + b2, d + b3
    if SCALED:
        a, b, c, d = a * logit_scale, b * logit_scale, c * logit_scale, d * logit_scale
    return a, b, c, d


@triton.jit
def tile_masses(
    logits, tile, cache_row, live, scale, noisy, cache_ptr, ids_ptr, num_columns,
    WHOLE: tl.constexpr, SCATTERED: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr,
    BLOCK_B: tl.constexpr, TILE: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Rounds and stores the logits of a tile, and returns the log2 masses of every SUMMED columns of it, a group or
    the half of one that a warp has, [R, TILE / SUMMED]; of greedy rows the largest logits.
    """
    FOURS: tl.constexpr = TILE // 4
    GROUPS: tl.constexpr = TILE // SUMMED
    four = tile * FOURS + tl.arange(0, FOURS)
    last = num_columns - four * 4
    a, b, c, d = logits
    low, high = four, four  # used with PACKED only
    if CACHE == "bf16":
        low, high = bfloat16_pair(a, b), bfloat16_pair(c, d)
        a, b, c, d = low_half(low), high_half(low), low_half(high), high_half(high)
    if SCATTERED:
        at, id_at = cache_ptr + cache_row[:, None], ids_ptr + four * 4
        tl.store(at + tl.load(id_at, mask=last > 0, other=0)[None, :], a, mask=live[:, None] & (last > 0)[None, :])
        tl.store(at + tl.load(id_at + 1, mask=last > 1, other=0)[None, :], b, mask=live[:, None] & (last > 1)[None, :])
        tl.store(at + tl.load(id_at + 2, mask=last > 2, other=0)[None, :], c, mask=live[:, None] & (last > 2)[None, :])
        tl.store(at + tl.load(id_at + 3, mask=last > 3, other=0)[None, :], d, mask=live[:, None] & (last > 3)[None, :])
    else:
        write_columns(cache_ptr, cache_row, four, live, num_columns, low, high, a, b, c, d, WHOLE, PACKED)
    if not WHOLE:
        a = tl.where((last > 0)[None, :], a, float("-inf"))
        b = tl.where((last > 1)[None, :], b, float("-inf"))
        c = tl.where((last > 2)[None, :], c, float("-inf"))
        d = tl.where((last > 3)[None, :], d, float("-inf"))
    largest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    peak = tl.max(tl.reshape(largest, [BLOCK_B, GROUPS, SUMMED // 4]), axis=2)
    top = tl.maximum(peak * scale[:, None], _LOWEST)
    under = tl.reshape(tl.broadcast_to(top[:, :, None], [BLOCK_B, GROUPS, SUMMED // 4]), [BLOCK_B, FOURS])
    factor = scale[:, None]
    powers = fast_exp2(a * factor - under) + fast_exp2(b * factor - under)
    powers += fast_exp2(c * factor - under) + fast_exp2(d * factor - under)
    total = tl.sum(tl.reshape(powers, [BLOCK_B, GROUPS, SUMMED // 4]), axis=2)
    return tl.where(noisy[:, None] > 0.0, top + fast_log2(tl.maximum(total, 1e-37)), peak)  # 0: of -inf alone


@triton.jit
def _read_mass(at, own, noisy, BLOCK_B: tl.constexpr, HALVES: tl.constexpr):
    """One block of `read_masses`; of HALVES the sum of both."""
    mass = tl.load(at, mask=own, other=_LOWEST)
    if HALVES:
        other = tl.load(at + BLOCK_B, mask=own, other=_LOWEST)
        higher = tl.maximum(mass, other)
        both = fast_exp2(mass - tl.maximum(higher, _LOWEST)) + fast_exp2(other - tl.maximum(higher, _LOWEST))
        mass = tl.where(noisy[:, None] > 0.0, higher + fast_log2(tl.maximum(both, 1e-37)), higher)
    return mass


@triton.jit
def read_masses(masses_ptr, count, noisy, BLOCK_B: tl.constexpr, FOURS: tl.constexpr, HALVES: tl.constexpr):
    """Log2 masses of groups, [4 count, BLOCK_B] in memory or twice as many HALVES, as four blocks [BLOCK_B, FOURS]."""
    EACH: tl.constexpr = 2 * BLOCK_B if HALVES else BLOCK_B
    k, local = tl.arange(0, FOURS), tl.arange(0, BLOCK_B)
    at = masses_ptr + k[None, :] * (4 * EACH) + local[:, None]
    own = (k < count)[None, :]
    m0 = _read_mass(at, own, noisy, BLOCK_B, HALVES)
    m1 = _read_mass(at + EACH, own, noisy, BLOCK_B, HALVES)
    m2 = _read_mass(at + 2 * EACH, own, noisy, BLOCK_B, HALVES)
    m3 = _read_mass(at + 3 * EACH, own, noisy, BLOCK_B, HALVES)
    return m0, m1, m2, m3


@triton.jit
def own_fours(part, num_parts, SPAN_FOURS: tl.constexpr, FOURS: tl.constexpr):
    """The fours of groups of a program [FOURS]: one Philox output each, SPAN_FOURS of them in a span; the program has
    every num_parts-th span."""
    k = tl.arange(0, FOURS)
    return (part + k // SPAN_FOURS * num_parts) * SPAN_FOURS + k % SPAN_FOURS


@triton.jit
def draw_numbers(request, part, num_parts, step, SPAN_FOURS: tl.constexpr, FOURS: tl.constexpr):
    """What is random in a draw at a step, `request` being positions and key words [R]: noise of the program's groups,
    four blocks [R, FOURS], and u [R, 1].
    """
    position, key_low, key_high = request
    at_step = (position + step).to(tl.uint32)[:, None]
    four = own_fours(part, num_parts, SPAN_FOURS, FOURS).to(tl.uint32)[None, :]
    n0, n1, n2, n3 = noise_of_groups(four, at_step, key_low[:, None], key_high[:, None])
    return n0, n1, n2, n3, uniform_number(at_step, key_low[:, None], key_high[:, None])


@triton.jit
def race_groups(
    masses, numbers, part, num_parts, noisy, BLOCK_B: tl.constexpr, SPAN_FOURS: tl.constexpr, FOURS: tl.constexpr
):
    """Race words [BLOCK_B] of a program's groups, from their log2 masses, four blocks [BLOCK_B, FOURS], and
    `draw_numbers`."""
    group = own_fours(part, num_parts, SPAN_FOURS, FOURS)[None, :] * 4 + tl.zeros([BLOCK_B, FOURS], tl.int32)
    best, which = masses[0] - numbers[0] * noisy[:, None], group
    for j in tl.static_range(1, 4):
        key = masses[j] - numbers[j] * noisy[:, None]
        best, which = tl.where(key > best, key, best), tl.where(key > best, group + j, which)
    return tl.max(race_word(best, which), axis=1)


@triton.jit
def total_mass(masses, noisy):
    """log2 masses [BLOCK_B] of four blocks of them; greedy rows: the largest."""
    peak = tl.maximum(tl.maximum(masses[0], masses[1]), tl.maximum(masses[2], masses[3]))
    highest = tl.maximum(tl.max(peak, axis=1), _LOWEST)
    total = fast_exp2(masses[0] - highest[:, None]) + fast_exp2(masses[1] - highest[:, None])
    total += fast_exp2(masses[2] - highest[:, None]) + fast_exp2(masses[3] - highest[:, None])
    return tl.where(noisy > 0.0, highest + fast_log2(tl.maximum(tl.sum(total, axis=1), 1e-37)), highest)


@triton.jit
def draw_within(group, u, cache_ptr, cache_row, live, ids_ptr, num_columns, scale, noisy, SCATTERED: tl.constexpr):
    """A column [R] of group [R], by inversion of u [R, 1] over the logits that were stored; greedy rows: the lowest of
    the largest.
    """
    place = tl.arange(0, _GROUP)
    column = group[:, None] * _GROUP + place[None, :]
    own = live[:, None] & (column < num_columns)
    at = column.to(tl.int64)
    if SCATTERED:
        at = tl.load(ids_ptr + column, mask=own, other=0)
    x = tl.load(cache_ptr + cache_row[:, None] + at, mask=own, other=float("-inf")).to(tl.float32) * scale[:, None]
    peak = tl.max(x, axis=1)[:, None]
    largest = tl.where(x >= peak, 1.0, 0.0)
    power = tl.where(noisy[:, None] > 0.0, fast_exp2(x - tl.maximum(peak, _LOWEST)), largest)
    reached = tl.cumsum(power, axis=1)
    # Rounded sums may step where nothing is added, and end below u: a column without probability is never taken.
    drawn = (reached > u * noisy[:, None] * tl.max(reached, axis=1)[:, None]) & (power > 0.0)
    found = tl.min(tl.where(drawn, place[None, :], _GROUP), axis=1)
    last = tl.max(tl.where(power > 0.0, place[None, :], 0), axis=1)
    return group * _GROUP + tl.minimum(found, last)
