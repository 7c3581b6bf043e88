"""Verification that convolves too: outputs, records, checkpoints and ring of inputs are those of the convolution and
then the verification, bit for bit where sums are taken in one order."""

import dataclasses

import pytest
import torch
from kda_cases import (
    BOUNDED,
    DEVICE,
    KERNEL_ERROR,
    SOFTPLUS,
    close,
    copied,
    draw,
    filled,
    line_up,
    poisoned,
    random_layer,
    random_tokens,
    ring,
)
from triton.runtime import interpreter

from dspark.kernels import kda_chunk
from dspark.kernels.conv_window import conv_window_ref, launch_conv_window
from dspark.kernels.kda import Tokens, Window
from dspark.kernels.kda_chunk import launch_kda_chunk
from dspark.kernels.kda_verify import convolved_tokens, kda_verify, kda_verify_ref

pytestmark = pytest.mark.usefixtures("on_device")
HEADS = 2


def random_window(rows, key_dim, value_dim, capacity, *, width=4, dtype=torch.bfloat16, weight_dtype=torch.float32):
    """A ring that is NaN but for the history of the rows' slots, and cursors anywhere in it, round its end too."""
    channels, slots = HEADS * (2 * key_dim + value_dim), int(rows.slots.max()) + 1
    inputs = torch.full((slots, capacity, channels), float("nan"), dtype=dtype)
    cursor = (torch.arange(len(rows.slots)) * 5 + 1) % capacity
    for slot, at in zip(rows.slots.tolist(), cursor.tolist(), strict=True):
        if slot >= 0:
            past = [(at - 1 - i) % capacity for i in range(width - 1)]
            inputs[slot, past] = draw(width - 1, channels, seed=90 + slot, dtype=dtype)
    return Window(draw(channels, width, seed=80, dtype=weight_dtype), inputs, cursor)


def bits(*tensors):
    return [x.nan_to_num(7.0) for x in tensors]


def outcome(out, layer, window):
    """Outputs, states, corrections, keys, gates, inputs."""
    return bits(out, layer.checkpoint, *vars(layer.records).values(), window.ring)


def both_ways(tokens, layer, rows, window, **options):
    """Outcome in one launch and in two; both start from the same pools."""
    one, two = copied(layer), copied(layer)
    inside, before = (dataclasses.replace(window, ring=window.ring.clone()) for _ in range(2))
    out = launch_kda_chunk(tokens, one, rows, window=inside, **options)
    mixed = convolved_tokens(tokens, rows, before, launch_conv_window)
    expected = launch_kda_chunk(mixed, two, rows, **options)
    return outcome(out, one, inside), outcome(expected, two, before)


def same(got, expected):
    """On a device the two programs sum squares in different orders, which moves outputs, corrections and states by
    roundings; convolved keys, gates and inputs are the same bits everywhere."""
    exact = range(len(got)) if DEVICE == "cpu" else (3, 4, 5)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if i in exact:
            assert torch.equal(a, b)
        else:
            close(a, b, 8e-3 if a.dtype == torch.bfloat16 else KERNEL_ERROR)


CASES = [
    pytest.param({}, id="one-tile"),
    pytest.param({"key_dim": 12, "value_dim": 20}, id="dims-not-powers-of-two"),
    pytest.param({"key_dim": 20, "value_dim": 130}, id="several-value-tiles"),
    pytest.param({"lower_bound": SOFTPLUS}, id="softplus"),
    pytest.param({"with_rate": False}, id="no-rate"),
    pytest.param({"state_dtype": torch.bfloat16}, id="bfloat16-state"),
    pytest.param({"state_dtype": torch.float32, "dtype": torch.float32}, id="float32-inputs"),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["current", "all-fold", "some-fold"])
def test_it_is_the_convolution_and_then_the_verification(case, form):
    """Ragged rows, one without drafts, one without tokens, one of padding; slots in any order."""
    case = {"key_dim": 16, "value_dim": 16, "state_dtype": torch.float32, "dtype": torch.bfloat16} | case
    num_rows = [9, 1, 0, 5, 9]
    held = {"current": [0] * 5, "all-fold": [4, 9, 3, 0, 2], "some-fold": [4, 7, 3, 0, 2]}[form]
    fold = {"current": False, "all-fold": True, "some-fold": [True, False, True, True, False]}[form]
    rows = ring([3, 0, 2, -1, 4], num_rows, held=held, start=13, fold=fold)
    rows = dataclasses.replace(rows, max_held=7 if form == "some-fold" else 0)
    layer = filled(random_layer(5, HEADS, capacity=18, lower_bound=case.pop("lower_bound", BOUNDED), **case), rows)
    shape = case["key_dim"], case["value_dim"]
    tokens = poisoned(random_tokens(5, 9, HEADS, *shape, dtype=case["dtype"]), num_rows)
    window = random_window(rows, *shape, 12, dtype=case["dtype"])
    got, expected = both_ways(tokens, layer, rows, window, deferred=form != "current")
    same(got, expected)
    assert got[0][[0, 1, 4]].any(2).any(2)[:, 0].all()
    assert not got[0][2:4].any()


@pytest.mark.parametrize(("width", "num_tokens"), [(2, 15), (3, 14), (4, 13), (4, 5), (4, 1)])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_every_width_with_its_longest_window(width, num_tokens, weight_dtype):
    rows = ring([1, 0], [num_tokens, max(1, num_tokens - 3)])
    layer = random_layer(2, HEADS, 16, 20, num_tokens, dtype=torch.bfloat16, state_dtype=torch.float32)
    tokens = random_tokens(2, num_tokens, HEADS, 16, 20, dtype=torch.bfloat16)
    window = random_window(rows, 16, 20, width - 1 + num_tokens, width=width, weight_dtype=weight_dtype)
    same(*both_ways(tokens, layer, rows, window, deferred=False))


def test_packed_tokens_and_views():
    """Queries, keys and values lie in one projection; runs in another order than rows, NaN between them."""
    num_rows = [5, 9, 3, 0]
    rows = ring([3, 0, -1, 2], num_rows)
    layer = random_layer(4, HEADS, 16, 20, 9, dtype=torch.bfloat16, state_dtype=torch.float32)
    tokens = random_tokens(4, 9, HEADS, 16, 20, dtype=torch.bfloat16)
    lines = {name: line_up(x, num_rows, [1, 2, 0]) for name, x in vars(tokens).items()}
    starts = lines["key"][1]
    line = Tokens(**{name: x for name, (x, _) in lines.items()})
    projection = torch.cat([x.flatten(2) for x in (line.query, line.key, line.value)], 2)
    query, key, value = (x.unflatten(2, (HEADS, -1)) for x in projection.split([32, 32, 40], 2))
    line = Tokens(query, key, value, line.gate, line.beta)
    rows = dataclasses.replace(rows, first_token=starts)
    window = random_window(rows, 16, 20, 12)
    same(*both_ways(line, layer, rows, window, deferred=False))


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter lets a test choose the order of thread blocks")
def test_thread_blocks_may_run_in_any_order(monkeypatch):
    """Value tiles of one head read the same history, and one of them records: no block reads what another writes."""
    monkeypatch.setattr(kda_chunk, "SPREAD_TILE", (16, 16, 4, None))
    rows = ring([1, 0], [9, 9], held=[9, 9], start=5, fold=True)
    layer = filled(random_layer(2, HEADS, 16, 64, 18, dtype=torch.float32), rows)
    tokens, window = random_tokens(2, 9, HEADS, 16, 64, dtype=torch.float32), None
    builder = interpreter.interpreter_builder
    set_index, outcomes = builder.set_grid_idx, []
    for _ in range(2):
        again, window = copied(layer), random_window(rows, 16, 64, 12, dtype=torch.float32)
        outcomes.append(outcome(launch_kda_chunk(tokens, again, rows, window=window), again, window))
        monkeypatch.setattr(
            builder,
            "set_grid_idx",
            lambda *at: set_index(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True))),
        )
    same(*outcomes)


@pytest.mark.parametrize("num_tokens", [2, 9, 16], ids=["serial", "inside", "too-long-to-fuse"])
def test_the_public_call_takes_a_window_of_any_length(num_tokens, monkeypatch):
    """Where one launch can't do it there are two; the reference is the references' composition."""
    monkeypatch.setattr("dspark.kernels.kda_verify.runs_kernel", lambda x: True)
    monkeypatch.setattr("dspark.kernels.conv_window.runs_kernel", lambda x: True)
    rows = ring([1, 0], [num_tokens, 1])
    layer = random_layer(2, HEADS, 16, 16, num_tokens, dtype=torch.float32)
    tokens = random_tokens(2, num_tokens, HEADS, 16, 16, dtype=torch.float32)
    window = random_window(rows, 16, 16, num_tokens + 3, dtype=torch.float32)
    expected, mine, theirs = copied(layer), window.ring.clone(), window.ring.clone()
    want = kda_verify_ref(tokens, expected, rows, dataclasses.replace(window, ring=theirs))
    got = kda_verify(tokens, layer, rows, deferred=False, window=dataclasses.replace(window, ring=mine))
    assert torch.allclose(got, want, atol=2e-5, rtol=2e-5)
    assert torch.equal(*bits(mine, theirs))
    mixed = convolved_tokens(tokens, rows, window, conv_window_ref)
    assert torch.allclose(*bits(layer.records.key, expected.records.key), atol=1e-5)
    assert torch.equal(expected.records.key[1], mixed.key[0].transpose(0, 1))


@pytest.mark.parametrize("num_tokens", [3, 9], ids=["serial", "inside"])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_a_last_row_beside_the_ring_is_one_of_its_rows(num_tokens, kernels, monkeypatch):
    for module in ("kda_verify", "conv_window"):
        monkeypatch.setattr(f"dspark.kernels.{module}.runs_kernel", lambda x: kernels)
    rows = ring([2, -1, 0], [num_tokens, 0, 1])
    layer = random_layer(3, HEADS, 16, 16, num_tokens, dtype=torch.float32)
    tokens = random_tokens(3, num_tokens, HEADS, 16, 16, dtype=torch.float32)
    weight = random_window(rows, 16, 16, num_tokens + 3, dtype=torch.float32).weight
    line = draw(3, num_tokens + 3, weight.shape[0], seed=91)
    outcomes = []
    for window in (
        Window(weight, line.clone(), torch.full_like(rows.slots, 3)),
        Window(weight, line[:, :-1].clone(), None, line[rows.slots.clamp_min(0), -1].clone()),
    ):
        mine = copied(layer)
        out = kda_verify(tokens, mine, rows, deferred=False, window=window)
        if window.spare is not None:
            whole = torch.cat([window.ring, line[:, -1:]], 1)
            whole[[2, 0], -1] = window.spare[[0, 2]]
            window = dataclasses.replace(window, ring=whole)
        outcomes.append(outcome(out, mine, window))
    same(*outcomes)


def test_a_ring_that_would_overwrite_its_history_is_refused():
    rows = ring([0], [9])
    layer = random_layer(1, HEADS, 16, 16, 9)
    with pytest.raises(ValueError, match="a ring of 11 rows is too short"):
        kda_verify(random_tokens(1, 9, HEADS, 16, 16), layer, rows, window=random_window(rows, 16, 16, 11))
