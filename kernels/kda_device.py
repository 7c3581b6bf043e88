"""Device functions that the KDA kernels share: gates, normalised rows, records of a ring, products of split precision.

A product of two float32 tiles runs on tensor cores as three bfloat16 products of their high and low halves,

    a b = a_hi b_hi + a_hi b_lo + a_lo b_hi + O(2^-16 |a| |b|)

which loses about 1e-6, where one TF32 product loses 1e-4. Triton's interpreter can't multiply bfloat16 tiles and takes
the float32 product instead.
"""

from dspark.kernels import tl, triton
from dspark.kernels.noise import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def halves(x):
    """High and low bfloat16 half of a float32 tile; in the interpreter the tile itself, twice."""
    if _INTERPRETED:
        return x, x
    # Two elements at a time: left to itself the compiler converts one by one, on a unit with a quarter of the rate.
    high, low = tl.inline_asm_elementwise(
        """{
        .reg .b32 upper, lower;
        .reg .f32 first, second;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 lower, $0, 16;
        and.b32 upper, $0, 0xffff0000;
        sub.f32 first, $2, lower;
        sub.f32 second, $3, upper;
        cvt.rn.bf16x2.f32 $1, second, first;
        }""",
        "=&r,=r,r,r",
        [x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
    return high, low


@triton.jit
def halves_dot(a_high, a_low, b_high, b_low, onto):
    """`onto` plus the product of two tiles given by their halves."""
    if _INTERPRETED:
        return tl.dot(a_high, b_high, onto, input_precision="ieee")
    onto = tl.dot(a_low, b_high, onto)
    onto = tl.dot(a_high, b_low, onto)
    return tl.dot(a_high, b_high, onto)


@triton.jit
def split_dot(a, b, onto):
    """`onto` plus a [M, K] b [K, N], float32 tiles: error about 1e-6 of the operands."""
    a_high, a_low = halves(a)
    b_high, b_low = halves(b)
    return halves_dot(a_high, a_low, b_high, b_low, onto)


@triton.jit
def selected_sums(choice, x):
    """choice [M, N] of zeros and ones times x [N, K]: sums of rows of x as exact as float32 ones, but without a scan.

    Three bfloat16 parts hold all 24 bits of x, and a product with zero or one rounds nothing.
    """
    if _INTERPRETED:
        return tl.dot(choice.to(tl.float32), x, input_precision="ieee")
    chosen = choice.to(tl.bfloat16)
    high, rest = x.to(tl.bfloat16), x
    rest = x - high.to(tl.float32)
    middle, low = halves(rest)
    total = tl.dot(chosen, low)
    total = tl.dot(chosen, middle, total)
    return tl.dot(chosen, high, total)


@triton.jit
def chosen_rows(choice, x):
    """choice [M, N], at most a single one in a row and else zeros, times x [N, K] of activations: some rows of x,
    exactly, in float32 and where tensor cores leave their results."""
    if _INTERPRETED:
        return tl.dot(choice.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    return tl.dot(choice.to(x.dtype), x, input_precision="ieee")


@triton.jit
def exp_of(x):
    """e^x to a few units of 2^-24; results below 2^-126 are zero, which spares their special treatment."""
    if _INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 scaled; mul.f32 scaled, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, scaled; }",
        "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sigmoid_of(x):
    """1 / (1 + e^-x) to a few units of 2^-24."""
    if _INTERPRETED:
        return tl.sigmoid(tl.maximum(x, -80.0))  # below, e^-x overflows
    return tl.inline_asm_elementwise(
        "{ .reg .f32 y; mul.f32 y, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 y, y; add.f32 y, y, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, y; }",
        "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def log_decay(shifted, rate, lower_bound, BOUNDED: tl.constexpr):
    """g of a raw gate plus its bias; see `Gate`."""
    if BOUNDED:
        return lower_bound * sigmoid_of(rate * shifted)
    else:
        soft = tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0)))
        return -rate * tl.where(shifted > 20.0, shifted, soft)


@triton.jit
def conv_taps(weight_ptr, column, CHANNELS, WIDTH: tl.constexpr):
    """Weights [D] of the convolution at `column`, one tensor a tap; those past the CHANNELS mean nothing."""
    place = weight_ptr + tl.minimum(column, CHANNELS - 1) * WIDTH
    if WIDTH == 4 and weight_ptr.dtype.element_ty == tl.float32 and not _INTERPRETED:
        # One access for a channel, in the layout that its use asks for: a load of Triton's own has one by itself.
        return tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [place],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        taps = ()
        for i in tl.static_range(WIDTH):
            taps = taps + (tl.load(place + i).to(tl.float32),)  # noqa: RUF005 (no unpacking)
        return taps


@triton.jit
def convolved(
    input_ptr, input_stride, weight_ptr, ring_ptr, spare_ptr, cursor, count, records, t, is_new, column,
    CHANNELS, ROW: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """The short convolution of tokens `t` [16] of a row at channels `column` [D], [16, D] in their dtype, zero where
    not `is_new`; where `records`, its inputs go into the ring.

    Pointers are at the first channel, `input_ptr` at the row's first token and `ring_ptr` at its slot. History and
    tokens are one line of 16 at most, of which each tap takes the rows that it meets. With SPARE the ring's last row
    is at `spare_ptr`.
    """
    line = tl.arange(0, 16)
    source = line - (WIDTH - 1)
    known, new = (column < CHANNELS)[None, :], (source >= 0)[:, None]
    place = ring_ptr + ((cursor + CAPACITY + source) % CAPACITY)[:, None] * ROW + column[None, :]
    if SPARE:
        place = tl.where((cursor + source == CAPACITY - 1)[:, None], spare_ptr + column[None, :], place)
    taken = tl.where(new, input_ptr + source[:, None] * input_stride + column[None, :], place)
    inputs = tl.load(taken, mask=(source < count)[:, None] & known, other=0.0)
    recorded = (new & (source < count)[:, None]) & (column < tl.where(records, CHANNELS, 0))[None, :]
    tl.store(place, inputs, mask=recorded)
    taps = conv_taps(weight_ptr, column, CHANNELS, WIDTH)
    mixed = tl.zeros(inputs.shape, tl.float32)
    for i in tl.static_range(WIDTH):
        met = is_new[:, None] & (line[None, :] == t[:, None] + i)
        mixed += chosen_rows(met, inputs) * taps[i][None, :]
    return (mixed * sigmoid_of(mixed)).to(inputs.dtype)


@triton.jit
def unit_rows(rows):
    """Each row of [T, K] over its length."""
    return rows * tl.rsqrt(tl.sum(rows * rows, axis=1) + 1e-6)[:, None]


@triton.jit
def head_rate(a_log_ptr, head, HAS_RATE: tl.constexpr):
    """e^a_log of a head, or 1."""
    if HAS_RATE:
        return tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    else:
        return 1.0


@triton.jit
def first_of_row(first_token_ptr, row, num_tokens, PACKED: tl.constexpr):
    """Index of a row's first token on the line of all tokens."""
    if PACKED:
        return tl.load(first_token_ptr + row).to(tl.int64)
    else:
        return row.to(tl.int64) * num_tokens


@triton.jit
def held_block(
    key_ptr, gate_ptr, start, first, count, columns, bias, rate, lower_bound, tail,
    BOUNDED: tl.constexpr, CAPACITY: tl.constexpr, KEY_DIM: tl.constexpr,
):  # fmt: skip
    """Weights k^_j e^{G_n - G_j} [16, K] of records first..first + 15 of the first `count` behind ring row `start`, and
    the log decay [K] of these and all later ones, `tail` being that of the later ones alone. `bias` is [16, K]
    or [1, K].

    Log decays are summed over the records behind j, not subtracted: |G| reaches 45, and its rounding would show.
    """
    j = tl.arange(0, 16)
    inside = (first + j < count)[:, None] & (columns < KEY_DIM)[None, :]
    place = (((start + first + j) % CAPACITY) * KEY_DIM)[:, None] + columns[None, :]
    key = tl.load(key_ptr + place, mask=inside, other=0.0).to(tl.float32)
    raw = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    decay = tl.where(inside, log_decay(raw + bias, rate, lower_bound, BOUNDED), 0.0)
    behind = selected_sums(j[None, :] > j[:, None], decay)
    return unit_rows(key) * exp_of(behind + tail[None, :]), tail + tl.sum(decay, axis=0)


@triton.jit
def held_corrections(
    correction_ptr, start, first, count, values, known, CAPACITY: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """U [16, V] of the same records; `values` [V] count from `correction_ptr`, and those `known` exist."""
    j = tl.arange(0, 16)
    place = ((start + first + j) % CAPACITY)[:, None] * VALUE_DIM + values[None, :]
    return tl.load(correction_ptr + place, mask=(first + j < count)[:, None] & known[None, :], other=0.0).to(tl.float32)


@triton.jit
def folded(
    state, key_ptr, gate_ptr, correction_ptr, start, count, columns, values, known, bias, rate, lower_bound,
    BOUNDED: tl.constexpr, CAPACITY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """A state tile [V, K] after the first `count` records behind ring row `start`, sixteen at a time."""
    for first in tl.range(0, count, 16, num_stages=1):
        end = tl.minimum(first + 16, count)
        weight, decay = held_block(
            key_ptr, gate_ptr, start, first, end, columns, bias, rate, lower_bound,
            tl.zeros_like(columns).to(tl.float32), BOUNDED, CAPACITY, KEY_DIM,
        )  # fmt: skip
        correction = held_corrections(correction_ptr, start, first, end, values, known, CAPACITY, VALUE_DIM)
        state = split_dot(tl.trans(correction), weight, state * exp_of(decay)[None, :])
    return state


@triton.jit
def fold_streamed(
    source_ptr, target_ptr, key_ptr, gate_ptr, correction_ptr, start, count, columns, num_values, bias, rate,
    lower_bound, BOUNDED: tl.constexpr, CAPACITY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, TILE_V: tl.constexpr,
):  # fmt: skip
    """The states at `source_ptr` after the first `count` > 0 records, into `target_ptr`: BLOCK_V value channels, of
    which `num_values` exist, TILE_V at a time, so that weights are worked out once and few registers hold states."""
    own = columns < KEY_DIM
    for first in tl.range(0, count, 16, num_stages=1):
        end = tl.minimum(first + 16, count)
        weight, decay = held_block(
            key_ptr, gate_ptr, start, first, end, columns, bias, rate, lower_bound,
            tl.zeros_like(columns).to(tl.float32), BOUNDED, CAPACITY, KEY_DIM,
        )  # fmt: skip
        weight_high, weight_low = halves(weight)
        grown = exp_of(decay)
        for begin in tl.range(0, BLOCK_V, TILE_V, num_stages=1):
            values = begin + tl.arange(0, TILE_V)
            known = values < num_values
            whole = known[:, None] & own[None, :]
            place = values[:, None] * KEY_DIM + columns[None, :]
            state = tl.load(source_ptr + place, mask=whole, other=0.0).to(tl.float32)
            correction = held_corrections(correction_ptr, start, first, end, values, known, CAPACITY, VALUE_DIM)
            high, low = halves(tl.trans(correction))
            state = halves_dot(high, low, weight_high, weight_low, state * grown[None, :])
            tl.store(target_ptr + place, state.to(target_ptr.dtype.element_ty), mask=whole)
        source_ptr = target_ptr


@triton.jit
def stacked(a, b):
    """Two tiles [M, N] over each other, [2 M, N]: every thread keeps what it has."""
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), (2 * a.shape[0], a.shape[1]))


@triton.jit
def unstacked(x):
    """The left and right half of a product [M, 2 N] with `stacked` rows."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def wait_for_previous_kernel():
    """Go on when the kernel before has ended, and let the next one be launched."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Ask for the lines of `pointers` to be brought into the L2 cache; nothing waits for it."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_window(
    ring_ptr, weight_ptr, cursor, CHANNELS, BLOCK: tl.constexpr, ROW: tl.constexpr, CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The same for what `convolved` reads of a slot's history, and for its weights."""
    back = 1 + tl.arange(0, 4) % (WIDTH - 1)
    line = tl.minimum(tl.arange(0, (BLOCK + 63) // 64) * 64, CHANNELS - 1)  # 64 inputs are 128 bytes, and so are
    prefetch(ring_ptr + ((cursor + CAPACITY - back) % CAPACITY)[:, None] * ROW + line[None, :])
    prefetch(weight_ptr + tl.minimum(tl.arange(0, BLOCK // 8) * 8, CHANNELS - 1) * WIDTH)  # 8 channels of 4 weights
