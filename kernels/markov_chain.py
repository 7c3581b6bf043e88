"""Launching the dense chain: its workspace, and the one public function. How it is cut is `markov_plan`'s.

See `dspark.kernels.markov.chain_ref` for what is computed and `dspark.kernels.markov_dense` for how.
"""

from functools import partial

import torch

from dspark.kernels import triton
from dspark.kernels.markov import FP8, ChainOutput, ChainRequests, MarkovWeights, initial_state
from dspark.kernels.markov_dense import _advance_kernel, _step_kernel
from dspark.kernels.markov_device import MAX_ID
from dspark.kernels.markov_features import hidden_products
from dspark.kernels.markov_held import _held_chain_kernel
from dspark.kernels.markov_persistent import _chain_kernel
from dspark.kernels.markov_plan import DensePlan


class DenseWorkspace:
    """Everything a dense chain needs besides its inputs and outputs, allocated once for one batch size.

    A captured graph may be replayed with the workspace it was captured with. Two chains must not share one at the
    same time.

    Args:
        weights: the head.
        base: [B, K, D] logits before the bias, or a tensor of that shape, dtype and device.
        persistent: one launch for all steps; None takes it where the head and the device allow it.
        num_programs: upper bound of the vocabulary's programs; None takes what the device holds at once.
    """

    def __init__(
        self,
        weights: MarkovWeights,
        base: torch.Tensor,
        *,
        persistent: bool | None = None,
        num_programs: int | None = None,
    ) -> None:
        self.plan = DensePlan.choose(weights, base, persistent, num_programs)
        batch, steps, _ = base.shape
        plan, device = self.plan, base.device
        parts = plan.num_parts
        rows = batch if not plan.persistent else plan.block_b * plan.num_blocks

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.words = zeros(2 if plan.persistent else 1, parts, rows, dtype=torch.int64)
        if plan.persistent:
            self.masses = zeros(steps, parts, rows, dtype=torch.int64)
        else:
            self.masses = zeros(parts, rows, dtype=torch.float32)
        programs = parts * plan.num_blocks
        self.epochs = torch.ones(programs, dtype=torch.int32, device=device)
        self.scratch = zeros(programs, plan.block_b, dtype=torch.int32)
        rank = max(weights.rank, 1)
        dtype = base.dtype if weights.w1 is None else weights.w1.dtype
        self.features = zeros(batch, rank, dtype=dtype)
        self.state = zeros(batch, rank, dtype=torch.float32)
        needs_products = weights.joint_weight is not None
        self.products = zeros(batch, steps, 3 * rank, dtype=torch.float32) if needs_products else self.state
        self.shape = tuple(base.shape)


def dense_chain(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
) -> None:
    """Draft K tokens for each request over the whole draft vocabulary; fills `out`.

    No host synchronisation and no allocation: a CUDA graph can capture it after one call that compiles the kernels.

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
    plan = workspace.plan
    if plan.persistent:
        _launch_persistent(weights, base, hidden, requests, out, workspace)
        return
    state = initial_state(weights, requests)
    if state is not None:
        workspace.state.copy_(state)
    if weights.joint_weight is not None:
        _project_hidden(weights, hidden, workspace)
    for step in range(base.shape[1] + 1):
        _launch_advance(weights, hidden, requests, out, workspace, step)
        if step < base.shape[1]:
            _launch_step(weights, base, requests, out, workspace, step)


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


def _race_arguments(weights: MarkovWeights, base: torch.Tensor, out: ChainOutput, plan: DensePlan) -> dict[str, object]:
    """Compile-time arguments of a race."""
    stored = base if out.cache is None else out.cache
    scattered = weights.target_ids is not None and stored.shape[-1] != base.shape[-1]
    return {
        "REDUCED": weights.target_ids is not None,
        "WHOLE": base.shape[-1] % (4 * plan.block_g) == 0,
        "SCALED": weights.logit_scale != 1.0,
        "SCATTERED": scattered,
        "PACKED": packs(base, stored, scattered),
        "CACHE": dtype_name(stored.dtype),
        "STORED": out.cache is not None,
        "HAS_HEAD": weights.w2 is not None,
        "FP8": weights.w2_scale is not None,
        "RANK": weights.rank,
        "BLOCK_R": triton.next_power_of_2(max(weights.rank, 16)),
        "BLOCK_B": plan.block_b,
        "BLOCK_G": plan.block_g,
        "STRIDE": plan.stride,
        "STAGES": plan.stages,
        "num_warps": plan.num_warps,
        "maxnreg": 65536 // 32 // plan.num_warps // plan.residents,  # so that the residents fit
    }


def _race_tensors(
    weights: MarkovWeights, base: torch.Tensor, requests: ChainRequests, out: ChainOutput
) -> tuple[torch.Tensor, ...]:
    """Tensors every race reads; `base` stands in for those a variant doesn't have."""
    return (
        base, base if out.cache is None else out.cache,
        base if weights.w2 is None else bytes_of(weights.w2),
        base if weights.w2_scale is None else weights.w2_scale,
        base if weights.target_ids is None else weights.target_ids,
        requests.temperature, requests.seeds, requests.positions,
        base if requests.cache_rows is None else requests.cache_rows,
    )  # fmt: skip


def _launch_step(
    weights: MarkovWeights,
    base: torch.Tensor,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
    step: int,
) -> None:
    plan = workspace.plan
    _step_kernel[(plan.num_parts, plan.num_blocks)](
        *_race_tensors(weights, base, requests, out),
        workspace.features, workspace.words, workspace.masses,
        len(base), step, base.shape[-1], plan.num_tiles, plan.num_parts,
        *base.stride()[:2], *(base if out.cache is None else out.cache).stride()[:2], weights.logit_scale,
        HAS_ROWS=requests.cache_rows is not None,
        **_race_arguments(weights, base, out, plan),
    )  # fmt: skip


def _launch_advance(
    weights: MarkovWeights,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
    step: int,
) -> None:
    given = partial(pointer, placeholder=workspace.state)
    joint, plan = weights.joint_weight, workspace.plan
    _advance_kernel[(len(requests),)](
        workspace.words, workspace.masses, out.tokens, out.lse, given(out.confidence), requests.anchors,
        requests.temperature, given(requests.cache_rows), given(weights.w1), given(joint), workspace.products,
        given(hidden), given(weights.confidence_weight), given(weights.confidence_bias),
        workspace.features, workspace.state,
        len(requests), step, plan.num_parts,
        *((0, 0, 0) if hidden is None else (*hidden.stride()[:2], hidden.shape[-1])),
        0 if joint is None else joint.stride(0), weights.hidden_size,
        STEPS=out.tokens.shape[1], HAS_ROWS=requests.cache_rows is not None, KIND=weights.kind,
        CONFIDENCE=confidence_kind(weights, hidden),
        FEATURES="fp32" if weights.w1 is None else dtype_name(weights.w1.dtype),
        RANK=weights.rank, BLOCK_R=triton.next_power_of_2(max(weights.rank, 16)), BLOCK_H=1024,
        BLOCK_V=triton.next_power_of_2(plan.num_parts),
    )  # fmt: skip


def _launch_persistent(
    weights: MarkovWeights,
    base: torch.Tensor,
    hidden: torch.Tensor | None,
    requests: ChainRequests,
    out: ChainOutput,
    workspace: DenseWorkspace,
) -> None:
    given = partial(pointer, placeholder=workspace.state)
    plan = workspace.plan
    race = _race_arguments(weights, base, out, plan)
    tensors = (
        *_race_tensors(weights, base, requests, out),
        given(weights.w1), requests.anchors, given(hidden), given(weights.confidence_weight),
        given(weights.confidence_bias), out.tokens, out.lse, given(out.confidence),
        workspace.words, workspace.masses, workspace.epochs, workspace.scratch,
    )  # fmt: skip
    sizes = (
        *base.stride()[:2], *(base if out.cache is None else out.cache).stride()[:2], weights.logit_scale,
        *((0, 0, 0) if hidden is None else (*hidden.stride()[:2], hidden.shape[-1])),
    )  # fmt: skip
    common = {
        "STEPS": base.shape[1],
        "HAS_ROWS": requests.cache_rows is not None,
        "CONFIDENCE": confidence_kind(weights, hidden),
        "BLOCK_H": 1024,
        "BLOCK_S": triton.next_power_of_2(base.shape[1]),
        "BLOCK_V": triton.next_power_of_2(plan.num_parts),
        "launch_cooperative_grid": True,
    }
    if plan.held and len(base) == 1:
        unused = ("WHOLE", "PACKED", "HAS_HEAD", "BLOCK_G", "STRIDE", "STAGES")
        _held_chain_kernel[(plan.num_parts,)](
            *tensors, len(base), base.shape[-1], plan.num_parts, *sizes,
            HELD=triton.next_power_of_2(triton.cdiv(base.shape[-1], plan.num_parts)),
            **common, **{name: value for name, value in race.items() if name not in unused},
        )  # fmt: skip
    else:
        _chain_kernel[(plan.num_parts * plan.num_blocks,)](
            *tensors, len(base), base.shape[-1], plan.num_tiles, plan.num_parts, *sizes,
            POLLED_ROWS=plan.block_b, HELD=plan.held, FLAT=plan.block_b <= 16 and not plan.held, **common, **race,
        )  # fmt: skip
