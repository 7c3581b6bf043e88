"""Forms in which verification takes its inputs: packed tokens, views, far pools, the fold ahead or
inside. Each is the same rows."""

import dataclasses

import pytest
import torch
from kda_cases import (
    copied,
    filled,
    line_up,
    poisoned,
    random_layer,
    random_tokens,
    ring,
)

from dspark.kernels.kda import KDALayer, Records, Rows, Tokens
from dspark.kernels.kda_chunk import launch_kda_chunk
from dspark.kernels.kda_verify import kda_verify, kda_verify_ref, launch_kda_serial

pytestmark = pytest.mark.usefixtures("on_device")
KERNELS = pytest.mark.parametrize("verify", [launch_kda_chunk, launch_kda_serial], ids=["chunk", "serial"])
HEADS = 2


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
