"""The cursor of the ring: its kernels are its definition, and its rule never lets a ring overflow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kda_cases import DEVICE

from dspark.kernels.kda import Rows
from dspark.kernels.kda_ring import RingCursor

pytestmark = pytest.mark.usefixtures("on_device")


def fields(rows: Rows) -> list[torch.Tensor]:
    return [rows.slots, rows.record_slots, rows.num_rows, rows.start, rows.held, rows.fold]


@given(data=st.data())
def test_kernels_are_the_definition(data):
    """Rows in any order, padding, null slots, records apart from states; every acceptance."""
    window = data.draw(st.integers(1, 9))
    capacity = data.draw(st.integers(2 * window, 4 * window))
    null_slot = data.draw(st.integers(-1, 1))
    plain, launched = RingCursor(6, capacity, window), RingCursor(6, capacity, window, DEVICE)
    for _ in range(data.draw(st.integers(1, 6))):
        slots = torch.tensor(data.draw(st.permutations([2, 3, 4, 5, 0, -1])))
        num_rows = torch.tensor([data.draw(st.integers(0, window)) for _ in slots])
        record_slots = (slots - 2).clamp_min(0) if data.draw(st.booleans()) and null_slot == 1 else slots
        expected = plain.plan(slots.cpu(), num_rows.cpu(), record_slots=record_slots.cpu(), null_slot=null_slot)
        rows = launched.launch_plan(slots, num_rows, record_slots, null_slot, None)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(fields(rows), fields(expected), strict=True))
        accepted = torch.tensor([data.draw(st.integers(0, n)) for n in num_rows.tolist()])
        plain.advance(expected, accepted.cpu())
        launched.launch_advance(rows, accepted)
        assert torch.equal(launched.start[:-1].cpu(), plain.start[:-1])  # the last is where padding rows may write
        assert torch.equal(launched.held[:-1].cpu(), plain.held[:-1])


def test_many_rows_take_several_programs():
    cursor, slots = RingCursor(600, 18, 9, DEVICE), torch.randperm(600)
    cursor.held.copy_(torch.arange(601) % 19)
    rows = cursor.launch_plan(slots, torch.full((600,), 9), slots, -1, None)
    assert torch.equal(rows.held, slots % 19)
    assert torch.equal(rows.fold, slots % 19 > 0)
    cursor.launch_advance(rows, torch.full((600,), 3))
    assert (cursor.held[:600] == 3).all()
    assert torch.equal(cursor.start[:600], torch.arange(600) % 19 % 18)


@pytest.mark.parametrize("capacity", [10, 11, 15, 20])
@pytest.mark.parametrize("accepted", [1, 5, None], ids=["all-rejected", "all-accepted", "mixed"])
def test_a_step_always_finds_room(capacity, accepted):
    """held + T <= R at every step, and what plan decides is what advance does, for ten rings' worth of steps."""
    cursor, generator = RingCursor(1, capacity, 5, DEVICE), torch.Generator().manual_seed(capacity)
    slot, full, held, folds = torch.tensor([0]), torch.tensor([5]), 0, 0
    for _ in range(10 * capacity):
        rows = cursor.plan(slot, full)
        assert int(rows.held) == held <= capacity - 5
        count = accepted or int(torch.randint(0, 6, (), generator=generator, device="cpu"))
        held = count if rows.fold else held + count
        folds += int(rows.fold)
        cursor.advance(rows, torch.tensor([count]))
    assert folds > 0


@pytest.mark.parametrize(
    ("window", "capacity", "held"), [(9, 25, 7), (9, 40, 7), (9, 18, 0), (4, 40, 32), (17, 60, 26)]
)
def test_what_is_held_fits_the_kernel_that_verifies(window, capacity, held):
    """One window of 16 where the chunk kernel runs, the whole ring where tokens go one by one."""
    assert RingCursor(1, capacity, window, DEVICE).max_held == held


def test_a_ring_for_one_window_is_refused():
    with pytest.raises(ValueError, match="a ring of 17 rows is too short for steps of up to 9 tokens: it takes 18"):
        RingCursor(4, 17, 9)
