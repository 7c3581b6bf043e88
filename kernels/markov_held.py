"""The dense chain of one request when W2 fits on chip: each program keeps its rows of W2 in registers for all steps.

W2 of 49152 tokens and rank 64 is 6.3 MB, 48 KB for each of 128 multiprocessors. What is left of a step is one row of
W1, the products, the draw and the exchange of `dspark.kernels.markov_exchange`, none of which is limited by memory,
so that latency decides: the draw within a group is made for all groups at once, from registers, and what is random is
computed while words travel.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov import GROUP
from dspark.kernels.markov_dense import request_rows
from dspark.kernels.markov_device import (
    noise_of_group,
    race_word,
    read_weight,
    rounded,
    uniform_number,
)
from dspark.kernels.markov_exchange import hidden_shares, join_masses, receive, send, send_mass
from dspark.kernels.noise import fast_exp2, fast_log2

_GROUP = tl.constexpr(GROUP)
_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number


@triton.jit
def _numbers(first_group, request, step, GROUPS: tl.constexpr):
    """Noise of the program's groups [GROUPS] and u, a scalar, of the draw at a step."""
    position, key_low, key_high = request
    at_step = (position + step).to(tl.uint32)[:, None]
    group = (first_group + tl.arange(0, GROUPS))[None, :]
    noise = noise_of_group(group, at_step, key_low[:, None], key_high[:, None])
    u = uniform_number(at_step, key_low[:, None], key_high[:, None])
    return tl.reshape(noise, [GROUPS]), tl.max(tl.reshape(u, [1]), axis=0)


@triton.jit
def _draw(x, first_group, noise, u, noisy, GROUPS: tl.constexpr):
    """Race word, column and log2 mass of this program, each [1], from x [GROUPS * GROUP], -inf where no column is."""
    grouped = tl.reshape(x, [GROUPS, _GROUP])
    peak = tl.max(grouped, axis=1)
    top = tl.maximum(peak, _LOWEST)
    largest = tl.where(grouped >= peak[:, None], 1.0, 0.0)
    power = tl.where(noisy > 0.0, fast_exp2(grouped - top[:, None]), largest)
    total = tl.sum(power, axis=1)
    mass = tl.where(noisy > 0.0, top + fast_log2(tl.maximum(total, 1e-37)), peak)
    place = tl.arange(0, _GROUP)[None, :]
    drawn = (tl.cumsum(power, axis=1) > (u * noisy * total)[:, None]) & (power > 0.0)
    found = tl.min(tl.where(drawn, place, _GROUP), axis=1)
    last = tl.max(tl.where(power > 0.0, place, 0), axis=1)
    column = (first_group + tl.arange(0, GROUPS)) * _GROUP + tl.minimum(found, last)
    word = race_word(mass - noise * noisy, column)  # columns are in the order of groups
    best = tl.max(word, axis=0)
    column = tl.max(tl.where(word == best, column, 0), axis=0)
    highest = tl.maximum(tl.max(mass, axis=0), _LOWEST)
    all_mass = highest + fast_log2(tl.maximum(tl.sum(fast_exp2(mass - highest), axis=0), 1e-37))
    return best, column, tl.where(noisy > 0.0, all_mass, highest)


@triton.jit
def _held_chain_kernel(
    base_ptr, cache_ptr, w2_ptr, w2_scale_ptr, ids_ptr, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr,
    w1_ptr, anchors_ptr, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr,
    tokens_ptr, lse_ptr, confidence_ptr, words_ptr, winners_ptr, masses_ptr, epochs_ptr,
    num_columns, groups_each, num_parts, logit_scale, base_step, cache_stride, cache_step,
    hidden_stride, hidden_step, hidden_size,
    STEPS: tl.constexpr, HAS_ROWS: tl.constexpr, CONFIDENCE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, JOIN_V: tl.constexpr, W1_BYTES: tl.constexpr, REDUCED: tl.constexpr,
    SCALED: tl.constexpr, SCATTERED: tl.constexpr, CACHE: tl.constexpr, STORED: tl.constexpr, FP8: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """All steps of one request. Programs [num_parts], each with `groups_each` groups, at most GROUPS of them; words
    [2, num_parts], masses [STEPS, num_parts].
    """
    part, row = tl.program_id(0), tl.arange(0, 1)
    slot_row, live, scale, noisy, position, key_low, key_high = request_rows(
        row, 1, temperature_ptr, seeds_ptr, positions_ptr, cache_rows_ptr, HAS_ROWS
    )
    request = (position, key_low, key_high)
    scale_of_row, noisy_row = tl.max(scale, axis=0), tl.max(noisy, axis=0)
    alive = tl.max(live.to(tl.int32), axis=0)
    cache_row = tl.max(slot_row if STORED else row.to(tl.int64), axis=0) * cache_stride
    epoch = tl.load(epochs_ptr + part)
    token = tl.load(anchors_ptr + row, mask=live, other=0).to(tl.int32)
    n, r = tl.arange(0, GROUPS * _GROUP), tl.arange(0, BLOCK_R)
    first_group = part * groups_each
    column = first_group * _GROUP + n
    own = (n < groups_each * _GROUP) & (column < num_columns)
    held = read_weight(
        w2_ptr + column.to(tl.int64)[:, None] * RANK + r[None, :], own[:, None] & (r < RANK)[None, :], FP8
    )
    row_scale = tl.full([GROUPS * _GROUP], 1.0, tl.float32)
    if FP8:
        row_scale = tl.load(w2_scale_ptr + column, mask=own, other=0.0)
    at = column
    if SCATTERED:
        at = tl.load(ids_ptr + column, mask=own, other=0).to(tl.int32)
    base = tl.load(base_ptr + column, mask=own, other=0.0)
    noise, u = _numbers(first_group, request, 0, GROUPS)
    memory = (words_ptr, winners_ptr, masses_ptr, tokens_ptr)
    confidence = (confidence_ptr, confidence_weight_ptr, hidden_size)
    if CONFIDENCE != "none":
        hidden_shares(
            part, 0, hidden_ptr, confidence_weight_ptr, confidence_bias_ptr, confidence_ptr, cache_rows_ptr,
            1, num_parts, hidden_stride, hidden_step, hidden_size, HAS_ROWS, STEPS, BLOCK_H,
        )  # fmt: skip
    for step in range(STEPS):
        row_of_w1 = w1_ptr + tl.max(token, axis=0).to(tl.int64) * RANK
        features = tl.load(row_of_w1 + r, mask=r < RANK, other=0.0).to(tl.float32)
        logits = base.to(tl.float32) + tl.sum(held.to(tl.float32) * features[None, :], axis=1) * row_scale
        if SCALED:
            logits = logits * logit_scale
        logits = rounded(logits, CACHE)
        tl.store(cache_ptr + cache_row + step * cache_step + at, logits, mask=tl.where(own, alive, 0) > 0)
        x = tl.where(own, logits * scale_of_row, float("-inf"))
        word, drawn, mass = _draw(x, first_group, noise, u, noisy_row, GROUPS)
        send(
            tl.zeros([1], tl.int64) + word, tl.zeros([1], tl.int32) + drawn, token,
            part, 0, step, epoch, live, memory, confidence, w1_ptr, ids_ptr, cache_rows_ptr, 1, num_parts,
            STEPS, HAS_ROWS, REDUCED, CONFIDENCE, RANK, BLOCK_R, 1, 1, W1_BYTES,
        )  # fmt: skip
        send_mass(tl.zeros([1], tl.float32) + mass, part, 0, step, epoch, memory, num_parts, 1, 1)
        following = tl.minimum(step + 1, STEPS - 1)
        base = tl.load(base_ptr + following * base_step + column, mask=own, other=0.0)
        noise, u = _numbers(first_group, request, following, GROUPS)
        token = receive(
            part, 0, step, epoch, live, memory, ids_ptr, 1, num_parts, 0, STEPS, REDUCED, BLOCK_V, 1, 1, 0, 1
        )
    join_masses(
        masses_ptr, 0, epoch, part, lse_ptr, temperature_ptr, cache_rows_ptr, 1, num_parts, STEPS,
        HAS_ROWS, STEPS, BLOCK_S, JOIN_V, 1,
    )  # fmt: skip
    tl.store(epochs_ptr + part, epoch + STEPS)
