"""Any sequence of steps leaves state, window and outputs where the token-by-token recurrence has them, in both folding
modes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import BOUNDED, DEVICE, SOFTPLUS, close, cut, random_tokens
from kda_engine import Engine, Request

from dspark.kernels.kda import Tokens, kda_scan
from dspark.kernels.kda_commit import block_boundary, kda_commit
from dspark.kernels.kda_verify import kda_verify

pytestmark = pytest.mark.usefixtures("on_device")
MODES = pytest.mark.parametrize("deferred", [False, True], ids=["fold-every-step", "fold-when-full"])
GATES = pytest.mark.parametrize("lower_bound", [SOFTPLUS, BOUNDED], ids=["softplus", "bounded"])
WINDOW = 5


def draw_rows(data, engine, slots):
    """Query lengths 0..window and acceptances 0..length; a plain step is one row of one token."""
    num_rows = [data.draw(st.integers(0, WINDOW)) for _ in slots]
    return num_rows, [data.draw(st.integers(0, n)) for n in num_rows]


@MODES
@GATES
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_steps_is_the_recurrence(deferred, lower_bound, data):
    capacity = data.draw(st.integers(2 * WINDOW, 3 * WINDOW + 1)) if deferred else WINDOW
    engine = Engine(window=WINDOW, capacity=capacity, deferred=deferred, lower_bound=lower_bound)
    parked = []
    engine.admit(0)
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["step", "step", "step", "plain", "admit", "preempt", "resume", "snapshot"]))
        slots = list(engine.requests)
        if kind in ("step", "plain", "snapshot") and slots:
            slots = data.draw(st.permutations(slots))[: data.draw(st.integers(1, len(slots)))]
            slots += [-1] * data.draw(st.integers(0, 2))
            slots = data.draw(st.permutations(slots))
            num_rows, accepted = ([1] * len(slots),) * 2 if kind == "plain" else draw_rows(data, engine, slots)
            if max(num_rows) == 0:
                continue
            free = [s for s in range(4) if s not in engine.requests]
            row = next((i for i, s in enumerate(slots) if s >= 0 and accepted[i] > 0), None)
            boundary = {}
            if kind == "snapshot" and free and row is not None:
                boundary = {row: (free[0], data.draw(st.integers(0, accepted[row])))}
                source = engine.requests[slots[row]]
                expected = boundary[row][1] + source.accepted
            engine.step(slots, num_rows, accepted, boundary=boundary)
            if boundary:
                check_snapshot(engine, boundary[row][0], source, expected)
        elif kind == "admit":
            engine.admit(data.draw(st.integers(0, 3)))  # a taken slot counts as finished and is reused as it is
        elif kind == "preempt" and slots:
            parked.append(engine.requests.pop(slots[0]))
        elif kind == "resume" and parked:
            engine.admit(data.draw(st.integers(0, 3)), parked.pop())


def check_snapshot(engine, slot, request, position):
    replayed = type(request)(0, engine.gates, engine.dtype)
    replayed.line = request.line
    replayed.accept(position)
    for layer, expected in zip(engine.layers, replayed.states, strict=True):
        close(layer.checkpoint[slot], expected[0], engine.error)


@MODES
@pytest.mark.parametrize("accepted", range(WINDOW + 1))
@pytest.mark.parametrize("computed", range(8, 16))
def test_a_cached_block_holds_its_boundary_is_final_and_can_be_resumed(deferred, accepted, computed):
    """Blocks of 8 tokens; every place of the window relative to the boundary."""
    engine = Engine(num_slots=3, num_layers=1, window=WINDOW, deferred=deferred)
    request = Request(5, engine.gates, engine.dtype)
    request.accept(computed)
    engine.admit(0, request)
    found = block_boundary(torch.tensor([computed]), torch.tensor([accepted]), torch.tensor([1]), 8)
    distance, before = int(found.num_records), engine.layers[0].checkpoint[1].clone()
    window_start = engine.conv_cursor[0].clone()
    crossed = bool(found.slots >= 0)
    engine.step([0], [WINDOW], [accepted], boundary={0: (1, distance)} if crossed else {})
    assert crossed != torch.equal(engine.layers[0].checkpoint[1], before)
    if not crossed:
        return
    engine.conv[1] = engine.conv[0]  # the window travels with its cursor
    engine.conv_cursor[1] = (window_start + distance) % engine.conv.shape[1]
    engine.cursor.reset(torch.tensor([1]))
    block, window = engine.layers[0].checkpoint[1].clone(), engine.conv[1].clone()
    for _ in range(3):
        engine.step([0], [WINDOW], [2])
    assert torch.equal(engine.layers[0].checkpoint[1], block)
    assert torch.equal(engine.conv[1].nan_to_num(), window.nan_to_num())
    hit = Request(5, engine.gates, engine.dtype)
    hit.accept(computed + distance)
    engine.requests[1] = hit
    engine.check([1])
    engine.step([1, 0], [WINDOW, 1], [3, 1])


@pytest.mark.parametrize("accepted", [1, WINDOW], ids=["all-rejected", "all-accepted"])
@pytest.mark.parametrize("capacity", [2 * WINDOW, 2 * WINDOW + 1, 4 * WINDOW])
def test_ring_wraps_many_times(accepted, capacity):
    engine = Engine(num_slots=1, num_layers=1, window=WINDOW, capacity=capacity)
    engine.admit(0)
    for _ in range(10 * capacity // accepted if accepted > 1 else 2 * capacity):
        engine.step([0], [WINDOW], [accepted])
        assert engine.cursor.held[0] + WINDOW <= capacity


@MODES
@pytest.mark.parametrize(
    ("state_dtype", "lower_bound", "bound"),
    [
        pytest.param(torch.float32, SOFTPLUS, 5e-7, id="float32-softplus"),
        pytest.param(torch.float32, BOUNDED, 5e-7, id="float32-bounded"),
        pytest.param(torch.bfloat16, BOUNDED, 2e-2, id="bfloat16"),
    ],
)
def test_error_does_not_grow_over_5000_tokens(deferred, state_dtype, lower_bound, bound):
    """Bounds: a few times what one step shows (1.3e-7; 6e-3 with a bfloat16 state), at any length."""
    engine = Engine(
        num_slots=1,
        num_layers=1,
        window=9,
        capacity=32 if deferred else 9,
        deferred=deferred,
        lower_bound=lower_bound,
        dtype=torch.float32,
        state_dtype=state_dtype,
    )
    engine.error = bound
    layer, generator, done, checked = engine.layers[0], torch.Generator().manual_seed(5), 0, 0
    heads, value_dim, key_dim = layer.checkpoint.shape[1:]
    line = random_tokens(1, 5009, heads, key_dim, value_dim, seed=11, dtype=torch.float32)
    layer.checkpoint.zero_()
    exact = torch.zeros_like(layer.checkpoint, dtype=torch.float64)
    while done < 5000:
        rows = engine.rows([0], [9])
        assert kda_verify(cut(line, 0, done, done + 9), layer, rows).isfinite().all()
        count = torch.randint(0, 10, (1,), generator=generator, device="cpu").to(DEVICE)
        if deferred:
            engine.cursor.advance(rows, count)
        else:
            kda_commit([layer], rows, count)
        done += int(count)
        if done - checked >= 500:
            piece = Tokens(*(x.double() for x in vars(cut(line, 0, checked, done)).values()))
            exact, checked = kda_scan(piece, layer.gate, exact)[2][:, -1], done
            close(engine.current(layer, 0), exact[0], bound)
