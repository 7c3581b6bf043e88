"""Deferred folding: accepted records stay in the ring, and rollback only moves a cursor.

A slot's ring of R rows holds `held` accepted records from ring row `start` on. A step of at most T tokens records them
behind; accepting a of them makes held + a. The checkpoint is rewritten only in steps that begin with

    held + 2 T > R       or       held + T > 16

The first because a step that does not fold must leave room for the next one. Then held + T <= R always, given R >= 2 T:
a step that folds leaves at most T held, and one that does not leaves at most R - T. The second because the chunk
kernel takes held records and new tokens as one window of 16, while a longer one would go token by token; it holds
where the chunk kernel is used at all, and makes R = T + 16 enough. The decision is taken once, by `plan`, and carried
as a flag: verification and cursor cannot disagree on it.

With R = 2 T every row folds in its next step what it holds: a step then reads a state once and writes it once, by the
verification, and needs no launch that folds. Longer rings write less often, for more records to read.
Source: the ring of ReplaySSM with the fold at the start of the next verification.
"""

import torch

from dspark.kernels import tl, triton
from dspark.kernels.kda import Rows, runs_kernel
from dspark.kernels.kda_chunk import MAX_TOKENS
from dspark.kernels.kda_verify import SERIAL_TOKENS


@triton.jit
def _plan_kernel(
    slots_ptr, record_slots_ptr, num_rows_ptr, cursor_start_ptr, cursor_held_ptr,
    out_slots_ptr, out_start_ptr, out_held_ptr, out_fold_ptr, batch, null_slot, max_held,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = row < batch
    slot = tl.load(slots_ptr + row, mask=own, other=-1).to(tl.int64)
    index = tl.maximum(tl.load(record_slots_ptr + row, mask=own, other=0), 0)
    held = tl.load(cursor_held_ptr + index, mask=own, other=0)
    fold = (held > max_held) & (tl.load(num_rows_ptr + row, mask=own, other=0) > 0)
    tl.store(out_slots_ptr + row, tl.where(slot > null_slot, slot, -1), mask=own)
    tl.store(out_start_ptr + row, tl.load(cursor_start_ptr + index, mask=own, other=0), mask=own)
    tl.store(out_held_ptr + row, held, mask=own)
    tl.store(out_fold_ptr + row, fold, mask=own)


@triton.jit
def _advance_kernel(
    slots_ptr, record_slots_ptr, start_ptr, held_ptr, fold_ptr, accepted_ptr, cursor_start_ptr, cursor_held_ptr,
    batch, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = row < batch
    active = tl.load(slots_ptr + row, mask=own, other=-1) >= 0
    slot = tl.load(record_slots_ptr + row, mask=own, other=0)
    start = tl.load(start_ptr + row, mask=own, other=0)
    held = tl.load(held_ptr + row, mask=own, other=0)
    fold = tl.load(fold_ptr + row, mask=own, other=0) != 0
    accepted = tl.load(accepted_ptr + row, mask=own, other=0)
    tl.store(cursor_start_ptr + slot, (start + tl.where(fold, held, 0)) % capacity, mask=active)
    tl.store(cursor_held_ptr + slot, tl.where(fold, 0, held) + accepted, mask=active)


PLAN_ROWS = 256  # rows of a program


class RingCursor:
    """Cursors of N slots, shared by all layers of a target: they move once a step, not once a layer.

    `start`, `held`: [N + 1] int64, the last for padding rows. `capacity` is R and `window` is T, the most tokens a
        step may have.
    """

    def __init__(self, num_slots: int, capacity: int, window: int, device: torch.device | str = "cpu") -> None:
        """All slots start empty.

        Raises:
            ValueError: the ring can't hold two windows.
        """
        if capacity < 2 * window:
            raise ValueError(
                f"a ring of {capacity} rows is too short for steps of up to {window} tokens: it takes {2 * window}, "
                "one window of accepted records and one of new ones"
            )
        self.capacity, self.window = capacity, window
        self.max_held = capacity - 2 * window  # of a row that does not fold
        if SERIAL_TOKENS < window <= MAX_TOKENS:
            self.max_held = min(self.max_held, MAX_TOKENS - window)
        self._spare = num_slots  # one more than there are: where padding rows write
        self.start = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.held = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def plan(
        self,
        slots: torch.Tensor,
        num_rows: torch.Tensor,
        *,
        record_slots: torch.Tensor | None = None,
        null_slot: int = -1,
        first_token: torch.Tensor | None = None,
    ) -> Rows:
        """The rows of a step: `slots` [B] int64, `num_rows` [B] int64, at most `window`; the rest as in `Rows.current`.

        Nothing changes yet. A row without tokens does not fold: verification passes over it.
        """
        record_slots = slots if record_slots is None else record_slots
        if runs_kernel(slots):
            return self.launch_plan(slots, num_rows, record_slots, null_slot, first_token)
        slots = torch.where(slots > null_slot, slots, -1)
        index = record_slots.clamp_min(0)
        start, held = self.start[index], self.held[index]
        fold = (held > self.max_held) & (num_rows > 0)
        return Rows(slots, record_slots, num_rows, start, held, fold, first_token, self.max_held)

    def launch_plan(
        self,
        slots: torch.Tensor,
        num_rows: torch.Tensor,
        record_slots: torch.Tensor,
        null_slot: int,
        first_token: torch.Tensor | None,
    ) -> Rows:
        """`plan` in one launch, wherever Triton runs."""
        batch = len(slots)
        fresh, start, held = torch.empty(3, batch, dtype=torch.int64, device=slots.device).unbind(0)
        fold = torch.empty(batch, dtype=torch.bool, device=slots.device)
        _plan_kernel[(triton.cdiv(batch, PLAN_ROWS),)](
            slots, record_slots, num_rows, self.start, self.held, fresh, start, held, fold, batch, null_slot,
            self.max_held, BLOCK=PLAN_ROWS,
        )  # fmt: skip
        return Rows(fresh, record_slots, num_rows, start, held, fold, first_token, self.max_held)

    def advance(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Keep the first `num_accepted` [B] new records of each row, 0..num_rows: the rest count as never written.

        Works on device counts without waiting for them.
        """
        if runs_kernel(rows.slots):
            self.launch_advance(rows, num_accepted)
            return
        slots = torch.where(rows.slots >= 0, rows.record_slots, self._spare)
        self.start[slots] = (rows.start + torch.where(rows.fold, rows.held, 0)) % self.capacity
        self.held[slots] = torch.where(rows.fold, 0, rows.held) + num_accepted

    def launch_advance(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """`advance` in one launch, wherever Triton runs."""
        batch = len(rows.slots)
        _advance_kernel[(triton.cdiv(batch, PLAN_ROWS),)](
            rows.slots, rows.record_slots, rows.start, rows.held, rows.fold, num_accepted, self.start, self.held, batch,
            self.capacity, BLOCK=PLAN_ROWS,
        )  # fmt: skip

    def reset(self, slots: torch.Tensor) -> None:
        """Forget the records of `slots` [n]: their checkpoint is current.

        Every way into a slot goes through here, so that no old record is ever folded.
        """
        self.start[slots] = 0
        self.held[slots] = 0
