"""The commit kernel against its reference: counts, gates, dims, layouts, boundaries, padding."""

import pytest
import torch
from kda_cases import BOUNDED, KERNEL_ERROR, SOFTPLUS, close, draw, random_layer

from dspark.kernels.kda import Gate, KDALayer, LayerTable, Records, Rows
from dspark.kernels.kda_commit import (
    Boundary,
    block_boundary,
    check_block_size,
    kda_commit,
    kda_commit_ref,
    launch_kda_commit,
)

pytestmark = pytest.mark.usefixtures("on_device")
IMPLEMENTATIONS = pytest.mark.parametrize("commit", [kda_commit_ref, launch_kda_commit], ids=["reference", "kernel"])


def filled(layer, seed=0):
    for number, store in enumerate(vars(layer.records).values()):
        store.copy_(draw(*store.shape, seed=3 * seed + number))
    return layer


def copied(layers):
    return [KDALayer(layer.checkpoint.clone(), layer.records, layer.gate) for layer in layers]


def rows_of(slots, start=0):
    slots = torch.tensor(slots)
    at = torch.full_like(slots, start)
    return Rows(slots, slots, at * 0, at, at * 0, (at * 0).bool())


def run(commit, layers, rows, counts, destinations=None, boundary=None):
    layers = LayerTable(layers) if commit is launch_kda_commit else layers
    commit(layers, rows, torch.tensor(counts), rows.slots if destinations is None else destinations, boundary)


CASES = [
    pytest.param({"key_dim": 16, "value_dim": 16, "capacity": 9}, id="one-tile"),
    pytest.param({"key_dim": 12, "value_dim": 20, "capacity": 10}, id="dims-not-powers-of-two"),
    pytest.param({"key_dim": 32, "value_dim": 130, "capacity": 18}, id="three-value-tiles"),
    pytest.param({"key_dim": 16, "value_dim": 16, "capacity": 9, "lower_bound": SOFTPLUS}, id="softplus"),
    pytest.param({"key_dim": 16, "value_dim": 16, "capacity": 9, "with_rate": False}, id="no-rate"),
    pytest.param({"key_dim": 16, "value_dim": 16, "capacity": 9, "state_dtype": torch.bfloat16}, id="bfloat16-state"),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("start", [0, 5], ids=["from-row-0", "wrapping"])
def test_kernel_matches_reference(case, start):
    layers = [filled(random_layer(5, 2, seed=i, dtype=torch.float32, **case), seed=i) for i in range(2)]
    rows = rows_of([3, 0, -1, 2, 4], start)
    counts = [0, 1, 4, case["capacity"], 5]
    expected, got = copied(layers), copied(layers)
    run(kda_commit_ref, expected, rows, counts)
    run(launch_kda_commit, got, rows, counts)
    bound = 4e-3 if "state_dtype" in case else KERNEL_ERROR  # one rounding of a bfloat16 state
    for a, b, old in zip(got, expected, layers, strict=True):
        close(a.checkpoint, b.checkpoint, bound)
        for untouched in (1, 3):  # no row, and a row that accepted nothing
            assert torch.equal(a.checkpoint[untouched], old.checkpoint[untouched])


@IMPLEMENTATIONS
def test_boundary_and_final_state_come_from_one_read(commit):
    """Short of the boundary, on it (one block for both), and past it, with the final state moving to another block."""
    layers = [filled(random_layer(9, 2, 8, 8, 9, seed=i, dtype=torch.float32)) for i in range(2)]
    rows = rows_of([0, 1, 2])
    into, at = torch.tensor([0, 3, 4]), torch.tensor([-1, 3, 5])
    got = copied(layers)
    run(commit, got, rows, [2, 4, 6], into, Boundary(at, torch.tensor([0, 4, 3])))
    for layer, result in zip(layers, got, strict=True):
        for slot, count, where in [(0, 2, 0), (1, 4, 3), (2, 6, 4), (2, 3, 5)]:
            exact = copied([layer])
            run(kda_commit_ref, exact, rows_of([slot]), [count])
            close(result.checkpoint[where], exact[0].checkpoint[slot], KERNEL_ERROR)
        for untouched in (1, 2, 6, 7, 8):
            assert torch.equal(result.checkpoint[untouched], layer.checkpoint[untouched])


@IMPLEMENTATIONS
def test_records_beyond_the_count_are_never_read(commit):
    layer = filled(random_layer(2, 2, 8, 8, 9, dtype=torch.float32))
    clean, poisoned = copied([layer]), copied([layer])
    run(commit, clean, rows_of([1], 7), [4])
    for store in vars(layer.records).values():
        store[0] = float("nan")
        store[1, :, 2:7] = float("nan")  # rows 7, 8, 0, 1 count
    run(commit, poisoned, rows_of([1], 7), [4])
    assert torch.equal(poisoned[0].checkpoint, clean[0].checkpoint)


def test_a_row_is_bitwise_independent_of_the_batch_around_it():
    layer = filled(random_layer(6, 2, 8, 8, 9, dtype=torch.float32))
    alone, batched = copied([layer]), copied([layer])
    run(launch_kda_commit, alone, rows_of([2]), [5])
    run(launch_kda_commit, batched, rows_of([4, -1, 5, 2, 0]), [1, 3, 9, 5, 0])
    assert torch.equal(alone[0].checkpoint[2], batched[0].checkpoint[2])


@IMPLEMENTATIONS
def test_pools_may_be_padded_between_slots_and_lie_anywhere(commit):
    """Slots of one state are spaced as pages are, and the layers are views into one larger allocation."""
    layer = filled(random_layer(3, 2, 8, 8, 9, dtype=torch.float32))
    pages = torch.full((2, 3, 2 * 8 * 8 + 40), float("nan"))
    padded = []
    for page in pages:
        state = page[:, : 2 * 8 * 8].view(3, 2, 8, 8)
        state.copy_(layer.checkpoint)
        padded.append(KDALayer(state, layer.records, layer.gate))
    expected = copied([layer])
    run(kda_commit_ref, expected, rows_of([2, 0]), [3, 9])
    run(commit, padded, rows_of([2, 0]), [3, 9])
    for result in padded:
        close(result.checkpoint, expected[0].checkpoint, KERNEL_ERROR)
    assert pages[:, :, 2 * 8 * 8 :].isnan().all()


@IMPLEMENTATIONS
def test_nothing_accepted_leaves_every_bit(commit):
    """Minus zero too, which a multiplication by one and an addition of zero would turn."""
    layer = filled(random_layer(1, 1, 8, 8, 9, dtype=torch.float32))
    layer.checkpoint.fill_(-0.0)
    run(commit, [layer], rows_of([0]), [0])
    assert torch.signbit(layer.checkpoint).all()


@IMPLEMENTATIONS
def test_rows_may_be_reordered_between_verification_and_commit(commit):
    layer = filled(random_layer(4, 2, 8, 8, 9, dtype=torch.float32))
    first, second = copied([layer]), copied([layer])
    run(commit, first, rows_of([3, 0, 2]), [1, 5, 9])
    run(commit, second, rows_of([2, 3, 0]), [9, 1, 5])
    close(second[0].checkpoint, first[0].checkpoint, 1e-7)


def test_a_pool_may_be_longer_than_2_to_the_31():
    """Address space alone: only a few pages are touched. Neither slot nor stride is large, their product is."""
    layer = filled(random_layer(3, 1, 8, 8, 9, dtype=torch.float32, state_dtype=torch.bfloat16))
    far = torch.empty_strided((3, 1, 8, 8), (2**30 + 64, 64, 8, 1), dtype=torch.bfloat16)
    far.copy_(layer.checkpoint)
    got, expected = KDALayer(far, layer.records, layer.gate), copied([layer])
    run(launch_kda_commit, [got], rows_of([2]), [7])
    run(kda_commit_ref, expected, rows_of([2]), [7])
    close(far, expected[0].checkpoint, 4e-3)
    assert torch.equal(far[0], layer.checkpoint[0])


@pytest.mark.parametrize("computed", range(8, 16))
def test_block_boundaries_for_every_residue_and_acceptance(computed):
    counts = torch.arange(6)
    found = block_boundary(torch.full((6,), computed), counts, torch.full((6,), 3), block_size=8)
    for count, slot, records in zip(counts.tolist(), found.slots.tolist(), found.num_records.tolist(), strict=True):
        crossed = computed + count >= 16
        assert slot == (3 if crossed else -1)
        assert not crossed or computed + records == 16


def test_blocks_smaller_than_a_step_are_refused():
    with pytest.raises(ValueError, match="block_size=4 is smaller than a step of 5"):
        check_block_size(4, window=5)
    check_block_size(5, window=5)


@pytest.mark.parametrize("form", [-10.0, SOFTPLUS, BOUNDED])
@pytest.mark.parametrize("raw", [-60.0, 0.0, 60.0])
@IMPLEMENTATIONS
def test_extreme_gates_stay_finite(commit, raw, form):
    """No decay at all, and states forgotten within a token: every exponential is of a number below zero."""
    layer = filled(random_layer(1, 1, 8, 8, 16, dtype=torch.float32, lower_bound=form))
    layer = KDALayer(layer.checkpoint, layer.records, Gate(torch.tensor([1.0]), torch.zeros(1, 8), form))
    layer.records.gate.fill_(raw)
    got, exact = copied([layer]), copied([layer])
    run(commit, got, rows_of([0]), [16])
    records = Records(*(store.double() for store in vars(layer.records).values()))
    exact = [KDALayer(layer.checkpoint.double(), records, layer.gate)]
    run(kda_commit_ref, exact, rows_of([0]), [16])
    close(got[0].checkpoint, exact[0].checkpoint, KERNEL_ERROR)


def test_layers_that_one_launch_cannot_serve_are_named():
    layer = random_layer(2, 2, 8, 8, 9)
    with pytest.raises(ValueError, match="layer 1 differs from layer 0"):
        kda_commit([layer, random_layer(2, 2, 8, 6, 9)], rows_of([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="layer 1 differs from layer 0"):
        kda_commit([layer, random_layer(2, 2, 8, 8, 9, lower_bound=SOFTPLUS)], rows_of([0]), torch.tensor([1]))
    turned = KDALayer(layer.checkpoint.transpose(2, 3), layer.records, layer.gate)
    with pytest.raises(ValueError, match="checkpoint must be contiguous within a slot"):
        kda_commit([turned], rows_of([0]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("a_log", "dt_bias", "bound", "message"),
    [
        pytest.param(torch.zeros(2), torch.zeros(16), None, r"\[heads, key dim\]", id="flat-bias"),
        pytest.param(torch.zeros(3), torch.zeros(2, 8), None, r"a_log must be \[2\]", id="heads"),
        pytest.param(None, torch.zeros(2, 8), 0.0, "lower_bound=0.0 must be negative", id="bound"),
    ],
)
def test_bad_gates_are_named(a_log, dt_bias, bound, message):
    with pytest.raises(ValueError, match=message):
        Gate(a_log, dt_bias, bound)
