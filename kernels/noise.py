"""Device functions that kernels of more than one kind draw and compute with: the hardware's approximate functions, and
the numbers that random words stand for.
"""

from dspark.kernels import HAS_TRITON, tl, triton

INTERPRETED = bool(HAS_TRITON and triton.knobs.runtime.interpret)  # the interpreter has no inline assembly

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def fast_log2(x):
    """log2 of positive numbers by the hardware's approximation: off by 2^-22, relative to a result beyond 1."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_exp2(x):
    """2^x by the hardware's approximation, relative error 2^-22; 0 below the smallest normal number."""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_reciprocal(x):
    """1 / x for x >= 0 to 2^-23, one instruction; infinite for 0, and for what is not normal."""
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def cell(word):
    """Middle of the cell of a random word, float32 below 1: the top cells would round to 1."""
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def exponential(word):
    """The unit exponential of a random word, in units of ln 2, which a race does not see; within 1e-6 of it.

    It is -log1p(-u). Near u = 0, where winners come from, 1 - u has lost the digits of u, and a series is taken.
    """
    u = cell(word)
    series = 0.43544932 * u + 0.24019349
    series = series * u + 0.36527038
    series = series * u + 0.48074908
    series = series * u + 0.72134829
    series = series * u + 1.44269504
    return tl.where(u < 0.25, series * u, -fast_log2(1.0 - u))
