"""Between vLLM's request slots and the rows of a step, in one launch each way.

vLLM keeps a request's state under a slot, and its step buffers flat: K sampling rows a request, of which the first
says where the request stands. The chain takes one entry a request. Gathering them by torch operations is a dozen small
kernels in every step; the functions here are one, with the same operations as the definition on other devices.
"""

from dataclasses import dataclass

import torch

from dspark.kernels import HAS_TRITON, tl, triton
from dspark.schedule import STEP_STRIDE, step_positions

BLOCK = 128
_STEP_STRIDE = tl.constexpr(STEP_STRIDE)


@dataclass(frozen=True)
class StepBuffers:
    """vLLM's buffers of a step; only the first `num_reqs` requests' entries are of this step.

    Attributes:
        input_ids: [T] of the query rows, any integer type; each request's first is its anchor.
        rows: query rows a request.
        slots: [N K] int64, slot of each sampling row, -1 for padding.
        positions: [N K] int64, absolute position of each drafted token.
        steps: K.
        temperature: [slots] float32.
        seeds: [slots] int64.
    """

    input_ids: torch.Tensor
    rows: int
    slots: torch.Tensor
    positions: torch.Tensor
    steps: int
    temperature: torch.Tensor
    seeds: torch.Tensor


@dataclass(frozen=True)
class StepRows:
    """One entry a request: [R] each; padding has slot -1 and temperature 0.

    Attributes:
        anchors: int64 target ids.
        slots: int64.
        positions: int64, by which draft 0 looks up its noise: its own, or that of `dspark.schedule.step_positions`.
        seeds: int64.
        temperature: float32.
    """

    anchors: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor


@triton.jit
def _gather_kernel(  # noqa: PLR0913
    input_ids_ptr, slots_ptr, positions_ptr, temperature_ptr, seeds_ptr,
    anchor_out, slot_out, position_out, seed_out, temperature_out,
    num_reqs, rows, steps, GREEDY: tl.constexpr, STEP_NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    slot = tl.load(slots_ptr + request * steps, mask=inside, other=-1)
    position = tl.load(positions_ptr + request * steps, mask=inside, other=0)
    live = slot >= 0
    seed = tl.load(seeds_ptr + slot, mask=live, other=0)
    temperature = tl.zeros([BLOCK], tl.float32)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    if STEP_NOISE:
        position = (position - 1) * _STEP_STRIDE
    anchor = tl.load(input_ids_ptr + request * rows, mask=inside, other=0)
    tl.store(anchor_out + request, anchor.to(tl.int64), mask=inside)
    tl.store(slot_out + request, slot, mask=inside)
    tl.store(position_out + request, position, mask=inside)
    tl.store(seed_out + request, seed, mask=inside)
    tl.store(temperature_out + request, temperature, mask=inside)


@triton.jit
def _scatter_kernel(slots_ptr, source_ptr, target_ptr, width, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if slot >= 0:
        kept = column < width
        row = tl.load(source_ptr + request * width + column, mask=kept)
        tl.store(target_ptr + slot * width + column, row, mask=kept)


def gather_rows(buffers: StepBuffers, num_reqs: int, *, greedy: bool, step_noise: bool) -> StepRows:
    """One entry for each of R requests.

    Args:
        buffers: vLLM's.
        num_reqs: R, graph padding included.
        greedy: all temperatures are 0.
        step_noise: drafts have noise of this step alone (`dspark.schedule.step_positions`).
    """
    if not (HAS_TRITON and buffers.slots.device.type == "cuda"):
        return gather_rows_ref(buffers, num_reqs, greedy=greedy, step_noise=step_noise)
    return launch_gather(buffers, num_reqs, greedy=greedy, step_noise=step_noise)


def launch_gather(buffers: StepBuffers, num_reqs: int, *, greedy: bool, step_noise: bool) -> StepRows:
    """The kernel of `gather_rows`."""
    device = buffers.slots.device
    integers = [torch.empty(num_reqs, dtype=torch.int64, device=device) for _ in range(4)]
    out = StepRows(*integers, torch.empty(num_reqs, dtype=torch.float32, device=device))
    _gather_kernel[(triton.cdiv(num_reqs, BLOCK),)](
        buffers.input_ids, buffers.slots, buffers.positions, buffers.temperature, buffers.seeds,
        out.anchors, out.slots, out.positions, out.seeds, out.temperature, num_reqs, buffers.rows, buffers.steps,
        GREEDY=greedy, STEP_NOISE=step_noise, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def gather_rows_ref(buffers: StepBuffers, num_reqs: int, *, greedy: bool, step_noise: bool) -> StepRows:
    """The definition of `gather_rows`, in PyTorch."""
    slots = buffers.slots[: num_reqs * buffers.steps : buffers.steps]
    positions = buffers.positions[: num_reqs * buffers.steps : buffers.steps]
    live, known = slots >= 0, slots.clamp_min(0)
    if step_noise:
        positions = step_positions(positions - 1, 1)[:, 0]
    temperature = buffers.temperature[known].masked_fill(~live, 0.0)
    return StepRows(
        anchors=buffers.input_ids[: num_reqs * buffers.rows : buffers.rows].long(),
        slots=slots.contiguous(),
        positions=positions.contiguous(),
        seeds=buffers.seeds[known].masked_fill(~live, 0),
        temperature=torch.zeros_like(temperature) if greedy else temperature,
    )


def scatter_rows(slots: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Put a step's rows under their slots.

    Args:
        slots: [R] int64; rows of slot -1 are left out.
        source: [R, ...] contiguous.
        target: [slots, ...] contiguous, of the same type and trailing shape; changed in place.
    """
    if not (HAS_TRITON and slots.device.type == "cuda"):
        live = slots >= 0
        target[slots[live]] = source[live]
        return
    launch_scatter(slots, source, target)


def launch_scatter(slots: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """The kernel of `scatter_rows`."""
    width = source[0].numel()
    _scatter_kernel[(len(slots), triton.cdiv(width, 1024))](slots, source, target, width, BLOCK=1024)
