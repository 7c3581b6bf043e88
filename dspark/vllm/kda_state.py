"""What vLLM says about a step of speculative decoding, as the rows of the KDA kernels: no vLLM in here, only tensors.

vLLM packs the tokens of a step one request behind the other; request b has tokens query_start_loc[b] ..
query_start_loc[b + 1] - 1 and its state in block state_indices[b]. Block 0 is the null block: rows of a padded CUDA
graph point at it. Records of a step lie by row, not by block, since nothing but the commit of the same step reads them.

With prefix caching ("align" mode) a block holds the state after a whole number of blocks of tokens, and the running
state moves from block to block: a step reads the block that its last token lies in, and what it keeps ends in the block
of the last kept token, which may be the one before. If the kept tokens reach the end of a block, the state there is
stored as well.

The counts stay on the device and nothing waits for them. `verify_rows_ref` and `commit_plan_ref` are the definitions;
on a device each is one small launch a step, for all layers.
Source: vLLM 0.33.0, models/kimi_k3/nvidia/kda_metadata.py and v1/worker/gpu/model_states/mamba_hybrid.py.
"""

from dataclasses import dataclass

import torch

from dspark.kernels import tl, triton
from dspark.kernels.kda import Rows, runs_kernel
from dspark.kernels.kda_commit import Boundary, block_boundary

NULL_BLOCK = 0


@dataclass(frozen=True)
class AlignedBlocks:
    """Where states go with prefix caching.

    `block_table` [requests, blocks] int32, `num_computed` [requests] int32: tokens of each request before the step;
    `block_size`: tokens of a block.
    """

    block_table: torch.Tensor
    num_computed: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class CommitPlan:
    """Arguments of `kda_commit` for a step."""

    rows: Rows
    num_records: torch.Tensor
    destinations: torch.Tensor
    boundary: Boundary | None


def verify_rows_ref(state_indices: torch.Tensor, query_start_loc: torch.Tensor) -> Rows:
    """The definition, in PyTorch. Same contract as `StepRows.verify`."""
    slots, starts = state_indices.long(), query_start_loc.long()
    count, zero = len(slots), torch.zeros_like(slots)
    return Rows(
        slots=torch.where(slots > NULL_BLOCK, slots, -1),
        record_slots=torch.arange(count, device=slots.device),
        num_rows=starts[1:] - starts[:-1],
        start=zero,
        held=zero,
        fold=zero.bool(),
        first_token=starts[:-1],
    )


def commit_plan_ref(
    num_accepted: torch.Tensor,
    state_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    request_indices: torch.Tensor | None = None,
    blocks: AlignedBlocks | None = None,
) -> CommitPlan:
    """The definition, in PyTorch. Same contract as `StepRows.commit`."""
    rows = verify_rows_ref(state_indices, query_start_loc)
    requests = rows.record_slots if request_indices is None else request_indices[: len(rows.slots)].long()
    counts = torch.minimum(num_accepted.long()[requests].clamp_min(0), rows.num_rows)
    counts = torch.where(rows.slots >= 0, counts, 0)
    if blocks is None:
        return CommitPlan(rows, counts, torch.where(counts > 0, rows.slots, -1), None)
    size, width = blocks.block_size, blocks.block_table.shape[1]
    computed = blocks.num_computed.long()[requests]

    def slot_of(position: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        slot = blocks.block_table.long()[requests, (position // size).clamp(0, width - 1)]
        return torch.where(wanted & (slot > NULL_BLOCK), slot, -1)

    destinations = slot_of((computed + counts - 1).clamp_min(0), counts > 0)
    boundary = block_boundary(computed, counts, slot_of(computed, counts > 0), size)
    return CommitPlan(rows, counts, destinations, boundary)


# The number of rows and their spacing change from step to step; a launch must not compile for them.
@triton.jit(do_not_specialize=["count", "stride"])
def _verify_rows_kernel(
    state_indices_ptr, starts_ptr, slots_ptr, num_rows_ptr, first_ptr, count, stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = row < count
    slot = tl.load(state_indices_ptr + row * stride, mask=known, other=0).to(tl.int64)
    first = tl.load(starts_ptr + row, mask=known, other=0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1, mask=known, other=0).to(tl.int64)
    tl.store(slots_ptr + row, tl.where(slot > 0, slot, -1), mask=known)
    tl.store(num_rows_ptr + row, end - first, mask=known)
    tl.store(first_ptr + row, first, mask=known)


@triton.jit
def _slot_of(table_ptr, request, position, wanted, row_stride, column_stride, block_size, width):
    """Slot of the block that a position lies in; -1 where it is not wanted or null."""
    column = tl.minimum(tl.maximum(position, 0) // block_size, width - 1)
    slot = tl.load(table_ptr + request * row_stride + column * column_stride, mask=wanted, other=0).to(tl.int64)
    return tl.where(slot > 0, slot, -1)


@triton.jit(do_not_specialize=["count", "state_stride", "row_stride", "column_stride", "block_size", "width"])
def _commit_plan_kernel(  # noqa: PLR0913 (pointers, sizes and strides)
    accepted_ptr, state_indices_ptr, starts_ptr, requests_ptr, table_ptr, computed_ptr,
    slots_ptr, counts_ptr, into_ptr, boundary_ptr, distance_ptr,
    count, state_stride, row_stride, column_stride, block_size, width,
    HAS_REQUESTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = row < count
    request = row.to(tl.int64)
    if HAS_REQUESTS:
        request = tl.load(requests_ptr + row, mask=known, other=0).to(tl.int64)
    slot = tl.load(state_indices_ptr + row * state_stride, mask=known, other=0).to(tl.int64)
    first = tl.load(starts_ptr + row, mask=known, other=0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1, mask=known, other=0).to(tl.int64)
    kept = tl.load(accepted_ptr + request, mask=known, other=0).to(tl.int64)
    kept = tl.where(slot > 0, tl.minimum(tl.maximum(kept, 0), end - first), 0)
    slot = tl.where(slot > 0, slot, -1)
    keeps = known & (kept > 0)
    into = tl.where(keeps, slot, -1)
    if ALIGNED:
        computed = tl.load(computed_ptr + request, mask=known, other=0).to(tl.int64)
        distance = block_size - computed % block_size
        into = _slot_of(table_ptr, request, computed + kept - 1, keeps, row_stride, column_stride, block_size, width)
        crosses = keeps & (kept >= distance)
        boundary = _slot_of(table_ptr, request, computed, crosses, row_stride, column_stride, block_size, width)
        tl.store(boundary_ptr + row, boundary, mask=known)
        tl.store(distance_ptr + row, distance, mask=known)
    tl.store(slots_ptr + row, slot, mask=known)
    tl.store(counts_ptr + row, kept, mask=known)
    tl.store(into_ptr + row, into, mask=known)


BLOCK_ROWS = 128  # rows of a program


class StepRows:
    """Rows of the steps of one group of layers, in memory that stays where it is: a CUDA graph reads it at replay.

    `verify` fills one half before the forward pass and outside of the graph, `commit` the other after sampling.
    """

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        """`max_rows`: most requests of a step."""
        self.max_rows = max_rows
        self._verify = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._commit = torch.zeros(5, max_rows, dtype=torch.int64, device=device)
        self._own = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._zero = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._never = torch.zeros(max_rows, dtype=torch.bool, device=device)

    def _rows(self, slots: torch.Tensor, num_rows: torch.Tensor, first: torch.Tensor | None) -> Rows:
        count = len(slots)
        zero = self._zero[:count]
        return Rows(slots, self._own[:count], num_rows, zero, zero, self._never[:count], first)

    def _check(self, count: int, query_start_loc: torch.Tensor) -> None:
        if count > self.max_rows or len(query_start_loc) != count + 1:
            raise ValueError(
                f"{count} rows with {len(query_start_loc)} query boundaries do not fit: there is room for "
                f"{self.max_rows} rows (max_num_seqs), and each step has one boundary more than rows"
            )

    def verify(self, state_indices: torch.Tensor, query_start_loc: torch.Tensor) -> Rows:
        """The rows of a verification.

        Args:
            state_indices: [B] int32, any stride: block of each row's state; the null block makes a padding row.
            query_start_loc: [B + 1] int32, contiguous: first token of each row, and the end.

        Returns:
            Rows without held records, record slot = row, packed tokens. Overwritten by the next call.

        Raises:
            ValueError: more rows than there is room for, or another number of boundaries.

        Source: `verify_rows_ref`.
        """
        count = len(state_indices)
        self._check(count, query_start_loc)
        slots, num_rows, first = (x[:count] for x in self._verify)
        if runs_kernel(state_indices):
            self.launch_verify(state_indices, query_start_loc)
        else:
            reference = verify_rows_ref(state_indices, query_start_loc)
            slots.copy_(reference.slots), num_rows.copy_(reference.num_rows), first.copy_(reference.first_token)
        return self._rows(slots, num_rows, first)

    def launch_verify(self, state_indices: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Fill the buffers by the kernel, wherever Triton runs."""
        count = len(state_indices)
        _verify_rows_kernel[(triton.cdiv(count, BLOCK_ROWS),)](
            state_indices, query_start_loc, *self._verify, count, state_indices.stride(0), BLOCK=BLOCK_ROWS
        )

    def commit(
        self,
        num_accepted: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None = None,
        blocks: AlignedBlocks | None = None,
    ) -> CommitPlan:
        """What a step keeps, and where it goes.

        Args:
            num_accepted: [requests] int32: tokens of its window that each request of the batch keeps, anchor included.
                Below 0 counts as 0, and above the window as all of it.
            state_indices: [B] int32, as for the verification of the same step.
            query_start_loc: [B + 1] int32, likewise.
            request_indices: [at least B] int32: request of each row; None where row b is request b.
            blocks: with prefix caching, where states go.

        Returns:
            A plan in which a row that keeps nothing writes nothing. Overwritten by the next call.

        Source: `commit_plan_ref`.
        """
        count = len(state_indices)
        self._check(count, query_start_loc)
        slots, counts, into, boundary, distance = (x[:count] for x in self._commit)
        if runs_kernel(state_indices):
            self.launch_commit(num_accepted, state_indices, query_start_loc, request_indices, blocks)
        else:
            plan = commit_plan_ref(num_accepted, state_indices, query_start_loc, request_indices, blocks)
            slots.copy_(plan.rows.slots), counts.copy_(plan.num_records), into.copy_(plan.destinations)
            if plan.boundary is not None:
                boundary.copy_(plan.boundary.slots), distance.copy_(plan.boundary.num_records)
        rows = self._rows(slots, counts, None)
        return CommitPlan(rows, counts, into, None if blocks is None else Boundary(boundary, distance))

    def launch_commit(
        self,
        num_accepted: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None,
        blocks: AlignedBlocks | None,
    ) -> None:
        """Fill the buffers by the kernel, wherever Triton runs."""
        count, unused = len(state_indices), state_indices
        _commit_plan_kernel[(triton.cdiv(count, BLOCK_ROWS),)](
            num_accepted,
            state_indices,
            query_start_loc,
            unused if request_indices is None else request_indices,
            unused if blocks is None else blocks.block_table,
            unused if blocks is None else blocks.num_computed,
            *self._commit,
            count,
            state_indices.stride(0),
            *(
                (0, 0, 1, 1)
                if blocks is None
                else (*blocks.block_table.stride(), blocks.block_size, blocks.block_table.shape[1])
            ),
            HAS_REQUESTS=request_indices is not None,
            ALIGNED=blocks is not None,
            BLOCK=BLOCK_ROWS,
        )
