"""The verify kernels against the reference: gates, dims, held records, ragged and padded batches, and what each must
not touch."""

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
    filled,
    poisoned,
    random_layer,
    random_tokens,
    ring,
)
from triton.runtime import interpreter

import dspark.kernels.kda_verify as kda_verify_module
from dspark.kernels import kda_chunk
from dspark.kernels.kda import Gate, KDALayer, Records, Rows, Tokens
from dspark.kernels.kda_chunk import launch_kda_chunk
from dspark.kernels.kda_verify import kda_verify, kda_verify_ref, launch_kda_serial

pytestmark = pytest.mark.usefixtures("on_device")
KERNELS = pytest.mark.parametrize("verify", [launch_kda_chunk, launch_kda_serial], ids=["chunk", "serial"])
HEADS = 2


def compare(verify, tokens, layer, rows, bound=KERNEL_ERROR):
    expected, got = copied(layer), copied(layer)
    want, have = kda_verify_ref(tokens, expected, rows), verify(tokens, got, rows)
    close(have, want, bound)
    close(got.checkpoint, expected.checkpoint, bound)
    for a, b in zip(vars(got.records).values(), vars(expected.records).values(), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), "another set of records was written"
        close(a.nan_to_num(), b.nan_to_num(), bound)
    return got, have


CASES = [
    pytest.param({"key_dim": 16, "value_dim": 16}, id="one-tile"),
    pytest.param({"key_dim": 12, "value_dim": 20}, id="dims-not-powers-of-two"),
    pytest.param({"key_dim": 16, "value_dim": 130}, id="several-value-tiles"),
    pytest.param({"key_dim": 16, "value_dim": 16, "lower_bound": SOFTPLUS}, id="softplus"),
    pytest.param({"key_dim": 16, "value_dim": 16, "lower_bound": -10.0}, id="bound-too-low-to-factor"),
    pytest.param({"key_dim": 16, "value_dim": 16, "with_rate": False}, id="no-rate"),
]


@KERNELS
@pytest.mark.parametrize("case", CASES)
def test_kernel_matches_reference_on_a_ragged_padded_batch_with_held_records(verify, case):
    num_rows = [9, 1, 0, 5, 9]
    rows = ring([3, 0, 2, -1, 4], num_rows, held=[4, 9, 3, 0, 0], start=13, fold=[True, False, True, True, False])
    layer = filled(random_layer(5, HEADS, capacity=18, dtype=torch.float32, **case), rows)
    tokens = poisoned(random_tokens(5, 9, HEADS, case["key_dim"], case["value_dim"], dtype=torch.float32), num_rows)
    got, out = compare(verify, tokens, layer, rows)
    assert not out[2:4].any()
    for untouched in (0, 1, 4):  # held without folding, no row, nothing held
        assert torch.equal(got.checkpoint[untouched], layer.checkpoint[untouched])


@pytest.mark.parametrize("lower_bound", [BOUNDED, SOFTPLUS])
@pytest.mark.parametrize("max_held", [0, 7], ids=["all-fold", "some-fold"])
def test_value_channels_may_pass_in_tiles(lower_bound, max_held, monkeypatch):
    """Three tiles, the last one not full, of which each folds its part of the state."""
    monkeypatch.setattr(kda_chunk, "SPREAD_TILE", (64, 16, 4, None))
    rows = ring(
        [3, 0, -1, 2],
        [9, 5, 9, 1],
        held=[4, 7 if max_held else 9, 2, 0],
        start=13,
        fold=[True, not max_held, True, True],
    )
    rows = dataclasses.replace(rows, max_held=max_held)
    layer = filled(random_layer(4, HEADS, 20, 40, capacity=18, dtype=torch.float32, lower_bound=lower_bound), rows)
    tokens = random_tokens(4, 9, HEADS, 20, 40, dtype=torch.float32)
    got, _ = compare(launch_kda_chunk, tokens, layer, rows)
    assert torch.equal(got.checkpoint[2], layer.checkpoint[2])


@KERNELS
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16])
def test_every_window_without_held_records(verify, num_tokens):
    layer = random_layer(2, HEADS, 16, 16, num_tokens, dtype=torch.float32, lower_bound=BOUNDED)
    tokens = random_tokens(2, num_tokens, HEADS, 16, 16, seed=num_tokens, dtype=torch.float32)
    rows = ring([1, 0], [num_tokens] * 2)
    got, out = compare(verify, tokens, layer, rows)
    assert torch.equal(got.checkpoint, layer.checkpoint)
    close(verify(tokens, copied(layer), rows, deferred=False), out, KERNEL_ERROR)  # another program on a device


@KERNELS
def test_a_tokens_output_is_bitwise_independent_of_later_tokens_and_of_the_batch(verify):
    layer = random_layer(6, HEADS, 16, 16, 9, dtype=torch.float32)
    tokens = random_tokens(3, 9, HEADS, 16, 16, dtype=torch.float32)
    whole = verify(tokens, copied(layer), ring([4, 2, 5], [9, 9, 9]))
    for count in (1, 4, 8):
        later = Tokens(*(torch.cat([x[:, :count], x[:, count:].flip(0) * 3], 1) for x in vars(tokens).values()))
        assert torch.equal(verify(later, copied(layer), ring([4, 2, 5], [9, 9, 9]))[:, :count], whole[:, :count])
        trimmed = Tokens(*(x[1:2, :count] for x in vars(tokens).values()))
        assert torch.equal(verify(trimmed, copied(layer), ring([2], [count]))[0], whole[1, :count])
        ragged = poisoned(tokens, [count, 9, 2])
        assert torch.equal(verify(ragged, copied(layer), ring([4, 2, 5], [count, 9, 2]))[1], whole[1])


@KERNELS
def test_heads_of_two_devices_together_are_those_of_one(verify):
    layer = random_layer(2, 4, 16, 16, 9, dtype=torch.float32)
    tokens = random_tokens(2, 9, 4, 16, 16, dtype=torch.float32)
    whole = verify(tokens, copied(layer), ring([1, 0], [9, 9]))
    for heads in (slice(0, 2), slice(2, 4)):
        state = layer.checkpoint[:, heads].contiguous()
        gate = Gate(layer.gate.a_log[heads], layer.gate.dt_bias[heads], layer.gate.lower_bound)
        part = KDALayer(state, Records.empty(2, 9, state, torch.float32), gate)
        mine = Tokens(*(x[:, :, heads] for x in vars(tokens).values()))
        assert torch.equal(verify(mine, part, ring([1, 0], [9, 9])), whole[:, :, heads])


@KERNELS
@pytest.mark.parametrize("null_slot", [-1, 0])
def test_padding_rows_write_nowhere(verify, null_slot):
    """A padded row points at no slot or at the null block, with or without tokens."""
    layer = random_layer(3, HEADS, 16, 16, 9, dtype=torch.float32)
    rows = Rows.current(torch.tensor([null_slot, 2, null_slot]), torch.tensor([9, 9, 0]), null_slot=null_slot)
    got = copied(layer)
    out = verify(random_tokens(3, 9, HEADS, 16, 16, dtype=torch.float32), got, rows)
    assert not out[[0, 2]].any()
    assert torch.equal(got.checkpoint, layer.checkpoint)
    assert all(store[:2].isnan().all() for store in vars(got.records).values())


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter lets a test choose the order of thread blocks")
@KERNELS
def test_thread_blocks_may_run_in_any_order(verify, monkeypatch):
    """Several value tiles, held records, a fold, a ring that is full: no block reads what another one writes."""
    monkeypatch.setattr(kda_chunk, "SPREAD_TILE", (16, 16, 4, None))
    monkeypatch.setattr(kda_verify_module, "SERIAL_TILE_V", 16)
    rows = ring([1, 0], [9, 9], held=[9, 9], start=5, fold=True)
    layer = filled(random_layer(2, HEADS, 16, 64, 18, dtype=torch.float32), rows)
    tokens = random_tokens(2, 9, HEADS, 16, 64, dtype=torch.float32)
    forward, backward = copied(layer), copied(layer)
    out = verify(tokens, forward, rows)
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *at: set_index(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))
    )
    assert torch.equal(verify(tokens, backward, rows), out)
    assert torch.equal(backward.checkpoint, forward.checkpoint)
    for a, b in zip(vars(backward.records).values(), vars(forward.records).values(), strict=True):
        assert torch.equal(a, b)


@KERNELS
def test_verifying_again_gives_the_same_records(verify):
    rows = ring([1, 0], [5, 3], held=[2, 0], start=4)
    layer = filled(random_layer(2, HEADS, 16, 16, 10, dtype=torch.float32), rows)
    tokens = random_tokens(2, 5, HEADS, 16, 16, dtype=torch.float32)
    first = verify(tokens, layer, rows)
    records = [x.clone() for x in vars(layer.records).values()]
    assert torch.equal(verify(tokens, layer, rows), first)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(vars(layer.records).values(), records, strict=True)
    )


@KERNELS
@pytest.mark.parametrize("lower_bound", [BOUNDED, -10.0, SOFTPLUS])
@pytest.mark.parametrize("raw", [-60.0, 60.0])
@pytest.mark.parametrize("a_log", [1.0, -5.0], ids=["fast", "slow"])
def test_saturated_gates(verify, lower_bound, raw, a_log):
    """With softplus a log decay of -160 a token: factors e^-G would overflow, pairwise decays vanish instead."""
    layer = random_layer(1, 1, 16, 16, 9, dtype=torch.float32, lower_bound=lower_bound)
    layer = dataclasses.replace(layer, gate=Gate(torch.tensor([a_log]), torch.zeros(1, 16), lower_bound))
    tokens = random_tokens(1, 9, 1, 16, 16, dtype=torch.float32)
    tokens = dataclasses.replace(tokens, gate=torch.full_like(tokens.gate, raw))
    compare(verify, tokens, layer, ring([0], [9]))


@KERNELS
def test_degenerate_inputs(verify):
    """Zero keys and queries, beta of 0 and 1, one key repeated (the couplings' worst growth), denormals and minus
    zero."""
    layer = random_layer(4, 1, 16, 16, 9, dtype=torch.float32)
    layer = dataclasses.replace(layer, gate=Gate(None, torch.full((1, 16), -60.0), BOUNDED))  # nothing decays
    tokens = random_tokens(4, 9, 1, 16, 16, dtype=torch.float32)
    tokens.key[0], tokens.query[0] = 0.0, 0.0
    tokens.beta[1, ::2], tokens.beta[1, 1::2] = -200.0, 200.0
    tokens.key[2], tokens.beta[2] = tokens.key[2, :1].clone(), 200.0
    tokens.key[3], tokens.value[3], tokens.beta[3] = 1e-40, -0.0, 0.0
    compare(verify, tokens, layer, ring([0, 1, 2, 3], [9] * 4), bound=1e-5)


@KERNELS
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "bound"),
    [(torch.bfloat16, torch.float32, 8e-3), (torch.bfloat16, torch.bfloat16, 8e-3)],
    ids=["float32-state", "bfloat16-state"],
)
def test_bfloat16_activations(verify, dtype, state_dtype, bound):
    """The interpreter cuts where a device rounds, so outputs and bfloat16 records differ by up to one unit of 2^-7."""
    rows = ring([1, 0], [9, 4], held=[3, 0], start=2, fold=[True, False])
    layer = filled(random_layer(2, HEADS, 16, 16, 18, dtype=dtype, state_dtype=state_dtype), rows)
    tokens = random_tokens(2, 9, HEADS, 16, 16, dtype=dtype)
    got, _ = compare(verify, tokens, layer, rows, bound=bound)
    for name in ("key", "gate"):  # recorded raw, hence exactly
        assert torch.equal(getattr(got.records, name)[1, :, 5:14], getattr(tokens, name)[0].transpose(0, 1))


def test_a_window_that_does_not_fit_is_refused():
    layer = random_layer(1, HEADS, 16, 16, 4)
    with pytest.raises(ValueError, match="9 tokens do not fit into records of 4 rows"):
        kda_verify(random_tokens(1, 9, HEADS, 16, 16), layer, ring([0], [9]))
