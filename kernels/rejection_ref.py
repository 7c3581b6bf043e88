"""What `dspark.kernels.rejection` computes: its inputs and outputs, and the definition in PyTorch.

For each request, with p the target's softmax at its temperature and q what the drafts were drawn from:

    accept draft i      iff u q_i(draft_i) < p_i(draft_i), u uniform                       draft i stands in row i
    first rejection i   emit argmin_v E_v / max(p_i(v) - q_i(v), 0), or E_v / p_i(v) where nothing of p exceeds q
    all accepted        emit argmin_v E_v / p_n(v), row n after the n drafts
    temperature 0       accept iff the draft is the row's largest logit, the lowest id among equals; emit that

u and E are the numbers of the request's streams: Philox words of (token id // 4, position, purpose, kind) under the
request's seed. This is the rule of `dspark.sampling.rejection`, which works on probabilities; the numbers are the
same, so the tokens are, except where rounding decides.
Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318, algorithm 2.
"""

import math
from dataclasses import dataclass

import torch

from dspark.kernels.philox import PER_TOKEN, SINGLE, WORD, philox_rows
from dspark.kernels.rejection_device import (
    ACCEPT,
    BAD_TARGET,
    COLDEST,
    FOREIGN,
    HOTTEST,
    RECOVERY,
    TARGET,
    UNDRAWN,
)

# Longest list of ids that a sparse q may have: one thread block holds it.
MAX_LISTED = 1024

STATUS_MEANING = {
    BAD_TARGET: "a row of target logits holds NaN or +inf, or nothing finite: the model's forward pass overflowed, or a"
    " mask removed every token",
    UNDRAWN: "an offered draft has q = 0: it was not drawn from the q that came with it, and the output is biased",
    FOREIGN: "a draft token is outside the target's vocabulary: the draft vocabulary's ids were not mapped",
}


@dataclass(frozen=True)
class Block:
    """What is to be verified. Request b has the rows row_starts[b] .. row_starts[b+1]-1, one more than drafts.

    Attributes:
        logits: [N, V] float32, bfloat16 or float16, last dimension contiguous; before the temperature. -inf excludes
            a token.
        tokens: [N] int32 or int64; entry row_starts[b] + 1 + i is draft i of request b. -1 ends the request's drafts,
            and so does an id >= V. The first entry of a request is not read.
        row_starts: [B+1] int32 or int64, rising from 0 to N; at most K+1 rows a request.
        positions: [N] int64, absolute position of the token that each row predicts, 0..2**32-1.
        temperature: [B] float32 or float64, >= 0; [S] with `slots`.
        seeds: [B] int64; [S] with `slots`.
        slots: [B] int32 or int64, entry of `temperature` and `seeds` that belongs to each request; its own if None.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    row_starts: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    slots: torch.Tensor | None = None

    def by_request(self, states: torch.Tensor) -> torch.Tensor:
        """What is kept as `temperature` and `seeds` are, one entry a request."""
        return states if self.slots is None else states[self.slots.long()]


@dataclass(frozen=True)
class DraftLaw:
    """What the drafts were drawn from; one-hot if there are no `values`.

    Attributes:
        values: [S, K, V] over the vocabulary, or [S, K, k] over `ids`; float32, bfloat16 or float16, last dimension
            contiguous. Logits before the temperature, or probabilities.
        ids: [S, K, k] int32 or int64; k <= MAX_LISTED, those of positive probability distinct within a row.
        slots: [B] int32 or int64, the row of `values` and `ids` that belongs to each request; its own if None.
        probs: whether `values` are probabilities.
        logsumexp: [S, K] float32: log(sum(exp(values / temperature))) of dense logits, which saves reading rows of q
            other than the rejected one.
        temperature: of the drafts' logits, kept as `Block.temperature` is; the same if None. For target logits that
            come divided by theirs.
    """

    values: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    probs: bool = False
    logsumexp: torch.Tensor | None = None
    temperature: torch.Tensor | None = None


@dataclass(frozen=True)
class Verified:
    """What a step emits.

    Attributes:
        tokens: [B, K+1] int64; accepted drafts, one more token, then -1.
        num_emitted: [B] int32, 1..K+1.
        num_accepted: [B] int32, num_emitted - 1.
        status: [B] int32; 0, or bits of STATUS_MEANING about rows up to the first rejection. The tokens of a request
            with another status are ids of the vocabulary, but of no known law.
        overlap: [B, K] float32, sum(min(p, q)) of each offered draft, NaN elsewhere; None if not asked for.
    """

    tokens: torch.Tensor
    num_emitted: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor
    overlap: torch.Tensor | None = None

    @classmethod
    def empty(cls, batch: int, num_draft_tokens: int, device: torch.device | str) -> "Verified":
        """Outputs to be written, without `overlap`."""
        # Rows of a multiple of 16 bytes: the kernels are compiled for aligned pointers, whatever the batch.
        counts = torch.empty((3, -(-batch // 4) * 4), dtype=torch.int32, device=device)[:, :batch]
        tokens = torch.empty((batch, num_draft_tokens + 1), dtype=torch.int64, device=device)
        return cls(tokens, *counts.unbind())


def raise_for_status(status: torch.Tensor) -> None:
    """Raise if a request's status [B] is not 0; waits for the device.

    Raises:
        ValueError: target logits or a draft id cannot be used.
        AssertionError: a draft was not drawn from its q.
    """
    values = status.tolist()
    for bit, meaning in STATUS_MEANING.items():
        requests = [request for request, value in enumerate(values) if value & bit]
        if requests:
            error = AssertionError if bit == UNDRAWN else ValueError
            raise error(f"request {requests[0]} ({len(requests)} of {len(values)}): {meaning}")


def noise_ref(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, vocab_size: int) -> torch.Tensor:
    """Unit exponentials [B, V] float64 of one position [B] a request; u is rounded to float32, as the kernel has it."""
    u = (_words(seeds, positions, purpose, PER_TOKEN, vocab_size).float() + 0.5) * 2.0**-32
    return -torch.log1p(-u.clamp_max(1 - 2.0**-24).double())


def acceptance_ref(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers [B, K] float64 in [0, 1), multiples of 2**-53, of positions [B, K]."""
    keys = seeds[:, None].expand_as(positions).flatten()
    high, low = _words(keys, positions.flatten(), ACCEPT, SINGLE, 2).unbind(-1)
    return (((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53).view(positions.shape)


def _words(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, kind: int, count: int) -> torch.Tensor:
    """Philox words [R, count] as int64 of rows (seed, position)."""
    tail = torch.tensor([purpose, kind], device=seeds.device).expand(len(seeds), 2)
    key = torch.stack([seeds & WORD, seeds >> 32 & WORD], -1)
    return philox_rows(key, torch.cat([positions[:, None], tail], -1), count).long()


@dataclass(frozen=True)
class Laws:
    """A block padded to K drafts a request, with its distributions; what `verify_ref` decides from.

    Attributes:
        drafts: [B, K] int64, -1 where none.
        run: [B] int64, drafts offered.
        rows: [B, K+1] int64, row of each slot; the request's last row past it.
        p: [B, K+1, V]; one-hot where the temperature is 0.
        q: [B, K, V].
    """

    drafts: torch.Tensor
    run: torch.Tensor
    rows: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


def laws_ref(block: Block, law: DraftLaw, num_draft_tokens: int, dtype: torch.dtype = torch.float32) -> Laws:
    """Softmax of both sides: exp((x - max) / T) / sum, in `dtype`."""
    starts, device = block.row_starts.long(), block.logits.device
    slot = torch.arange(num_draft_tokens + 1, device=device)
    rows = torch.minimum(starts[:-1, None] + slot, starts[1:, None] - 1)
    inside = starts[:-1, None] + 1 + slot[:-1] < starts[1:, None]
    drafts = torch.where(inside, block.tokens.long()[rows[:, 1:]], -1)
    vocab_size = block.logits.shape[1]
    run = ((drafts >= 0) & (drafts < vocab_size)).long().cumprod(-1).sum(-1)
    greedy = (block.by_request(block.temperature) == 0)[:, None, None]

    def heat(temperature: torch.Tensor) -> torch.Tensor:
        column = block.by_request(temperature).to(dtype)[:, None, None]
        return column.masked_fill(column == 0, 1.0).clamp(COLDEST, HOTTEST)

    def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        logits = logits.to(dtype)
        powers = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
        return powers / powers.sum(-1, keepdim=True)

    logits = block.logits[rows]
    best = torch.zeros_like(logits, dtype=dtype).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.where(greedy, best, softmax(logits, heat(block.temperature)))
    wide = torch.zeros(*drafts.shape, vocab_size, dtype=dtype, device=device)
    if law.values is None:
        q = wide.scatter_(-1, drafts.clamp(0, vocab_size - 1)[..., None], 1.0)
    else:
        slots = torch.arange(len(run), device=device) if law.slots is None else law.slots.long()
        values = law.values[slots, :num_draft_tokens].to(dtype)
        temperature = heat(block.temperature if law.temperature is None else law.temperature)
        if law.logsumexp is not None:
            values = (values / temperature - law.logsumexp[slots, :num_draft_tokens, None].to(dtype)).exp()
        elif not law.probs:
            values = softmax(values, temperature)
        q = values if law.ids is None else wide.scatter_add_(-1, law.ids[slots, :num_draft_tokens].long(), values)
    return Laws(drafts, run, rows, p, q)


def verify_ref(block: Block, law: DraftLaw, num_draft_tokens: int, *, overlap: bool = False) -> Verified:
    """The definition, in PyTorch: float32 sums and exponentials, decisions in float64. Contract of `verify`."""
    laws = laws_ref(block, law, num_draft_tokens)
    drafts, run = laws.drafts, laws.run
    request = torch.arange(len(run), device=run.device)
    slot = torch.arange(num_draft_tokens, device=run.device)
    greedy, seeds = block.by_request(block.temperature) == 0, block.by_request(block.seeds)
    index = drafts.clamp(0, block.logits.shape[1] - 1)[..., None]
    p, q = (law_of[:, :num_draft_tokens].gather(-1, index)[..., 0].double() for law_of in (laws.p, laws.q))
    u = acceptance_ref(seeds, block.positions[laws.rows[:, :-1]])
    accepts = torch.where(greedy[:, None], p > 0, u * q < p) & (slot < run[:, None])
    accepted = accepts.long().cumprod(-1).sum(-1)
    rejected = accepted < run

    weight = laws.p[request, accepted].double()
    position = block.positions[laws.rows[request, accepted]]
    noise = torch.empty_like(weight)
    for chosen, purpose in ((rejected, RECOVERY), (~rejected, TARGET)):
        noise[chosen] = noise_ref(seeds[chosen], position[chosen], purpose, weight.shape[-1])
    judged = torch.nonzero(rejected & ~greedy)[:, 0]
    residual = (weight[judged] - laws.q[judged, accepted[judged]]).clamp_min(0)
    weight[judged] = torch.where(residual.sum(-1, keepdim=True) > 0, residual, weight[judged])
    times = torch.where(weight > 0, noise / weight, math.inf)
    added = times.argmin(-1)

    lane = torch.arange(num_draft_tokens + 1, device=run.device)
    tokens = torch.cat([drafts, added[:, None]], 1).masked_fill(lane >= accepted[:, None], -1)
    tokens = torch.where(lane == accepted[:, None], added[:, None], tokens)
    both = torch.minimum(laws.p[:, :-1], laws.q).sum(-1)
    both = torch.where(greedy[:, None], (p > 0).to(both.dtype), both).masked_fill(slot >= run[:, None], math.nan)
    status = _status_ref(block, laws, accepted, (q > 0) | greedy[:, None])
    counts = accepted.int()
    return Verified(tokens, counts + 1, counts, status, both if overlap else None)


def _status_ref(block: Block, laws: Laws, accepted: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """[B] int32 from drawn [B, K], whether each draft has q > 0."""
    num_draft_tokens = drawn.shape[1]
    lane = torch.arange(num_draft_tokens + 1, device=accepted.device)
    peak = block.logits.float().amax(-1)[laws.rows]  # NaN where a row has one
    seen = lane <= accepted[:, None]
    status = ((~peak.isfinite() & seen).any(-1) * BAD_TARGET).int()
    status |= ((~drawn & seen[:, :-1] & (lane[:-1] < laws.run[:, None])).any(-1) * UNDRAWN).int()
    foreign = (laws.drafts >= block.logits.shape[1]) & (lane[:-1] == laws.run[:, None])
    return status | (foreign.any(-1) * FOREIGN).int()
