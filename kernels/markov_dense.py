"""The Markov chain over the whole draft vocabulary.

Every program owns some tiles of the vocabulary. At each step it computes the corrected logits of its tiles from the
features of the previous tokens, stores them, and keeps the best key of the race and the mass for the normaliser; one
race word and one log-mass per program and request are all that leaves it.

Two ways of joining the programs:
  persistent  one cooperative launch for all K steps, in `markov_persistent` and `markov_held`. Programs exchange race
              words through memory: each word carries the number of its step, so that a reader polls the words
              themselves and no barrier is needed. A small W2 stays on chip for all steps.
  stepwise    two launches a step, here: `_advance_kernel` joins the words of the step before, and computes the
              features and the confidence; `_step_kernel` runs the race. For heads whose features cost a matrix
              product, and for the interpreter, where a program that polls another would wait for ever.

A tile of logits is computed where tensor cores leave it: `weight_tile` orders the rows of W2 so that a thread of the
product owns whole groups of four columns, the unit of noise, of base logits and of stored words.

Read `dspark.kernels.markov.chain_ref` first: it is the definition.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_device import (
    bfloat16_pair,
    bias_of,
    feature_rows,
    four_columns,
    high_half,
    joined_log2_mass,
    log2_mass,
    low_half,
    mass_step,
    noise_of_group,
    noise_of_id,
    race_step,
    race_winner,
    race_word,
    read_columns,
    rounded,
    row_scales,
    weight_tile,
    write_columns,
)
from dspark.kernels.markov_features import request_confidence, request_features

_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number
_WORST_WORD = tl.constexpr(-(2**63))


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
def race_tile(  # noqa: PLR0915 - four columns at a time
    carry, weight, features, tile, backward, rows, base_ptr, cache_ptr, w2_scale_ptr, ids_ptr, num_columns, logit_scale,
    any_noise, step, nothing, REDUCED: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, SCATTERED: tl.constexpr,
    PACKED: tl.constexpr, CACHE: tl.constexpr, STORED: tl.constexpr,
    HAS_HEAD: tl.constexpr, FP8: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One tile of one step: stores its logits, and returns the carry (best, best_id, top, mass), each [R, BLOCK_G].

    `step` is uint32; of the rows, `position` is that of draft 0.
    """
    best, best_id, top, mass = carry
    base_row, cache_row, live, scale, noisy, position, key_low, key_high = rows
    at_step = position[:, None] + step
    group = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    a, b, c, d = read_columns(base_ptr, base_row, group, live, num_columns, WHOLE, PACKED)
    if HAS_HEAD:
        b0, b1, b2, b3 = four_columns(bias_of(features, weight, BLOCK_B, 4 * BLOCK_G), BLOCK_B, BLOCK_G, STRIDE)
        if FP8:
            s = w2_scale_ptr + group * 4
            b0 = b0 * tl.load(s, mask=group * 4 < num_columns, other=0.0)[None, :]
            b1 = b1 * tl.load(s + 1, mask=group * 4 + 1 < num_columns, other=0.0)[None, :]
            b2 = b2 * tl.load(s + 2, mask=group * 4 + 2 < num_columns, other=0.0)[None, :]
            b3 = b3 * tl.load(s + 3, mask=group * 4 + 3 < num_columns, other=0.0)[None, :]
        a, b, c, d = a + b0, b + b1, c + b2, d + b3
    if SCALED:
        a, b, c, d = a * logit_scale, b * logit_scale, c * logit_scale, d * logit_scale
    low, high = group, group  # used with PACKED only
    if CACHE == "bf16":
        low, high = bfloat16_pair(a, b), bfloat16_pair(c, d)
        a, b, c, d = low_half(low), high_half(low), low_half(high), high_half(high)
    last = num_columns - group * 4
    if REDUCED:
        i0 = tl.load(ids_ptr + group * 4, mask=last > 0, other=0).to(tl.int32)
        i1 = tl.load(ids_ptr + group * 4 + 1, mask=last > 1, other=0).to(tl.int32)
        i2 = tl.load(ids_ptr + group * 4 + 2, mask=last > 2, other=0).to(tl.int32)
        i3 = tl.load(ids_ptr + group * 4 + 3, mask=last > 3, other=0).to(tl.int32)
    else:
        i0, i1, i2, i3 = group * 4, group * 4 + 1, group * 4 + 2, group * 4 + 3
    if STORED and SCATTERED:
        at = cache_ptr + cache_row[:, None]
        tl.store(at + i0[None, :], a, mask=live[:, None] & (last > 0)[None, :])
        tl.store(at + i1[None, :], b, mask=live[:, None] & (last > 1)[None, :])
        tl.store(at + i2[None, :], c, mask=live[:, None] & (last > 2)[None, :])
        tl.store(at + i3[None, :], d, mask=live[:, None] & (last > 3)[None, :])
    elif STORED:
        write_columns(cache_ptr, cache_row, group, live, num_columns, low, high, a, b, c, d, WHOLE, PACKED)
    x0, x1, x2, x3 = a * scale[:, None], b * scale[:, None], c * scale[:, None], d * scale[:, None]
    if not WHOLE:
        x0 = tl.where((last > 0)[None, :], x0, float("-inf"))
        x1 = tl.where((last > 1)[None, :], x1, float("-inf"))
        x2 = tl.where((last > 2)[None, :], x2, float("-inf"))
        x3 = tl.where((last > 3)[None, :], x3, float("-inf"))
    top, mass = mass_step(top, mass, x0, x1, x2, x3)
    if any_noise:
        if REDUCED:
            n0 = noise_of_id(i0[None, :], at_step, key_low[:, None], key_high[:, None], nothing)
            n1 = noise_of_id(i1[None, :], at_step, key_low[:, None], key_high[:, None], nothing)
            n2 = noise_of_id(i2[None, :], at_step, key_low[:, None], key_high[:, None], nothing)
            n3 = noise_of_id(i3[None, :], at_step, key_low[:, None], key_high[:, None], nothing)
        else:
            words = group[None, :].to(tl.uint32)
            n0, n1, n2, n3 = noise_of_group(words, at_step, key_low[:, None], key_high[:, None], nothing)
        x0, x1 = x0 - n0 * noisy[:, None], x1 - n1 * noisy[:, None]
        x2, x3 = x2 - n2 * noisy[:, None], x3 - n3 * noisy[:, None]
    x0, i0 = race_step(x0, i0[None, :], x1, i1[None, :], False, not REDUCED)
    x2, i2 = race_step(x2, i2[None, :], x3, i3[None, :], False, not REDUCED)
    x0, i0 = race_step(x0, i0, x2, i2, False, not REDUCED)
    best, best_id = race_step(best, best_id, x0, i0, backward, not REDUCED)
    return best, best_id, top, mass


@triton.jit
def empty_carry(BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr):
    """Nothing seen yet: best, best_id, top, mass."""
    best = tl.full([BLOCK_B, BLOCK_G], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK_B, BLOCK_G], 16777215, tl.int32)
    top = tl.full([BLOCK_B, BLOCK_G], _LOWEST, tl.float32)
    return best, best_id, top, tl.zeros([BLOCK_B, BLOCK_G], tl.float32)


@triton.jit
def race_columns(
    base, bias, column, own, rows, cache_ptr, ids_ptr, logit_scale, any_noise, REDUCED: tl.constexpr,
    SCALED: tl.constexpr, SCATTERED: tl.constexpr, CACHE: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """One step over few columns [N]: base and bias are [R, N] float32. Stores the logits, and returns x [R, N], -inf
    outside `own` [N], and race words [R].
    """
    _, cache_row, live, scale, noisy, position, key_low, key_high = rows
    logits = base + bias
    if SCALED:
        logits = logits * logit_scale
    logits = rounded(logits, CACHE)
    token = column
    if REDUCED:
        token = tl.load(ids_ptr + column, mask=own, other=0).to(tl.int32)
    x = tl.where(own[None, :], logits * scale[:, None], float("-inf"))
    key = x
    if any_noise:
        key = x - noisy[:, None] * noise_of_id(
            token[None, :], position[:, None], key_low[:, None], key_high[:, None], 0
        )
    word = tl.max(race_word(key, token[None, :]), axis=1)
    if STORED:
        at = token if SCATTERED else column
        tl.store(cache_ptr + cache_row[:, None] + at[None, :], logits, mask=live[:, None] & own[None, :])
    return x, word


@triton.jit
def carried_word(carry):
    """Race words [R] of a carry, low byte zero."""
    best, best_id, _, _ = carry
    return tl.max(race_word(best, best_id), axis=1)


@triton.jit
def carried_mass(carry, noisy):
    """log2 masses [R] of a carry."""
    _, _, top, mass = carry
    return log2_mass(top, mass, noisy, 1)


@triton.jit(do_not_specialize=["step"])
def _step_kernel(
    base_ptr, cache_ptr, w2_ptr, w2_scale_ptr, ids_ptr,
    temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, features_ptr, words_ptr, masses_ptr,
    batch, step, num_columns, num_tiles, num_parts, base_stride, base_step, cache_stride, cache_step, logit_scale,
    HAS_ROWS: tl.constexpr, REDUCED: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr,
    SCATTERED: tl.constexpr, PACKED: tl.constexpr, CACHE: tl.constexpr, STORED: tl.constexpr,
    HAS_HEAD: tl.constexpr, FP8: tl.constexpr, BLOCK_B: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One step of the race, from features [B, RANK]; words and masses are [num_parts, B]."""
    part, row = tl.program_id(0), tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    cache_row, live, scale, noisy, position, key_low, key_high = request_rows(
        row, batch, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
    )
    base_row = row.to(tl.int64) * base_stride + step * base_step
    out_row = cache_row * cache_stride + step * cache_step
    rows = (base_row, out_row, live, scale, noisy, position.to(tl.uint32), key_low, key_high)
    any_noise = tl.max(noisy) > 0.0
    features = 0
    if HAS_HEAD:  # the rows of the workspace take the place of W1's
        features = feature_rows(row, live, features_ptr, RANK, BLOCK_R, BLOCK_B)
    carry = empty_carry(BLOCK_B, BLOCK_G)
    backward = step % 2 == 1
    rounds = tl.cdiv(num_tiles - part, num_parts)
    for i in tl.range(rounds, num_stages=STAGES):
        tile = part + tl.where(backward, rounds - 1 - i, i) * num_parts
        weight = 0
        if HAS_HEAD:
            weight = weight_tile(w2_ptr, tile, num_columns, WHOLE, RANK, BLOCK_R, BLOCK_G, STRIDE, FP8)
        carry = race_tile(
            carry, weight, features, tile, backward, rows, base_ptr, cache_ptr, w2_scale_ptr, ids_ptr, num_columns,
            logit_scale, any_noise, (tl.zeros([], tl.int32) + step).to(tl.uint32), (tile >> 30).to(tl.uint32),
            REDUCED, WHOLE, SCALED, SCATTERED, PACKED, CACHE, STORED, HAS_HEAD, FP8, BLOCK_B, BLOCK_G, STRIDE,
        )  # fmt: skip
    tl.store(words_ptr + part * batch + row, carried_word(carry), mask=row < batch)
    tl.store(masses_ptr + part * batch + row, carried_mass(carry, noisy), mask=row < batch)


@triton.jit(do_not_specialize=["step"])
def _advance_kernel(
    words_ptr, masses_ptr, tokens_ptr, lse_ptr, confidence_ptr, anchors_ptr, temperature_ptr, cache_rows_ptr,
    w1_ptr, joint_ptr, products_ptr, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, features_ptr, state_ptr,
    batch, step, num_parts, hidden_stride, hidden_step, hidden_size, joint_stride, joint_column,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, KIND: tl.constexpr, CONFIDENCE: tl.constexpr,
    FEATURES: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Between steps, one program a request: the token of step - 1 from its words, then features and confidence."""
    request = tl.program_id(0)
    live = True
    if HAS_ROWS:
        live = tl.load(cache_rows_ptr + request) >= 0
    if live:
        token = tl.load(anchors_ptr + request)
        if step > 0:
            part = tl.arange(0, BLOCK_V)
            word = tl.load(words_ptr + part * batch + request, mask=part < num_parts, other=_WORST_WORD)
            masses = tl.load(masses_ptr + part * batch + request, mask=part < num_parts, other=_LOWEST)
            _, noisy = row_scales(tl.load(temperature_ptr + request))
            token = race_winner(tl.max(word, axis=0)).to(tl.int64)
            tl.store(tokens_ptr + request * STEPS + step - 1, token)
            tl.store(lse_ptr + request * STEPS + step - 1, joined_log2_mass(masses, noisy, 0))
        if step < STEPS:
            if KIND != "none":
                features = request_features(
                    token, w1_ptr, joint_ptr, products_ptr + (request * STEPS + step) * (3 * RANK),
                    state_ptr + request * RANK, joint_stride, joint_column, KIND, FEATURES, RANK, BLOCK_R,
                )  # fmt: skip
                r = tl.arange(0, BLOCK_R)
                tl.store(features_ptr + request * RANK + r, features, mask=r < RANK)
            if CONFIDENCE != "none":
                hidden_row = hidden_ptr + request.to(tl.int64) * hidden_stride + step * hidden_step
                logit = request_confidence(
                    token, w1_ptr, hidden_row, hidden_size, confidence_weight_ptr, confidence_bias_ptr,
                    CONFIDENCE, RANK, BLOCK_R, BLOCK_H,
                )  # fmt: skip
                tl.store(confidence_ptr + request * STEPS + step, logit)
