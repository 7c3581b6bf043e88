"""Candidates and the chain over them: definitions, lists, outputs and launches; the kernels are in `markov_topk`."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from dspark.kernels import triton
from dspark.kernels.markov import (
    LOG2E,
    ChainRequests,
    MarkovWeights,
    bias_ref,
    confidence_ref,
    features_ref,
    initial_state,
    lse_ref,
    race_ref,
)
from dspark.kernels.markov_chain import bytes_of, confidence_kind, dtype_name, pointer
from dspark.kernels.markov_features import hidden_products
from dspark.kernels.markov_topk import _candidates_chain_kernel, _group_maxima_kernel, _select_kernel
from dspark.kernels.together import launches_together

CANDIDATES = (16, 32, 64, 128, 256)
GROUPS = (64, 32, 16)  # columns whose maximum is kept; k groups are looked at again
MAX_COUNTED = 32768  # values of one selection: two counts share 32 bits
PREFETCHED_BYTES = 16 << 20  # a third of the L2 cache of an H100
GATHERED = 32768  # elements of W2 that a program gathers at a time; half of that while it computes with as many


class Truncation(Protocol):
    """Limits within the candidates, one per request; `dspark.sampling.SamplingTensors` has them."""

    @property
    def top_k(self) -> torch.Tensor:
        """[B] int64, 0 is off."""

    @property
    def top_p(self) -> torch.Tensor:
        """[B] floating point, 1 is off."""

    @property
    def min_p(self) -> torch.Tensor:
        """[B] floating point, 0 is off."""


@dataclass(frozen=True)
class SparseOutput:
    """What a chain over candidates writes.

    Attributes:
        tokens: [B, K] int64 target ids.
        ids: [B, K, k] int64 target ids of the candidates: the largest base logits in order of their draft columns,
            and with lists, after each of them one listed token.
        logits: [B, K, k] float32 or bfloat16 before temperature; -inf where truncation removed a candidate, and in the
            second place of a token that is candidate twice.
        lse: [B, K] float32, logsumexp of logits / T over the candidates, so that q = exp(logits / T - lse) on `ids`;
            greedy rows: the largest logit, and q is one-hot.
        confidence: [B, K] float32 logits, or None.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    lse: torch.Tensor
    confidence: torch.Tensor | None

    @classmethod
    def allocate(cls, weights: MarkovWeights, base: torch.Tensor, k: int) -> "SparseOutput":
        """Outputs for base [B, K, D] and k candidates."""
        batch, steps = base.shape[:2]

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=base.device)

        return cls(
            tokens=empty(batch, steps, dtype=torch.int64),
            ids=empty(batch, steps, k, dtype=torch.int64),
            logits=empty(batch, steps, k, dtype=torch.float32),
            lse=empty(batch, steps, dtype=torch.float32),
            confidence=None if weights.confidence_weight is None else empty(batch, steps, dtype=torch.float32),
        )


def candidates_ref(base: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [B, K, k] int64 of the k largest of base [B, K, D], ascending, and their values float32 [B, K, k].

    Of equal values the lower columns are taken.
    """
    order = base.float().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    columns = order.sort(dim=-1).values
    return columns, base.float().gather(-1, columns)


def bias_lists(weights: MarkovWeights, k: int, rows: int = 256) -> torch.Tensor | None:
    """The tokens that the vanilla head favours most after each token, half of k candidates; None for other heads,
    whose bias depends on more than the previous token. Made once, for as long as the head is loaded.

    Share of a draft's acceptance (1 - TV) that k candidates lose, all of them of largest base logit, and half of them
    listed; the packaged pair and prompts, 1,300 positions (`scripts/candidate_loss.py`):

        k         T = 1           T = 0.6         T = 0
        32      14.8%   10.0%    5.4%   1.9%    3.4%   0.0%
        64      10.1%    6.2%    3.1%   0.5%    1.8%   0.0%
        128      7.1%    3.8%    1.8%   0.2%    1.4%   0.0%
        256      4.4%    2.4%    1.1%   0.1%    0.6%   0.0%

    No list of this size keeps it below 1% at T = 1: the 256 largest corrected logits themselves lose 1.2%.

    Args:
        weights: the head.
        k: number of candidates.
        rows: tokens at a time, rows x D float32 of temporary memory.

    Returns:
        [V, k / 2] int64, 4 k V bytes (39 MB for k = 64 and V = 151,936): the bits of a float32 bias above a column.
    """
    if weights.kind != "vanilla" or weights.w1 is None:
        return None
    words, selection = [], None
    for features in weights.w1.split(rows):
        bias = bias_ref(weights, features.float())
        assert isinstance(bias, torch.Tensor), "a vanilla head has W2"
        if bias.is_cuda:  # the same on every rank, also among equals
            selection = Selection(bias[:, None], k // 2) if selection is None else selection
            select_candidates(bias[:, None], selection)
            columns, values = selection.columns[: len(bias), 0], selection.values[: len(bias), 0]
        else:
            columns, values = (x[:, 0] for x in candidates_ref(bias[:, None], k // 2))
        words.append(values.view(torch.int32).long() << 32 | columns)
    return torch.cat(words)


def listed_ref(
    lists: torch.Tensor, previous: torch.Tensor, base: torch.Tensor, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [B, n] int64 listed for the previous tokens [B], and their corrected logits; -inf for those that are
    among the `largest` [B, m] columns of base [B, D] already.
    """
    words = lists[previous]
    columns, bias = words & 0xFFFFFFFF, (words >> 32).int().view(torch.float32)
    twice = (columns[:, :, None] == largest[:, None, :]).any(-1)
    return columns, (base.float().gather(-1, columns) + bias).masked_fill(twice, float("-inf"))


def kept_ref(x: torch.Tensor, ids: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Mask of one row's candidates x [k] (base-2 logarithms) with target ids [k] that truncation keeps."""
    kept = torch.exp2(x - x.max()) >= min_p
    kept &= (x[None, :] > x[:, None]).sum(-1) < (top_k or len(x))
    mass = torch.where(kept, torch.exp2(x - x.max()), 0.0)
    first = (x[None, :] > x[:, None]) | ((x[None, :] == x[:, None]) & (ids[None, :] < ids[:, None]))
    return kept & ((first * mass[None, :]).sum(-1) < top_p * mass.sum())


def candidates_chain_ref(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: SparseOutput,
    truncation: Truncation | None = None,
    lists: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, in PyTorch: `chain_ref` with the candidates' columns only. Same contract as
    `candidates_chain`, with the workspace's lists; returns the leads [B, K] of the drawn tokens.
    """
    columns, values = candidates_ref(base, out.ids.shape[-1] if lists is None else lists.shape[-1])
    live = torch.ones_like(requests.anchors, dtype=torch.bool)
    if requests.cache_rows is not None:
        live = requests.cache_rows >= 0
    previous, state, gaps = requests.anchors, initial_state(weights, requests), []
    for i in range(base.shape[1]):
        row_hidden = None if hidden is None else hidden[:, i].float()
        embedded = None if weights.w1 is None else weights.w1[previous].float()
        features, state = features_ref(weights, embedded, row_hidden, state)
        bias = bias_ref(weights, features)
        ids = columns[:, i]
        logits = values[:, i] + (bias if isinstance(bias, float) else bias.gather(-1, ids))
        if lists is not None:
            listed = listed_ref(lists, previous, base[:, i], ids)
            ids, logits = (torch.stack(pair, -1).flatten(1) for pair in zip((ids, logits), listed, strict=True))
        stored = (logits * weights.logit_scale).to(out.logits.dtype)
        ids = ids if weights.target_ids is None else weights.target_ids[ids]
        if truncation is not None:
            stored = stored.masked_fill(~_kept_rows(stored, ids, requests.temperature, truncation), float("-inf"))
        previous, gap = race_ref(stored, requests, i, ids)
        gaps.append(gap)
        out.tokens[live, i], out.ids[live, i], out.logits[live, i] = previous[live], ids[live], stored[live]
        out.lse[live, i] = lse_ref(stored, requests.temperature)[live]
        if out.confidence is not None:
            out.confidence[live, i] = confidence_ref(weights, row_hidden, embedded)[live]
    return torch.stack(gaps, dim=1)


def _kept_rows(
    stored: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, truncation: Truncation
) -> torch.Tensor:
    """Mask [B, k]; greedy rows keep all."""
    rows = []
    for b, each in enumerate(temperature.tolist()):
        if each == 0:
            rows.append(torch.ones_like(ids[b], dtype=torch.bool))
            continue
        x = stored[b].float() * (LOG2E / temperature[b])
        limits = int(truncation.top_k[b]), float(truncation.top_p[b]), float(truncation.min_p[b])
        rows.append(kept_ref(x, ids[b], *limits))
    return torch.stack(rows)


class Selection:
    """Buffers to select the n largest of every row of base [B, K, D], allocated once for one shape.

    Attributes:
        columns: [B, K, n] int32, ascending.
        values: [B, K, n] float32.
    """

    def __init__(self, base: torch.Tensor, count: int) -> None:
        batch, steps, columns = base.shape
        device = base.device
        self.group = min(GROUPS, key=lambda group: triton.next_power_of_2(triton.cdiv(columns, group)) + count * group)
        self.num_groups = triton.cdiv(columns, self.group)
        self.block_n = max(triton.next_power_of_2(self.num_groups), count)
        if self.block_n > MAX_COUNTED:
            raise ValueError(f"base has {columns} columns; selection counts up to {MAX_COUNTED} groups of {self.group}")
        self.count = count
        self.maxima = torch.zeros(batch * steps, self.num_groups, device=device)
        self.chosen = torch.zeros(batch * steps, count, dtype=torch.int32, device=device)
        self.columns = torch.zeros(batch, steps, count, dtype=torch.int32, device=device)
        self.values = torch.zeros(batch, steps, count, device=device)
        self.edges = torch.zeros(batch * steps, 2, device=device)


class CandidatesWorkspace:
    """Everything a chain over candidates needs besides its inputs and outputs, allocated once for one shape.

    Args:
        weights: the head.
        base: [B, K, D] logits before the bias, or a tensor of that shape and device.
        k: number of candidates; one of CANDIDATES and at most D.
        lists: `bias_lists(weights, k)`; None if all candidates are to be the largest base logits.
    """

    def __init__(self, weights: MarkovWeights, base: torch.Tensor, k: int, lists: torch.Tensor | None = None) -> None:
        batch, steps, columns = base.shape
        if k not in CANDIDATES or k > columns:
            raise ValueError(f"k must be one of {CANDIDATES} and at most {columns}, the columns of base; got {k}")
        if lists is not None and (weights.w1 is None or lists.shape != (len(weights.w1), k // 2)):
            raise ValueError(f"lists must be those of k={k} candidates of this head, got {tuple(lists.shape)}")
        device, rank = base.device, max(weights.rank, 1)
        self.shape, self.k, self.lists = tuple(base.shape), k, lists
        self.selection = Selection(base, k if lists is None else k // 2)
        self.scratch = torch.zeros(batch, 4 * k, device=device)
        self.state = torch.zeros(batch, rank, device=device)
        size = 3 * rank if weights.joint_weight is not None else 1
        self.products = torch.zeros(batch, steps, size, device=device)


def select_candidates(
    base: torch.Tensor,
    selection: Selection,
    weights: MarkovWeights | None = None,
    lists: torch.Tensor | None = None,
) -> None:
    """The largest columns of every position of base [B, K, D], into `selection`; same as `candidates_ref`.

    With `weights`, their rows of W1, W2 and the lists go to the L2 cache, if they are few.
    """
    batch, steps, columns = base.shape
    count, rows = selection.count, batch * steps
    block = 4096 // selection.group
    w1, w2 = (None, None) if weights is None else (weights.w1, weights.w2)
    w1_bytes, w2_bytes, list_bytes = (0 if x is None else x.shape[1] * x.element_size() for x in (w1, w2, lists))
    fetched = rows * count * (w1_bytes + w2_bytes + list_bytes)
    prefetch = w1 is not None and w2 is not None and fetched <= PREFETCHED_BYTES
    ids = None if weights is None else weights.target_ids
    together = launches_together(base.device)
    _group_maxima_kernel[(rows, triton.cdiv(selection.num_groups, block))](
        base, selection.maxima, steps, columns, selection.num_groups, *base.stride()[:2],
        GROUP=selection.group, BLOCK_N=block, TOGETHER=together,
    )  # fmt: skip
    _select_kernel[(rows,)](
        base, selection.maxima, selection.chosen, selection.columns, selection.values, selection.edges,
        w1 if prefetch else base, bytes_of(w2) if prefetch and w2 is not None else base, base if ids is None else ids,
        base if lists is None else lists, steps, columns, selection.num_groups, *base.stride()[:2],
        K=count, GROUP=selection.group, BLOCK_N=selection.block_n, BITS=16 if base.dtype == torch.bfloat16 else 32,
        REDUCED=ids is not None, W1_BYTES=w1_bytes if prefetch else 0, W2_BYTES=w2_bytes if prefetch else 0,
        LIST_BYTES=list_bytes if prefetch else 0, TOGETHER=together, launch_pdl=together, num_warps=8,
    )  # fmt: skip


def candidates_chain(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: SparseOutput,
    workspace: CandidatesWorkspace,
    truncation: Truncation | None = None,
) -> None:
    """Draft K tokens for each request from k candidates of each position; fills `out`.

    No host synchronisation and no allocation.

    Args:
        weights: the head.
        base: [B, K, D] logits before the bias, last dimension contiguous.
        hidden: [B, K, H]; None if the head does not read it.
        requests: one row per request; `cache_rows` only says which rows are padding (-1), for which nothing is written.
        out: what is written.
        workspace: made for this shape; its lists decide what the candidates are.
        truncation: top_k, top_p and min_p to apply within the candidates, or None.

    Raises:
        ValueError: shapes that don't fit the workspace.

    Source: `candidates_chain_ref`.
    """
    if tuple(base.shape) != workspace.shape or base.stride(-1) != 1:
        raise ValueError(f"base must be {workspace.shape} with contiguous rows, got {tuple(base.shape)}")
    selection, lists = workspace.selection, workspace.lists
    select_candidates(base, selection, weights, lists)
    state = initial_state(weights, requests)
    if state is not None:
        workspace.state.copy_(state)
    joint = weights.joint_weight
    if joint is not None and weights.joint_bias is not None and hidden is not None:
        first = 0 if weights.kind == "gated" else 2 * weights.rank
        hidden_products(hidden, joint[:, first : first + weights.hidden_size], weights.joint_bias, workspace.products)

    given = partial(pointer, placeholder=workspace.state)
    limits = (None, None, None) if truncation is None else (truncation.top_k, truncation.top_p, truncation.min_p)
    block_r = triton.next_power_of_2(max(weights.rank, 16))
    together = joint is None and launches_together(base.device)
    largest = selection.count
    _candidates_chain_kernel[(len(requests),)](
        base, selection.columns, selection.values, selection.edges, given(lists), given(weights.w1),
        workspace.state if weights.w2 is None else bytes_of(weights.w2), given(weights.w2_scale),
        given(weights.target_ids), given(joint), workspace.products, workspace.state, workspace.scratch,
        requests.anchors, requests.temperature, requests.seeds, requests.positions, given(requests.cache_rows),
        *map(given, limits), given(hidden), given(weights.confidence_weight), given(weights.confidence_bias),
        out.tokens, out.ids, out.logits, out.lse, given(out.confidence), *base.stride()[:2],
        *((0, 0, 0) if hidden is None else (*hidden.stride()[:2], hidden.shape[-1])),
        0 if joint is None else joint.stride(0), weights.hidden_size, weights.logit_scale,
        STEPS=base.shape[1], HAS_ROWS=requests.cache_rows is not None, KIND=weights.kind,
        CONFIDENCE=confidence_kind(weights, hidden),
        FEATURES="fp32" if weights.w1 is None else dtype_name(weights.w1.dtype), OUT=dtype_name(out.logits.dtype),
        FP8=weights.w2_scale is not None, REDUCED=weights.target_ids is not None, TRUNCATED=truncation is not None,
        RANK=weights.rank, BLOCK_R=block_r, BLOCK_H=256, K=workspace.k, LISTED=lists is not None, LARGEST=largest,
        BLOCK_K=min(largest, max(GATHERED // block_r, 16)), BLOCK_J=min(workspace.k, 32),
        BLOCK_S=triton.next_power_of_2(base.shape[1]), AHEAD=2 * largest * block_r <= GATHERED,
        TOGETHER=together, launch_pdl=together,
        num_warps=4 if largest * block_r <= 8192 else 8,
    )  # fmt: skip
