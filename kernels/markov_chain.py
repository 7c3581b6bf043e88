"""Launching the dense chain: its workspace, and the one public function. How it is cut is `markov_plan`'s.

Heads without a joint projection draft in one launch. The features of gated and recurrent ones cost a matrix product
at every step: there a step is two launches, the features and one step of the same chain.

See `dspark.kernels.markov.chain_ref` for what is computed and `dspark.kernels.markov_dense` for how.
"""

from functools import partial

import torch

from dspark.kernels import triton
from dspark.kernels.markov import FP8, GROUP, ChainOutput, ChainRequests, MarkovWeights, initial_state
from dspark.kernels.markov_device import MAX_ID
from dspark.kernels.markov_features import _features_kernel, hidden_products
from dspark.kernels.markov_held import _held_chain_kernel
from dspark.kernels.markov_persistent import _chain_kernel
from dspark.kernels.markov_plan import FEW, DensePlan


class DenseWorkspace:
    """Everything a dense chain needs besides its inputs and outputs, allocated once for one batch size.

    A captured graph may be replayed with the workspace it was captured with. Two chains must not share one at the
    same time.

    Args:
        weights: the head.
        base: [B, K, D] logits before the bias, or a tensor of that shape, dtype and device.
        num_programs: upper bound of the programs; None takes what the device holds at once.
    """

    def __init__(self, weights: MarkovWeights, base: torch.Tensor, *, num_programs: int | None = None) -> None:
        self.plan = DensePlan.choose(weights, base, num_programs)
        batch, steps, columns = base.shape
        plan, device = self.plan, base.device

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        parts, blocks = plan.num_parts, plan.num_blocks
        self.polled = triton.next_power_of_2(batch) if plan.block_b <= FEW else plan.block_b
        self.words = zeros(2, blocks, self.polled, parts, dtype=torch.int64)
        self.winners = zeros(2, blocks, plan.block_b, dtype=torch.int64)
        self.masses = zeros(blocks, steps, plan.block_b, parts, dtype=torch.int64)
        sums = plan.groups_each * (2 if plan.halves else 1)
        self.groups = zeros(blocks * parts, sums, plan.block_b, dtype=torch.float32)
        self.epochs = torch.ones(blocks * parts, dtype=torch.int32, device=device)
        rank = max(weights.rank, 1)
        curved = weights.joint_weight is not None
        dtype = base.dtype if weights.w1 is None else weights.w1.dtype
        self.features = zeros(batch if curved else 1, rank, dtype=dtype)
        self.state = zeros(batch, rank, dtype=torch.float32)
        self.products = zeros(batch, steps, 3 * rank, dtype=torch.float32) if curved else self.state
        self.shape = (batch, steps, columns)
        self._logits: torch.Tensor | None = None

    def logits(self, base: torch.Tensor) -> torch.Tensor:
        """Logits [B, K, D] of one step at a time, where none are kept: a draw reads its group's back."""
        if self._logits is None:
            self._logits = torch.empty_like(base[:, :1])
        return self._logits.expand_as(base)


def dense_chain(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
) -> None:
    """Draft K tokens for each request over the whole draft vocabulary; fills `out`.

    No host synchronisation, and no allocation after the first call: a CUDA graph can capture it then.

    Args:
        weights: the head.
        base: [B, K, D] logits before the bias, last dimension contiguous.
        hidden: [B, K, H] of the drafting rows; None if the head does not read it.
        requests: one row per request.
        out: what is written; the cache's last dimension is contiguous.
        workspace: made for this shape.

    Raises:
        ValueError: shapes that don't fit the workspace or each other.

    Source: `chain_ref`.
    """
    _check(weights, base, hidden, out, workspace)
    if weights.joint_weight is None:
        _launch_chain(weights, base, hidden, requests, out, workspace, 0, base.shape[1])
        return
    state = initial_state(weights, requests)
    if state is not None:
        workspace.state.copy_(state)
    _project_hidden(weights, hidden, workspace)
    for step in range(base.shape[1]):
        _launch_features(weights, hidden, requests, out, workspace, step)
        _launch_chain(weights, base, None, requests, out, workspace, step, 1)


def _check(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    out: ChainOutput,
    workspace: DenseWorkspace,
) -> None:
    columns, stored = base.shape[-1], base if out.cache is None else out.cache
    if tuple(base.shape) != workspace.shape:
        raise ValueError(f"the workspace was made for base {workspace.shape}, got {tuple(base.shape)}: make one each")
    if weights.w2 is not None and len(weights.w2) != columns:
        raise ValueError(f"base has {columns} columns, w2 {len(weights.w2)} rows: crop the padding of the larger one")
    if weights.target_ids is not None and len(weights.target_ids) != columns:
        raise ValueError(f"base has {columns} columns, target_ids names {len(weights.target_ids)}")
    if weights.reads_hidden and hidden is None:
        raise ValueError(f"this {weights.kind} head reads the hidden states [B, K, H], got None")
    if max(columns, stored.shape[-1], 0 if weights.w1 is None else len(weights.w1)) > MAX_ID:
        raise ValueError(f"token ids must stay below {MAX_ID}: a race word has 24 bits for them")
    strided = [name for name, t in (("base", base), ("cache", stored), ("hidden", hidden))
               if t is not None and t.stride(-1) != 1]  # fmt: skip
    if strided:
        raise ValueError(f"the last dimension of {', '.join(strided)} must be contiguous")


def _project_hidden(weights: MarkovWeights, hidden: torch.Tensor | None, workspace: DenseWorkspace) -> None:
    """The hidden state's share of the joint projection, for all positions."""
    assert weights.joint_weight is not None
    assert weights.joint_bias is not None
    assert hidden is not None
    first = 0 if weights.kind == "gated" else 2 * weights.rank
    weight = weights.joint_weight[:, first : first + weights.hidden_size]
    hidden_products(hidden, weight, weights.joint_bias, workspace.products)


def dtype_name(dtype: torch.dtype) -> str:
    """Rounding that a dtype asks of a kernel."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    if dtype not in names:
        raise ValueError(f"the chain's kernels take bfloat16 and float32 tensors, got {dtype}")
    return names[dtype]


def confidence_kind(weights: MarkovWeights, hidden: torch.Tensor | None) -> str:
    """What the confidence head reads."""
    if weights.confidence_weight is None or hidden is None:
        return "none"
    return "hidden" if len(weights.confidence_weight) == hidden.shape[-1] else "hidden+markov"


def pointer(tensor: torch.Tensor | None, placeholder: torch.Tensor) -> torch.Tensor:
    """What a launch gets for an argument that may be absent; a kernel doesn't read the placeholder."""
    return placeholder if tensor is None else tensor


def bytes_of(w2: torch.Tensor) -> torch.Tensor:
    """An 8-bit matrix as bytes, which every Triton version loads; others as they are."""
    return w2.view(torch.uint8) if w2.dtype == FP8 else w2


def packs(base: torch.Tensor, cache: torch.Tensor, scattered: bool) -> bool:
    """Whether four columns can be read and written as one 8-byte word."""
    sizes = (base.shape[-1], *base.stride()[:2], *cache.stride()[:2])
    return (
        not scattered
        and base.dtype == cache.dtype == torch.bfloat16
        and all(size % 4 == 0 for size in sizes)
        and max(base.shape[0] * base.stride(0), cache.shape[0] * cache.stride(0)) < 2**33
        and base.data_ptr() % 8 == cache.data_ptr() % 8 == 0
    )


def _launch_features(
    weights: MarkovWeights,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
    step: int,
) -> None:
    given = partial(pointer, placeholder=workspace.state)
    joint = weights.joint_weight
    assert weights.w1 is not None
    assert joint is not None
    assert hidden is not None
    _features_kernel[(len(requests),)](
        out.tokens, given(out.confidence), requests.anchors, given(requests.cache_rows), weights.w1, joint,
        workspace.products, hidden, given(weights.confidence_weight), given(weights.confidence_bias),
        workspace.features, workspace.state,
        step, out.tokens.shape[1], *hidden.stride()[:2], hidden.shape[-1], joint.stride(0), weights.hidden_size,
        HAS_ROWS=requests.cache_rows is not None, KIND=weights.kind, CONFIDENCE=confidence_kind(weights, hidden),
        FEATURES=dtype_name(weights.w1.dtype),
        RANK=weights.rank, BLOCK_R=triton.next_power_of_2(max(weights.rank, 16)), BLOCK_H=1024,
    )  # fmt: skip


def _launch_chain(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
    first_step: int,
    steps: int,
) -> None:
    given = partial(pointer, placeholder=workspace.state)
    plan, w1 = workspace.plan, weights.w1
    curved = weights.joint_weight is not None
    cache = workspace.logits(base) if out.cache is None else out.cache
    scattered = weights.target_ids is not None and cache.shape[-1] != base.shape[-1]
    few = plan.block_b <= FEW
    own = 0 if few else triton.next_power_of_2(triton.cdiv(plan.block_b, plan.num_parts))
    block_s, block_v = triton.next_power_of_2(steps), triton.next_power_of_2(plan.num_parts)
    threads = 32 * plan.num_warps  # what is polled has a word for every thread
    tensors = (
        base, cache, base if weights.w2 is None else bytes_of(weights.w2), given(weights.w2_scale),
        given(weights.target_ids), requests.temperature, requests.seeds, requests.positions,
        given(requests.cache_rows), given(w1),
    )  # fmt: skip
    outputs = (
        requests.anchors, given(hidden), given(weights.confidence_weight), given(weights.confidence_bias),
        out.tokens, out.lse, given(out.confidence), workspace.words, workspace.winners, workspace.masses,
    )  # fmt: skip
    strides = (0, 0, 0) if hidden is None else (*hidden.stride()[:2], hidden.shape[-1])
    common = {
        "STEPS": steps, "HAS_ROWS": requests.cache_rows is not None, "CONFIDENCE": confidence_kind(weights, hidden),
        "BLOCK_H": 1024, "BLOCK_S": block_s, "BLOCK_V": max(block_v, threads // (own or workspace.polled)),
        "JOIN_V": max(block_v, threads // block_s),
        "W1_BYTES": w1.shape[1] * w1.element_size() if few and w1 is not None and not curved else 0,
        "REDUCED": weights.target_ids is not None, "SCALED": weights.logit_scale != 1.0, "SCATTERED": scattered,
        "CACHE": dtype_name(cache.dtype), "STORED": out.cache is not None, "FP8": weights.w2_scale is not None,
        "RANK": weights.rank, "BLOCK_R": triton.next_power_of_2(max(weights.rank, 16)), "num_warps": plan.num_warps,
        "launch_cooperative_grid": True,
    }  # fmt: skip
    if plan.alone:
        _held_chain_kernel[(plan.num_parts,)](
            *tensors, *outputs, workspace.epochs, base.shape[-1], plan.groups_each, plan.num_parts,
            weights.logit_scale, base.stride(1), *cache.stride()[:2], *strides, GROUPS=plan.tile // GROUP, **common,
        )  # fmt: skip
        return
    _chain_kernel[(plan.num_parts * plan.num_blocks,)](
        *tensors, workspace.features if curved else given(w1), *outputs, workspace.groups, workspace.epochs,
        len(base), first_step, base.shape[1], base.shape[-1], plan.num_spans, plan.num_parts, workspace.groups.shape[1],
        weights.logit_scale, *base.stride()[:2], *cache.stride()[:2], *strides,
        POLLED=workspace.polled, OWN=own, COPIES=threads // plan.block_b,
        WHOLE=base.shape[-1] % (plan.tile * plan.span) == 0, PACKED=packs(base, cache, scattered),
        HAS_HEAD=weights.w2 is not None, GIVEN=curved, BLOCK_B=plan.block_b, TILE=plan.tile, WARPS=plan.wide,
        SPAN=plan.span, FOURS=triton.next_power_of_2(plan.groups_each // 4), HALVES=plan.halves, STAGES=plan.stages,
        HELD=plan.held, FLAT=few and not plan.held and not curved,
        maxnreg=min(65536 // 32 // plan.num_warps // plan.residents, 255),  # so that the residents fit
        **common,
    )  # fmt: skip
