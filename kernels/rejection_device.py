"""Device functions that the kernels of `dspark.kernels.rejection` share, and how the kernels work together.

    judge    a thread block per (request, slot, part of the vocabulary): maximum and summed exponentials of its part of
             the target's row, and of the draft's row where that is not known. The block of a row that comes last
             combines them and decides about the draft; a rejection lowers the request's `first` rejected slot.
    emit     a thread block per (request, part of the vocabulary): the exponential race over its part of the one row
             that the added token comes from. The block that comes last writes the request's results.

The row after the last draft needs no sums, since a race does not change when all weights are scaled: `judge` skips it,
and a step that accepts everything reads every row once. Slots run in order, first those of all requests, so that a
rejection is often known before later rows are read; they are then left out. That changes what is read, not what comes
out: rows after the first rejection have no influence, and the rows before it are always complete.

The last block of `emit` puts `first` and the counters of arrived blocks back, so that the next launch, or replay of a
graph, finds them as the first one did.
"""

from dspark.kernels import tl, triton
from dspark.kernels.noise import exponential, fast_exp2, fast_reciprocal
from dspark.kernels.philox import PER_TOKEN, SINGLE, philox4x32

# Counter words of the random streams, see `dspark.kernels.rejection`.
ACCEPT, RECOVERY, TARGET = 1, 2, 3

# Bits of a request's status.
BAD_TARGET, UNDRAWN, FOREIGN = 1, 2, 4

NO_REJECTION = 2**31 - 1

# Temperatures are kept in this range: -inf / inf and 0 / 0 would be NaN.
COLDEST, HOTTEST = 1e-30, 1e30

_ACCEPT, _SINGLE, _PER_TOKEN = tl.constexpr(ACCEPT), tl.constexpr(SINGLE), tl.constexpr(PER_TOKEN)
_NO_REJECTION = tl.constexpr(NO_REJECTION)
_COLDEST, _HOTTEST = tl.constexpr(COLDEST), tl.constexpr(HOTTEST)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponent_scale(temperature):
    """Factor of a logit in a power of two; 1 / temperature in units of log2(e)."""
    return _LOG2E / tl.minimum(tl.maximum(tl.where(temperature == 0.0, 1.0, temperature), _COLDEST), _HOTTEST)


@triton.jit
def columns_of(part, BLOCK: tl.constexpr):
    """Token ids of a part, [BLOCK // 4, 4]. A thread holds all four of a group: that is 16 bytes of float32, and one
    Philox call for their noise.
    """
    group = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    return group[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def load_logits(row_ptr, column, inside):
    """Logits as float32, -inf outside. NaN becomes +inf, which a maximum keeps and the status reports."""
    logits = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("inf"))


@triton.jit
def largest(x):
    """Maximum of a part."""
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def lowest(x):
    """Minimum of a part."""
    return tl.min(tl.min(x, axis=1), axis=0)


@triton.jit
def finite_or_zero(peak):
    """What to subtract from a row of maximum `peak`: an empty row of -inf must not give -inf - -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def powers(x, peak, scale):
    """Exponentials of logits relative to their maximum."""
    return fast_exp2((x - finite_or_zero(peak)) * scale)


@triton.jit
def sum_part(logits, scale):
    """Maximum of a part of a row, and its summed exponentials relative to that."""
    peak = largest(logits)
    return peak, tl.sum(tl.sum(powers(logits, peak, scale), axis=1), axis=0)


@triton.jit
def _larger(a0, b0, a1, b1):
    return tl.maximum(a0, a1), tl.maximum(b0, b1)


@triton.jit
def _added(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def sum_two_parts(a, b, a_scale, b_scale):
    """`sum_part` of two rows; they share the exchanges between warps."""
    a_peak, b_peak = tl.reduce((tl.max(a, axis=1), tl.max(b, axis=1)), 0, _larger)
    a, b = powers(a, a_peak, a_scale), powers(b, b_peak, b_scale)
    a_mass, b_mass = tl.reduce((tl.sum(a, axis=1), tl.sum(b, axis=1)), 0, _added)
    return a_peak, a_mass, b_peak, b_mass


@triton.jit
def sum_whole(peak_ptr, mass_ptr, part, known, scale):
    """The same of the whole row, from its parts [n]."""
    peaks = tl.load(peak_ptr + part, mask=known, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(mass_ptr + part, mask=known, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, axis=0)
    return peak, tl.sum(masses * powers(peaks, peak, scale), axis=0)


@triton.jit
def keyed(index_ptr, request, INDEXED: tl.constexpr):
    """Row of a request in tensors that are kept by slot; its own number where they are not."""
    if INDEXED:
        return tl.load(index_ptr + request).to(tl.int64)
    return request.to(tl.int64)


@triton.jit
def offered_run(drafts_ptr, start, count, vocab_size, num_drafts, WIDTH: tl.constexpr):
    """Draft ids [WIDTH], and how many come before the first placeholder or id that is no token."""
    lane = tl.arange(0, WIDTH)
    draft = tl.load(drafts_ptr + start + 1 + lane, mask=(lane < count) & (lane < num_drafts), other=-1).to(tl.int64)
    return draft, tl.min(tl.where((draft >= 0) & (draft < vocab_size), WIDTH, lane), axis=0)


@triton.jit
def acceptance_number(seed, position):
    """Uniform number of a position in [0, 1), float64 of 53 bits."""
    zero = (seed * 0).to(tl.uint32)
    high, low, _, _ = philox4x32(
        zero, position.to(tl.uint32), zero + _ACCEPT, zero + _SINGLE, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    return ((high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def token_noise(part, seed, position, purpose, BLOCK: tl.constexpr):
    """`exponential` of each of the `columns_of` a part."""
    counter = (part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = philox4x32(
        counter,
        zero + position.to(tl.uint32),
        zero + purpose.to(tl.uint32),
        zero + _PER_TOKEN,
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK // 4, 4])
    return exponential(words)


@triton.jit
def race(weight, noise, column):
    """Earliest time noise / weight and the lowest column that has it; infinite where no weight is positive."""
    times = noise * fast_reciprocal(tl.maximum(weight, 0.0))
    best = lowest(times)
    return best, lowest(tl.where(times == best, column, _NO_REJECTION))


@triton.jit
def sparse_prob(ids_ptr, values_ptr, draft, scale, num_ids, PROBS: tl.constexpr, WIDTH: tl.constexpr):
    """q of one token in a list of ids; the maximum and the inverse sum that its logits are normalised with."""
    lane = tl.arange(0, WIDTH)
    listed = lane < num_ids
    ids = tl.load(ids_ptr + lane, mask=listed, other=-1)
    if PROBS:
        values = tl.load(values_ptr + lane, mask=listed, other=0.0).to(tl.float32)
        peak, inverse = 0.0, 1.0
    else:
        values = tl.load(values_ptr + lane, mask=listed, other=float("-inf")).to(tl.float32)
        peak = tl.max(values, axis=0)
        values = powers(values, peak, scale)
        inverse = 1.0 / tl.sum(values, axis=0)
        values = values * inverse
    return tl.sum(tl.where(ids == draft, values, 0.0), axis=0), peak, inverse
