"""Deferred folding: accepted records stay in the ring, and rollback only moves a cursor.

A slot's ring of R rows holds `held` accepted records from ring row `start` on. A step of at most T tokens records them
behind; accepting a of them makes held + a. The checkpoint is rewritten only in steps that begin with

    held + 2 T > R

because a step that does not fold must leave room for the next one. Then held + T <= R always, given R >= 2 T: a step
that folds leaves at most T held, and one that does not leaves at most R - T. The decision is taken once, by `plan`,
and carried as a flag: verification and cursor cannot disagree on it.
Source: the ring of ReplaySSM with the fold at the start of the next verification.
"""

import torch

from dspark.kernels.kda import Rows


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
        slots = torch.where(slots > null_slot, slots, -1)
        index = record_slots.clamp_min(0)
        start, held = self.start[index], self.held[index]
        fold = (held + 2 * self.window > self.capacity) & (num_rows > 0)
        return Rows(slots, record_slots, num_rows, start, held, fold, first_token)

    def advance(self, rows: Rows, num_accepted: torch.Tensor) -> None:
        """Keep the first `num_accepted` [B] new records of each row, 0..num_rows: the rest count as never written.

        Works on device counts without waiting for them.
        """
        slots = torch.where(rows.slots >= 0, rows.record_slots, self._spare)
        self.start[slots] = (rows.start + torch.where(rows.fold, rows.held, 0)) % self.capacity
        self.held[slots] = torch.where(rows.fold, 0, rows.held) + num_accepted

    def reset(self, slots: torch.Tensor) -> None:
        """Forget the records of `slots` [n]: their checkpoint is current.

        Every way into a slot goes through here, so that no old record is ever folded.
        """
        self.start[slots] = 0
        self.held[slots] = 0
