"""The Markov chain of a draft block: definition, inputs and outputs. The kernels are in `markov_persistent` and
`markov_held` (whole vocabulary) and `markov_topk` (candidates).

For request b and draft i = 0..K-1, with prev the anchor and then the token just drawn:

    e         = W1[prev]
    features  = e, or those of the gated or recurrent head (`dspark.heads`), in the dtype of W1
    logits_i  = round((base_i + W2 features) logit_scale)       rounded to the dtype of the logits cache
    token_i   = a draw from softmax(logits_i / T); greedy requests (T = 0): the lowest column of the largest logit

The draw has two levels, those of `dspark.sampling.streams.sample_in_groups`. In base-2 logarithms, with x = logits
log2(e) / T, and groups of GROUP consecutive columns:

    mass_g    = log2(sum over the group of 2^x)
    group     = argmax_g  mass_g - log2(E_g), the lowest among equals; E_g a unit exponential
    column    = the first of the group at which the sum of 2^(x - mass) exceeds u, u uniform

The group is drawn with probability 2^mass_g / sum(2^mass), the column with 2^(x - mass_g). An element costs a sum of
exponentials, which the normaliser takes anyway, and no noise. The logits are those *rounded* ones that are in the
cache, because verification computes q from them. A draw from candidates has one level, `race_ref`, with numbers of
token ids: few candidates cost little noise.

Arithmetic is float32 throughout: a bias is not rounded before it is added, and the recurrent state is not rounded
between steps, where the modules in `dspark.heads` round both to the model's dtype.
Sources: DeepSpec, modeling/dspark, for the heads; vLLM 0.33, v1/worker/gpu/spec_decode/dspark/speculator.py, for the
cache of logits before temperature. vLLM's loop launches about nine kernels a step.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from dspark.kernels.markov_device import MAX_ID
from dspark.kernels.philox import WORD, philox_at, philox_rows

LOG2E = 1.4426950408889634
GROUP = 32  # columns that share one number in the draw of a draft
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

Kind = Literal["none", "vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class MarkovWeights:
    """The tensors a chain reads.

    Attributes:
        kind: head; "none" draws from the base logits alone.
        w1: [V, rank] by target id; None for "none".
        w2: [D, rank] by draft column, in the dtype of w1, or float8_e4m3fn with `w2_scale`.
        w2_scale: [D] float32, what a row of an 8-bit w2 is multiplied by.
        joint_weight: gated [rank, H + rank] on [h; e]; rnn [3 rank, 2 rank + H] on [state; e; h].
        joint_bias: [rank] or [3 rank].
        confidence_weight: [H], or [H + rank] on [h; e]; None without a confidence head.
        confidence_bias: [1].
        target_ids: [D] int64, distinct target id of each draft column; None if column v is token v.
        logit_scale: multiplies the corrected logits.

    Raises:
        ValueError: shapes or dtypes that don't fit together.
    """

    kind: Kind
    w1: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    joint_weight: torch.Tensor | None = None
    joint_bias: torch.Tensor | None = None
    confidence_weight: torch.Tensor | None = None
    confidence_bias: torch.Tensor | None = None
    target_ids: torch.Tensor | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "none":
            return
        if self.w1 is None or self.w2 is None or self.w1.shape[1] != self.w2.shape[1]:
            raise ValueError(f"a {self.kind} head needs w1 [V, rank] and w2 [D, rank] of one rank")
        if (self.w2.dtype == FP8) != (self.w2_scale is not None):
            raise ValueError(f"w2 is {self.w2.dtype}: an 8-bit w2 needs w2_scale [D], any other dtype must have none")
        rank, hidden = self.rank, self.hidden_size
        joint = {"vanilla": None, "gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}[self.kind]
        found = None if self.joint_weight is None else tuple(self.joint_weight.shape)
        if joint != found:
            raise ValueError(f"joint_weight of a {self.kind} head must be {joint}, got {found}")

    @property
    def rank(self) -> int:
        """Width of the head; 0 without one."""
        return 0 if self.w1 is None else self.w1.shape[1]

    @property
    def hidden_size(self) -> int:
        """H as the joint projection has it; 0 for heads that don't read the hidden state."""
        if self.joint_weight is None:
            return 0
        return self.joint_weight.shape[1] - (1 if self.kind == "gated" else 2) * self.rank

    @property
    def reads_hidden(self) -> bool:
        """Whether a chain needs the hidden states."""
        return self.joint_weight is not None or self.confidence_weight is not None

    def quantized(self) -> "MarkovWeights":
        """The same head with an 8-bit W2. Only the proposal changes: verification stays exact for whatever q is."""
        assert self.w2 is not None, "a chain without a head has no W2"
        w2, scale = quantize_w2(self.w2)
        return replace(self, w2=w2, w2_scale=scale)


def quantize_w2(w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W2 [D, rank] as float8_e4m3fn [D, rank] and one float32 scale a row [D]; a zero row has scale 1."""
    largest = w2.float().abs().amax(-1)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (w2.float() / scale[:, None]).to(FP8), scale


@dataclass(frozen=True)
class ChainRequests:
    """Per-request inputs of a chain.

    Attributes:
        anchors: [B] int64, last emitted token, a target id.
        positions: [B] int64, by which draft 0 looks up its noise: its absolute position, or another number of its own.
        seeds: [B] int64, the Philox key of the request's random numbers.
        temperature: [B] float32; 0 is greedy.
        cache_rows: [B] int64, the request's row of the logits cache; -1 is a padding row, for which nothing is
            written. None: row b, no padding.
        state: [B, rank] float32, the recurrent head's state before draft 0 (the 1+N layout has stepped it once); None
            is zero.
    """

    anchors: torch.Tensor
    positions: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    cache_rows: torch.Tensor | None = None
    state: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("anchors", torch.int64), ("positions", torch.int64), ("seeds", torch.int64),
                            ("temperature", torch.float32), ("cache_rows", torch.int64)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (value.shape != self.anchors.shape or value.dtype != dtype):
                raise ValueError(
                    f"{name} must be {dtype} {tuple(self.anchors.shape)}, got {value.dtype} {tuple(value.shape)}"
                )

    def __len__(self) -> int:
        return len(self.anchors)


@dataclass(frozen=True)
class ChainOutput:
    """What a chain writes.

    Attributes:
        tokens: [B, K] int64 target ids.
        lse: [B, K] float32, logsumexp of logits / T over the row, so that q = exp(logits / T - lse); greedy rows: the
            largest logit.
        confidence: [B, K] float32 logits, or None.
        cache: [rows, K, D] logits before temperature; row `cache_rows[b]` is written. If its last dimension is the
            target's vocabulary although the head has `target_ids`, column j goes to `target_ids[j]` and the rest is
            left as it is: fill it with -inf once. None keeps no logits; they are rounded as `base` is.
    """

    tokens: torch.Tensor
    lse: torch.Tensor
    confidence: torch.Tensor | None
    cache: torch.Tensor | None

    @classmethod
    def allocate(cls, weights: MarkovWeights, base: torch.Tensor, cache: torch.Tensor | None = None) -> "ChainOutput":
        """Outputs for base [B, K, D]; a cache of its shape and dtype unless one is given."""
        batch, steps = base.shape[:2]

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(batch, steps, dtype=dtype, device=base.device)

        return cls(
            tokens=empty(torch.int64),
            lse=empty(torch.float32),
            confidence=None if weights.confidence_weight is None else empty(torch.float32),
            cache=torch.empty_like(base) if cache is None else cache,
        )


def chain_ref(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
) -> torch.Tensor:
    """The definition, in PyTorch; fills `out`.

    Args:
        weights: the head.
        base: [B, K, D] logits before the Markov bias.
        hidden: [B, K, H] of the drafting rows; None if the head does not read it.
        requests: one row per request.
        out: as `ChainOutput`.

    Returns:
        [B, K] float32: how far each draw is from another outcome, as `draw_ref` has it. One with a lead of the order
        of rounding could go either way on another device.

    Source: this module's docstring.
    """
    previous = requests.anchors
    live = torch.ones_like(previous, dtype=torch.bool) if requests.cache_rows is None else requests.cache_rows >= 0
    rows = torch.arange(len(previous), device=base.device) if requests.cache_rows is None else requests.cache_rows
    columns = None if out.cache is None else cache_columns(weights, out.cache)
    state = initial_state(weights, requests)
    leads = []
    for i in range(base.shape[1]):
        row_hidden = None if hidden is None else hidden[:, i].float()
        embedded = None if weights.w1 is None else weights.w1[previous].float()
        features, state = features_ref(weights, embedded, row_hidden, state)
        logits = (base[:, i].float() + bias_ref(weights, features)) * weights.logit_scale
        stored = logits.to(base.dtype if out.cache is None else out.cache.dtype)
        column, lead = draw_ref(stored, requests, i)
        previous = column if weights.target_ids is None else weights.target_ids[column]
        leads.append(lead)
        if out.cache is not None and columns is not None:
            out.cache[rows[live], i] = out.cache[rows[live], i].index_copy(1, columns, stored[live])
        out.tokens[live, i] = previous[live]
        out.lse[live, i] = lse_ref(stored, requests.temperature)[live]
        if out.confidence is not None:
            out.confidence[live, i] = confidence_ref(weights, row_hidden, embedded)[live]
    return torch.stack(leads, dim=1)


def cache_columns(weights: MarkovWeights, cache: torch.Tensor) -> torch.Tensor:
    """[D] int64, the cache column of each draft column."""
    if weights.target_ids is None:
        return torch.arange(cache.shape[-1], device=cache.device)
    size = len(weights.target_ids)
    return torch.arange(size, device=cache.device) if cache.shape[-1] == size else weights.target_ids


def initial_state(weights: MarkovWeights, requests: ChainRequests) -> torch.Tensor | None:
    """[B, rank] float32 for the recurrent head, None for the others."""
    if weights.kind != "rnn":
        return None
    if requests.state is not None:
        return requests.state
    return torch.zeros(len(requests), weights.rank, device=requests.anchors.device)


def features_ref(
    weights: MarkovWeights, embedded: torch.Tensor | None, hidden: torch.Tensor | None, state: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Features [B, rank] float32 with the values of w1's dtype, and the next state; all inputs float32 [B, ...]."""
    if weights.kind in ("none", "vanilla"):
        return embedded, state
    assert weights.joint_weight is not None
    assert weights.joint_bias is not None
    assert weights.w1 is not None
    assert embedded is not None
    assert hidden is not None, f"a {weights.kind} head reads the hidden states"
    weight, bias = weights.joint_weight.float(), weights.joint_bias.float()
    if weights.kind == "gated":
        gate = torch.sigmoid(torch.cat([hidden, embedded], -1) @ weight.T + bias)
        return (gate * embedded).to(weights.w1.dtype).float(), state
    assert state is not None
    gate, candidate, out = (torch.cat([state, embedded, hidden], -1) @ weight.T + bias).chunk(3, dim=-1)
    kept = torch.sigmoid(gate)
    return torch.tanh(out).to(weights.w1.dtype).float(), kept * state + (1 - kept) * torch.tanh(candidate)


def bias_ref(weights: MarkovWeights, features: torch.Tensor | None) -> torch.Tensor | float:
    """W2 features, [B, D] float32."""
    if features is None or weights.w2 is None:
        return 0.0
    bias = features @ weights.w2.float().T
    return bias if weights.w2_scale is None else bias * weights.w2_scale


def draft_noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Unit exponentials [B, n] float32 of target ids [B, n] for the draft at positions [B], under seeds [B]: those of
    `dspark.sampling.Streams` for purpose DRAFT, bit for bit. Drafts from candidates are drawn with them.

    E = -log1p(-u), with u in the middle of the cell of a random word: word id % 4 of the Philox output for counter
    (id // 4, position, 0, 0).
    """
    return _exponential(philox_at(*_rows(seeds, positions, 0), ids.contiguous()))


def draw_noise(seeds: torch.Tensor, positions: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit exponentials [B, num_groups] and uniform numbers [B] float32 of a draw over the whole draft vocabulary:
    words of counters (group // 4, position, 0, 2) and (0, position, 0, 1). Those of `dspark.sampling.Streams`, the
    uniform number rounded.
    """
    noise = _exponential(philox_rows(*_rows(seeds, positions, 2), num_groups))
    return noise, _cells(philox_rows(*_rows(seeds, positions, 1), 1))[:, 0]


def _rows(seeds: torch.Tensor, positions: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Philox rows of purpose DRAFT, which is 0."""
    key = torch.stack([seeds & WORD, seeds >> 32 & WORD], -1)
    return key, torch.stack([positions, torch.zeros_like(positions), torch.full_like(positions, kind)], -1)


def _cells(words: torch.Tensor) -> torch.Tensor:
    """Middles of the cells of random words, float32 below 1: the top cells would round to 1."""
    return ((words.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)


def _exponential(words: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(-_cells(words))


def race_ref(
    stored: torch.Tensor, requests: ChainRequests, step: int, target_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draw from candidates. Winners [B] int64 (target ids) of the race of stored logits [B, n] at draft `step`,
    argmax logits log2(e) / T - log2(E), and their lead over the runner-up [B]. Of equal keys the lowest id wins.

    target_ids: [n] or [B, n], ids of the columns; None if column v is token v.
    """
    batch, width = stored.shape
    ids = torch.arange(width, device=stored.device) if target_ids is None else target_ids
    ids = ids.expand(batch, width)
    keys, noisy = scaled(stored, requests.temperature)
    if noisy.any():
        noise = draft_noise(requests.seeds, requests.positions + step, ids)
        keys = torch.where(noisy, keys - torch.log2(noise), keys)
    best = keys.amax(-1, keepdim=True)
    tokens = ids.masked_fill(keys < best, MAX_ID + 1).amin(-1)
    others = keys.masked_fill(ids == tokens[:, None], float("-inf"))
    return tokens, (best - others.amax(-1, keepdim=True))[:, 0]


def scaled(stored: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, n] as base-2 logarithms of weights at temperatures [B], unscaled where T = 0; and [B, 1], T > 0."""
    noisy = (temperature > 0)[:, None]
    return stored.float() * torch.where(noisy, LOG2E / temperature.clamp_min(1e-30)[:, None], 1.0), noisy


def draw_ref(stored: torch.Tensor, requests: ChainRequests, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The draw over the whole draft vocabulary, as the module has it. Columns [B] int64 of stored logits [B, n] at
    draft `step`, and leads [B]: of the group's key over the runner-up's, or of u from where another column begins,
    whichever is less; infinite for greedy requests.
    """
    x, noisy = scaled(stored, requests.temperature)
    num_groups = -(-x.shape[1] // GROUP)
    x = torch.nn.functional.pad(x, (0, num_groups * GROUP - x.shape[1]), value=float("-inf"))
    if not noisy.any():
        return x.argmax(-1), torch.full_like(requests.temperature, float("inf"))
    noise, u = draw_noise(requests.seeds, requests.positions + step, num_groups)
    grouped = x.unflatten(-1, (num_groups, GROUP))
    peak = grouped.amax(-1)
    mass = peak + torch.log2(torch.exp2(grouped - peak.clamp_min(-3e38)[..., None]).sum(-1))
    keys = mass - torch.log2(noise)
    group = keys.argmax(-1, keepdim=True)
    lead = (keys.gather(-1, group) - keys.scatter(-1, group, float("-inf")).amax(-1, keepdim=True))[:, 0]
    chosen = grouped.gather(1, group[..., None].expand(-1, 1, GROUP))[:, 0]
    weights = torch.exp2(chosen - mass.gather(-1, group))
    reached = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    column = group[:, 0] * GROUP + ((reached > u[:, None]) & (weights > 0)).int().argmax(-1)
    inner = torch.where((weights > 0) & (reached < reached[:, -1:]), (reached - u[:, None]).abs(), float("inf"))
    lead = torch.minimum(lead, inner.amin(-1)).masked_fill(~noisy[:, 0], float("inf"))
    return torch.where(noisy[:, 0], column, x.argmax(-1)), lead


def lse_ref(stored: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logsumexp(logits / T) of rows [B, n], or the largest logit where T = 0."""
    logits, safe = stored.float(), temperature.clamp_min(1e-30)[:, None]
    return torch.where(temperature > 0, torch.logsumexp(logits / safe, -1), logits.amax(-1))


def confidence_ref(weights: MarkovWeights, hidden: torch.Tensor | None, embedded: torch.Tensor | None) -> torch.Tensor:
    """[B] float32 logits of the confidence head."""
    assert weights.confidence_weight is not None
    assert weights.confidence_bias is not None
    assert hidden is not None, "the confidence head reads the hidden states"
    weight = weights.confidence_weight.float()
    inputs = hidden
    if embedded is not None and weight.shape[0] > hidden.shape[-1]:
        inputs = torch.cat([hidden, embedded], -1)
    return inputs @ weight + weights.confidence_bias.float()
