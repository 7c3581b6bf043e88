"""The verify kernels against the reference: gates, dims, held records, ragged and padded batches, and what each must
not touch."""

import dataclasses

import pytest
import torch
from kda_cases import BOUNDED, DEVICE, KERNEL_ERROR, SOFTPLUS, close, draw, line_up, random_layer, random_tokens
from triton.runtime import interpreter

import dspark.kernels.kda_verify as kda_verify_module
from dspark.kernels import kda_chunk
from dspark.kernels.conv_window import conv_window_ref, launch_conv_window
from dspark.kernels.kda import Gate, KDALayer, Records, Rows, Tokens, Window
from dspark.kernels.kda_chunk import launch_kda_chunk
from dspark.kernels.kda_commit import kda_fold_held
from dspark.kernels.kda_verify import convolved_tokens, kda_verify, kda_verify_ref, launch_kda_serial

pytestmark = pytest.mark.usefixtures("on_device")
KERNELS = pytest.mark.parametrize("verify", [launch_kda_chunk, launch_kda_serial], ids=["chunk", "serial"])
HEADS = 2


def ring(slots, num_rows, held=None, start=0, fold=False):
    slots, num_rows = torch.tensor(slots), torch.tensor(num_rows)
    held = torch.zeros_like(slots) if held is None else torch.tensor(held)
    fold = torch.tensor(fold) if isinstance(fold, list) else torch.full_like(slots, fold, dtype=torch.bool)
    return Rows(slots, slots, num_rows, torch.full_like(slots, start), held, fold)


def filled(layer, rows):
    """Held records get values; all others stay NaN."""
    for slot, first, held in zip(rows.record_slots.tolist(), rows.start.tolist(), rows.held.tolist(), strict=True):
        index = [(first + i) % layer.records.capacity for i in range(held)]
        for seed, store in enumerate(vars(layer.records).values(), 9 * slot):
            store[slot, :, index] = draw(store.shape[1], held, store.shape[3], seed=seed, dtype=store.dtype)
    return layer


def copied(layer):
    return KDALayer(layer.checkpoint.clone(), Records(*(x.clone() for x in vars(layer.records).values())), layer.gate)


def poisoned(tokens, num_rows):
    """NaN wherever no row has a token."""
    outside = torch.arange(tokens.key.shape[1]) >= torch.tensor(num_rows)[:, None]
    return Tokens(
        *(
            x.clone().masked_fill_(outside.view(*outside.shape, *[1] * (x.ndim - 2)), float("nan"))
            for x in vars(tokens).values()
        )
    )


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
    monkeypatch.setattr(kda_chunk, "SPREAD_TILE", (16, 4, None))
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
def test_tokens_may_be_views_of_wider_tensors(verify):
    """As projections and a convolution leave them: one tensor for queries, keys and values, padded between tokens."""
    layer, rows = random_layer(2, HEADS, 16, 20, 9, dtype=torch.float32), ring([1, 0], [9, 4])
    tokens = random_tokens(2, 9, HEADS, 16, 20, dtype=torch.float32)
    mixed = torch.cat([x.flatten(2) for x in (tokens.query, tokens.key, tokens.value)], 2)
    parts = mixed.split([HEADS * 16, HEADS * 16, HEADS * 20], 2)
    query, key, value = (x.unflatten(2, (HEADS, -1)) for x in parts)
    padded = torch.full((2, 9, 3 * HEADS), float("nan"))
    padded[..., :HEADS] = tokens.beta
    views = Tokens(query, key, value, tokens.gate, padded[..., :HEADS])
    assert torch.equal(verify(views, copied(layer), rows), verify(tokens, copied(layer), rows))


@KERNELS
def test_pools_may_be_longer_than_2_to_the_31(verify):
    """Address space alone: only a few pages are touched."""
    rows = ring([2, 0], [9, 9], held=[3, 2], start=4, fold=[True, False])
    layer = filled(random_layer(3, 1, 16, 16, 25, dtype=torch.bfloat16, state_dtype=torch.bfloat16), rows)
    far = torch.empty_strided((3, 1, 16, 16), (2**30 + 256, 256, 16, 1), dtype=torch.bfloat16)
    far.copy_(layer.checkpoint)
    records = Records(
        *(
            torch.empty_strided(x.shape, (2**30 + 400, *x.stride()[1:]), dtype=x.dtype)
            for x in vars(layer.records).values()
        )
    )
    for store, x in zip(vars(records).values(), vars(layer.records).values(), strict=True):
        store.copy_(x)
    tokens = random_tokens(2, 9, 1, 16, 16, dtype=torch.bfloat16)
    near = copied(layer)
    assert torch.equal(verify(tokens, KDALayer(far, records, layer.gate), rows), verify(tokens, near, rows))
    assert torch.equal(far, near.checkpoint)
    for a, b in zip(vars(records).values(), vars(near.records).values(), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


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


@pytest.mark.parametrize(
    "verify", [kda_verify_ref, launch_kda_chunk, launch_kda_serial], ids=["reference", "chunk", "serial"]
)
@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_packed_tokens_are_the_same_rows(verify, given):
    """Runs in another order than rows, NaN between them, and padding rows, one with a run, which is zero."""
    num_rows = [5, 9, 3, 1, 0, 0]
    rows = ring(
        [3, 0, -1, 1, -1, 2], num_rows, held=[4, 0, 2, 9, 0, 1], start=13, fold=[True, False, True, True, False, True]
    )
    layer = filled(random_layer(4, HEADS, 16, 20, capacity=18, dtype=torch.float32), rows)
    tokens = random_tokens(6, 9, HEADS, 16, 20, dtype=torch.float32)
    apart, packed = copied(layer), copied(layer)
    expected = verify(poisoned(tokens, num_rows), apart, rows)
    lines = {name: line_up(x, num_rows, [3, 0, 2, 5, 1]) for name, x in vars(tokens).items()}
    starts = lines["key"][1]
    line = Tokens(**{name: x for name, (x, _) in lines.items()})
    rows = dataclasses.replace(rows, first_token=starts)
    given = given and verify is not kda_verify_ref
    out = verify(line, packed, rows, **({"out": torch.full_like(line.value, 7.0)} if given else {}))
    taken = torch.zeros(line.value.shape[1], dtype=torch.bool)
    for row in (0, 1, 3):
        run = slice(int(starts[row]), int(starts[row]) + num_rows[row])
        assert torch.equal(out[0, run], expected[row, : num_rows[row]])
        taken[run] = True
    run = slice(int(starts[2]), int(starts[2]) + num_rows[2])
    assert not out[0, run].any()
    taken[run] = True
    assert (out[0, ~taken] == (7.0 if given else 0.0)).all()
    for a, b in zip(
        [packed.checkpoint, *vars(packed.records).values()],
        [apart.checkpoint, *vars(apart.records).values()],
        strict=True,
    ):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_packed_outputs_go_where_they_are_wanted():
    """A part of a wider tensor, written in place."""
    layer, rows = (
        random_layer(2, HEADS, 16, 16, 9),
        Rows.current(torch.tensor([1, 0]), torch.tensor([3, 2]), first_token=torch.tensor([1, 5])),
    )
    tokens = random_tokens(1, 8, HEADS, 16, 16)
    wide = torch.full((1, 8, 2 * HEADS, 16), 7.0, dtype=torch.float64)
    part = wide[:, :, HEADS:]
    got = kda_verify(tokens, copied(layer), rows, out=part)
    assert got is part
    new = kda_verify(tokens, copied(layer), rows)
    assert torch.equal(part[0, [1, 2, 3, 5, 6]], new[0, [1, 2, 3, 5, 6]])
    assert (part[0, [0, 4, 7]] == 7).all()
    assert not new[0, [0, 4, 7]].any()
    assert (wide[:, :, :HEADS] == 7).all()
    with pytest.raises(ValueError, match="heads and channels contiguous"):
        kda_verify(tokens, layer, rows, out=wide[..., :HEADS, :].transpose(2, 3))


def test_folding_ahead_is_folding_inside():
    rows = ring([3, 0, -1, 1], [9, 4, 9, 0], held=[7, 3, 0, 2], start=20, fold=[True, False, False, True])
    layers = [filled(random_layer(4, HEADS, 16, 16, 25, seed=i, dtype=torch.float32), rows) for i in range(2)]
    tokens = random_tokens(4, 9, HEADS, 16, 16, dtype=torch.float32)
    inside, ahead = [copied(x) for x in layers], [copied(x) for x in layers]
    later = kda_fold_held(ahead, rows)
    assert not later.fold.any()
    for a, b in zip(ahead, inside, strict=True):
        close(launch_kda_chunk(tokens, a, later), launch_kda_chunk(tokens, b, rows), KERNEL_ERROR)
        close(a.checkpoint[[0, 2, 3]], b.checkpoint[[0, 2, 3]], KERNEL_ERROR)
        for x, y in zip(vars(a.records).values(), vars(b.records).values(), strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            close(x.nan_to_num(), y.nan_to_num(), KERNEL_ERROR)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("value_dim", [16, 130], ids=["one-tile", "value-tiles"])
def test_convolution_inside_the_verification_is_the_one_in_front(value_dim, width, packed):
    """Outputs, records and the convolution's ring; ragged rows, padding, no token, a ring that wraps."""
    num_rows, capacity = [9, 1, 3, 5, 0], width + 10
    rows = ring([3, 0, -1, 1, 2], num_rows, held=[4, 9, 0, 0, 2], start=13, fold=[True, False, False, False, True])
    layer = filled(random_layer(4, HEADS, 16, value_dim, capacity=18, dtype=torch.float32), rows)
    tokens = poisoned(random_tokens(5, 9, HEADS, 16, value_dim, dtype=torch.float32), num_rows)
    channels = HEADS * (32 + value_dim)
    past = draw(4, capacity, channels, seed=5)
    cursor = torch.tensor([capacity - 1, 4, 0, 1, 7])
    before, inside = (Window(draw(width, channels, seed=6), past.clone(), cursor) for _ in range(2))
    if packed:
        lines = {name: line_up(x, num_rows, [3, 0, 2, 4, 1]) for name, x in vars(tokens).items()}
        rows = dataclasses.replace(rows, first_token=lines["key"][1])
        tokens = Tokens(**{name: x for name, (x, _) in lines.items()})
    expected, got = copied(layer), copied(layer)
    want = kda_verify_ref(tokens, expected, rows, before)
    have = launch_kda_chunk(tokens, got, rows, window=inside)
    close(have, want, KERNEL_ERROR)
    assert torch.equal(inside.ring, before.ring)
    assert not torch.equal(inside.ring, past)
    close(got.checkpoint, expected.checkpoint, KERNEL_ERROR)
    for a, b in zip(vars(got.records).values(), vars(expected.records).values(), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), "another set of records was written"
        close(a.nan_to_num(), b.nan_to_num(), KERNEL_ERROR)


@pytest.mark.parametrize("convolve", [conv_window_ref, launch_conv_window], ids=["reference", "kernel"])
def test_convolution_in_front_gives_the_tokens(convolve):
    tokens, rows = random_tokens(2, 3, HEADS, 8, 6, dtype=torch.float32), ring([1, 0], [3, 2])
    window = Window(draw(4, HEADS * 22), draw(2, 6, HEADS * 22, seed=1), torch.tensor([3, 0]))
    mixed = convolved_tokens(tokens, rows, window, convolve)
    assert mixed.gate is tokens.gate
    assert mixed.value.shape == tokens.value.shape
    line = torch.cat([x.flatten(2) for x in (tokens.query, tokens.key, tokens.value)], 2)
    window = Window(window.taps, draw(2, 6, HEADS * 22, seed=1), window.cursor)
    whole = conv_window_ref(line, window.taps.T, window.ring, rows.slots, window.cursor, rows.num_rows)
    close(mixed.key, whole[..., HEADS * 8 : HEADS * 16].unflatten(2, (HEADS, 8)), 1e-6)


def test_a_window_that_does_not_fit_is_refused():
    layer = random_layer(1, HEADS, 16, 16, 4)
    with pytest.raises(ValueError, match="9 tokens do not fit into records of 4 rows"):
        kda_verify(random_tokens(1, 9, HEADS, 16, 16), layer, ring([0], [9]))
