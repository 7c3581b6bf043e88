"""How the programs of a dense chain agree on the tokens of a step, and what follows from it once all are known.

Programs form blocks that draft the same requests; only a block has to agree on tokens. Each program publishes a race
word per request, and polls until the words carry this step's number. Nothing else is passed between programs, so that
no fence is needed: a word is one 8-byte store. There are two ways to the winners:

  few requests     every program polls everyone's words
  more             each request is decided by one program, which polls everyone's words of it and publishes the winner;
                   all poll only those. Words of 64 requests from 264 programs are 135 KB, which would be 36 MB a step
                   if everyone read them.

Words are double buffered. A program can't overwrite its word of step i at step i + 2 before it has been read: it needs
the winners of step i + 1 first, which are decided from the words that everyone published after those of step i were
decided. Steps are numbered on through the launches by a counter per program, which all programs move alike.
"""

from dspark.kernels import tl, triton
from dspark.kernels.markov_device import joined_log2_mass, prefetch_rows, race_winner, row_scales
from dspark.kernels.markov_features import hidden_confidence, token_confidence

_LOWEST = tl.constexpr(-3.0e38)  # finite, so that the difference of two of them is a number
_WORST_WORD = tl.constexpr(-(2**63))
_MAX_POLLS = tl.constexpr(2**23)


@triton.jit
def _polled(pointers, mask, tag):
    """Words once all of them carry the tag, at least one for every thread of the program. Of fewer words threads would
    hold copies, each with a load of its own, and one copy may be older than the one that is looked at.

    A program that waits for seconds stops the kernel with an error: some program is not running, and silence would be
    a hang.
    """
    words = tl.load(pointers, mask=mask, other=_WORST_WORD, volatile=True)
    polls = 0
    while (tl.max(tl.where(mask & ((words & 255) != tag), 1, 0)) > 0) & (polls < _MAX_POLLS):
        words = tl.load(pointers, mask=mask, other=_WORST_WORD, volatile=True)
        polls += 1
    if polls == _MAX_POLLS:
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1)
    return words


@triton.jit
def _slot(step, epoch, first_row, num_parts, BLOCK_B: tl.constexpr):
    """Tag of a step, int64, and the place of a block of requests in the double buffers."""
    blocks = tl.num_programs(0) // num_parts
    return (tl.zeros([], tl.int64) + epoch + step) & 255, ((epoch + step) & 1) * blocks + first_row // BLOCK_B


@triton.jit
def _winners(
    words_ptr, winners_ptr, part, rows, tag, num_parts,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, POLLED: tl.constexpr, OWN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Columns [BLOCK_B] of a step, once everyone's words of it are there; `rows` of the block are requests."""
    other = tl.arange(0, BLOCK_V)
    if OWN == 0:
        r = tl.arange(0, POLLED)
        there = (r < rows)[:, None] & (other < num_parts)[None, :]
        words = _polled(words_ptr + r[:, None] * num_parts + other[None, :], there, tag)
        column = race_winner(tl.max(words, axis=1))
        return tl.reshape(tl.broadcast_to(column[None, :], [BLOCK_B // POLLED, POLLED]), [BLOCK_B])
    else:
        r = part + num_parts * tl.arange(0, OWN)
        there = (r < rows)[:, None] & (other < num_parts)[None, :]
        words = _polled(words_ptr + r[:, None] * num_parts + other[None, :], there, tag)
        column = race_winner(tl.max(words, axis=1))
        tl.atomic_xchg(winners_ptr + r, (column.to(tl.int64) << 8) | tag, mask=r < rows, sem="relaxed")
        first, local = tl.arange(0, COPIES) == 0, tl.arange(0, BLOCK_B)
        at = winners_ptr + local[None, :] + tl.zeros([COPIES, BLOCK_B], tl.int32)
        words = _polled(at, first[:, None] & (local < rows)[None, :], tag)
        return (tl.max(words, axis=0) >> 8).to(tl.int32)


@triton.jit
def join_masses(
    masses_ptr, first_row, epoch, part, lse_ptr, temperature_ptr, cache_rows_ptr, rows, num_parts, num_steps,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Normalisers of all steps, from everyone's masses [STEPS, BLOCK_B, num_parts], once the last step is over; a row
    is one program's.
    """
    other, step = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_S)
    there = (other < num_parts)[:, None] & (step < STEPS)[None, :]
    tags = (tl.zeros([BLOCK_S], tl.int64) + epoch + step) & 255
    for r in range(part, rows, num_parts):
        row = first_row + r
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + row) >= 0
        if live:
            at = (step[None, :] * BLOCK_B + r) * num_parts + other[:, None]
            masses = _polled(masses_ptr + at, there, tags[None, :])
            parts = tl.where(there, (masses >> 32).to(tl.int32).to(tl.float32, bitcast=True), _LOWEST)
            _, noisy = row_scales(tl.load(temperature_ptr + row))
            tl.store(lse_ptr + row * num_steps + step, joined_log2_mass(parts, noisy, 0), mask=step < STEPS)


@triton.jit
def hidden_shares(
    part, first_row, hidden_ptr, weight_ptr, bias_ptr, confidence_ptr, cache_rows_ptr, rows,
    num_parts, hidden_stride, hidden_step, hidden_size,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The hidden states' share of the confidences; pairs of a step and a request are dealt out to the programs."""
    for pair in range(part, rows * STEPS, num_parts):
        step, row = pair // rows, first_row + pair % rows
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + row) >= 0
        if live:
            wide = tl.zeros([], tl.int64) + row  # a row's offset may pass 32 bits
            hidden_row = hidden_ptr + wide * hidden_stride + step * hidden_step
            logit = hidden_confidence(hidden_row, hidden_size, weight_ptr, bias_ptr, BLOCK_H)
            tl.store(confidence_ptr + row * STEPS + step, logit)
    tl.debug_barrier()  # other threads add the tokens' share


@triton.jit
def _add_token_shares(
    previous, part, first_row, step, w1_ptr, weight_ptr, confidence_ptr, cache_rows_ptr, rows, num_parts, hidden_size,
    HAS_ROWS: tl.constexpr, STEPS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The share of the previous tokens [BLOCK_B] in the confidences of a step, dealt out as in `hidden_shares`."""
    r = part - step * rows % num_parts
    r += tl.where(r < 0, num_parts, 0)
    while r < rows:  # a `for` would keep the loop around it from being pipelined
        live = True
        if HAS_ROWS:
            live = tl.load(cache_rows_ptr + first_row + r) >= 0
        if live:
            token = tl.sum(tl.where(tl.arange(0, BLOCK_B) == r, previous, 0), axis=0).to(tl.int64)
            share = token_confidence(token, w1_ptr, hidden_size, weight_ptr, RANK, BLOCK_R)
            at = confidence_ptr + (first_row + r) * STEPS + step
            tl.store(at, tl.load(at) + share)
        r += num_parts


@triton.jit
def _token_of(column, ids_ptr, REDUCED: tl.constexpr):
    """Target ids of columns."""
    if REDUCED:
        return tl.load(ids_ptr + column).to(tl.int32)
    else:
        return column


@triton.jit
def send(
    word, column, previous, part, first_row, step, epoch, live, memory, confidence, w1_ptr, ids_ptr,
    cache_rows_ptr, rows, num_parts, STEPS: tl.constexpr, HAS_ROWS: tl.constexpr,
    REDUCED: tl.constexpr, CONFIDENCE: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr, POLLED: tl.constexpr, W1_BYTES: tl.constexpr,
):  # fmt: skip
    """Publish this program's race words [BLOCK_B] of a step, and do what no token depends on while they travel: the row
    of W1 that would be needed next is brought near, and the share of the previous tokens in the confidence is added.
    """
    words_ptr, _, _, _ = memory
    confidence_ptr, confidence_weight_ptr, hidden_size = confidence
    local = tl.arange(0, BLOCK_B)
    tag, slot = _slot(step, epoch, first_row, num_parts, BLOCK_B)
    at = words_ptr + (slot * POLLED + local) * num_parts + part
    tl.atomic_xchg(at, word | tag, mask=local < POLLED, sem="relaxed")
    if W1_BYTES > 0:
        candidate = _token_of(column, ids_ptr, REDUCED)
        prefetch_rows(w1_ptr, tl.where(live, candidate, 0).to(tl.int64), W1_BYTES)
    if CONFIDENCE == "hidden+markov":
        _add_token_shares(
            previous, part, first_row, step, w1_ptr, confidence_weight_ptr, confidence_ptr, cache_rows_ptr, rows,
            num_parts, hidden_size, HAS_ROWS, STEPS, RANK, BLOCK_R, BLOCK_B,
        )  # fmt: skip


@triton.jit
def send_mass(mass, part, first_row, step, epoch, memory, num_parts, BLOCK_B: tl.constexpr, POLLED: tl.constexpr):
    """Publish this program's log2 masses [BLOCK_B] of a step, which are read when the last step is over."""
    local = tl.arange(0, BLOCK_B)
    tag, _ = _slot(step, epoch, first_row, num_parts, BLOCK_B)
    packed = (mass.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag
    at = memory[2] + (step * BLOCK_B + local) * num_parts + part
    tl.atomic_xchg(at, packed, mask=local < POLLED, sem="relaxed")


@triton.jit
def receive(
    part, first_row, step, epoch, live, memory, ids_ptr, rows, num_parts, first_step, num_steps,
    REDUCED: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, POLLED: tl.constexpr, OWN: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Everyone's tokens [BLOCK_B] of a step, 0 where a row is not live."""
    words_ptr, winners_ptr, _, tokens_ptr = memory
    local = tl.arange(0, BLOCK_B)
    tag, slot = _slot(step, epoch, first_row, num_parts, BLOCK_B)
    won = _winners(
        words_ptr + slot * POLLED * num_parts, winners_ptr + slot * BLOCK_B, part, rows, tag, num_parts,
        BLOCK_V, BLOCK_B, POLLED, OWN, COPIES,
    )  # fmt: skip
    token = tl.where(live, _token_of(tl.where(live, won, 0), ids_ptr, REDUCED), 0)
    at = tokens_ptr + (first_row + local) * num_steps + first_step + step
    tl.store(at, token.to(tl.int64), mask=live & (local % num_parts == part))
    return token
