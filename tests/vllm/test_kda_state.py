"""vLLM's rows, blocks and pages of a KDA step, mapped to the kernels, against a float64 recurrence token by token.

No vLLM is needed. Each law is held by the definitions in PyTorch, in float64, and by the kernels, in float32: on a GPU
where there is one, else in Triton's interpreter.
"""

import importlib

import pytest
import torch
from kda_blocks import DEVICE, DIM, HEADS, Served, draw, same

from dspark.kernels import kda_verify
from dspark.kernels.kda import Tokens
from dspark.vllm import kda_state
from dspark.vllm.kda_conv import ConvPages, ConvTable, conv_verify
from dspark.vllm.kda_state import AlignedBlocks, StepRows, commit_plan_ref, verify_rows_ref

MODULES = ("dspark.kernels.kda_verify", "dspark.kernels.kda_commit", "dspark.vllm.kda_state", "dspark.vllm.kda_conv")
KERNEL_ERROR = 2e-5 if DEVICE == "cuda" else 3e-6


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


@pytest.fixture(params=["reference", "kernels"])
def how(request, monkeypatch):
    """Options of `Served`, and whether kernels or definitions run."""
    kernels = request.param == "kernels"
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(name), "runs_kernel", lambda x: kernels)
    return {"dtype": torch.float32, "error": KERNEL_ERROR} if kernels else {}


@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_steps_without_prefix_caching(how, dim_first, lower_bound):
    """Windows of every length, nothing kept, all kept, rows without drafts, padding, other requests in the batch."""
    served = Served(dim_first=dim_first, lower_bound=lower_bound, **how)
    for computed in (1, 4, 9):
        served.admit(computed)
    served.step([(0, 5, 2), (1, 5, 5), (2, 5, 0)])
    served.step([(2, 1, 1), (0, 3, 1)], padding=2)
    served.step([(1, 5, 1), (2, 4, 4)], padding=1, with_requests=True)
    served.step([(1, 2, 0)], with_requests=True)
    served.step([(0, 5, 5), (1, 5, 4), (2, 5, 3)])


def test_a_window_of_nine_tokens(how):
    """Kimi K3's longest: above the serial kernel's limit and within the chunk's."""
    served = Served(window=9, num_layers=1, **how)
    served.admit(3)
    for kept in (9, 0, 4, 1):
        served.step([(0, 9, kept)], padding=1)


@pytest.mark.parametrize("window", [5, 9, 13])
@pytest.mark.parametrize("align", [None, 16])
def test_a_verification_that_convolves_leaves_what_two_launches_leave(how, window, align, monkeypatch):
    """Random steps with padding, by both at once: outputs and states to a rounding, pages and spare inputs to the bit.
    Requests end, and others get their rows and blocks."""
    monkeypatch.setattr(kda_verify, "FUSE_BELOW", 193)
    launches, launch = [], kda_verify.launch_kda_chunk
    watched = lambda *args, **named: launches.append(named["window"]) or launch(*args, **named)  # noqa: E731
    monkeypatch.setattr(kda_verify, "launch_kda_chunk", watched)
    one, two = (Served(window=window, num_layers=1, align=align, inside=inside, **how) for inside in (True, False))
    generator, last = torch.Generator().manual_seed(window), None
    draw_number = lambda low, high: int(torch.randint(low, high, (), generator=generator, device="cpu"))  # noqa: E731
    running = []
    for step in range(4 if how else 16):
        if step % 3 == 2:  # a request ends, and the next one gets its blocks
            last = running.pop(draw_number(0, len(running)))
            for served in (one, two):
                served.free += served.blocks[last]
        while len(running) < 3:
            computed = draw_number(1, 17)
            for served in (one, two):
                index = served.admit(computed)
                if last is not None:
                    assert set(served.blocks[index]) & set(served.blocks[last])
            running.append(index)
        plan = []
        for index in [running[i] for i in torch.randperm(3, generator=generator, device="cpu").tolist()]:
            count = window if draw_number(0, 2) else draw_number(1, window + 1)
            if one.requests[index].computed + count < 62:
                plan.append((index, count, draw_number(0, count + 1)))
        for served in (one, two):
            served.cached.clear()
            served.step(plan, padding=step % 3, with_requests=step % 2 == 1)
        assert same(one.pages[0].spare, two.pages[0].spare)
        assert same(one.pages[0].pages, two.pages[0].pages)
        for got, expected in (
            (one.layers[0].checkpoint, two.layers[0].checkpoint),
            (one.layers[0].records.correction, two.layers[0].records.correction),
        ):
            assert torch.allclose(got, expected, rtol=20 * one.error, atol=20 * one.error, equal_nan=True)
    if how:
        assert sum(x is not None for x in launches) * 2 == len(launches) > 0


@pytest.mark.parametrize(
    ("changed", "inside"),
    [({}, True), ({"dim_first": True}, False), ({"window": 4}, False), ({"window": 14}, False), ({"rows": 97}, False)],
    ids=["contiguous-channels", "dim-first-pages", "serial-kernel", "line-too-long", "many-requests"],
)
def test_where_a_verification_convolves(changed, inside, monkeypatch):
    """Here for at most 192 requests times heads, of which there are two."""
    monkeypatch.setattr(kda_verify, "FUSE_BELOW", 193)
    served = Served(num_layers=1, **{"window": 5, **{k: v for k, v in changed.items() if k != "rows"}})
    rows = verify_rows_ref(torch.ones(changed.get("rows", 96)), torch.zeros(changed.get("rows", 96) + 1))
    line = draw(1, 1, HEADS, DIM, seed=1)
    tokens, window = Tokens(line, line, line, line, line[..., 0]), served.pages[0].window(served.weight)
    assert kda_verify.fits_inside(tokens, window, rows, served.window) == inside


@pytest.mark.parametrize("computed", [11, 13])
def test_boundaries_of_cached_blocks(how, computed):
    """Blocks of 8 tokens: what is kept stops short of the boundary, lands on it, or crosses it."""
    for kept in range(6):
        served = Served(align=8, num_layers=1, **how)
        served.admit(computed)
        served.step([(0, 5, kept)])
        served.step([(0, 5, 3)], padding=1)


def test_every_place_of_a_window_and_a_boundary():
    """All computed, query and kept lengths, by the definitions."""
    for computed in range(8, 16):
        for count in range(1, 6):
            for kept in range(count + 1):
                served = Served(align=8, num_layers=1)
                served.admit(computed)
                served.step([(0, count, kept)])
                served.step([(0, 5, 5)])


def test_a_long_run_with_prefix_caching(how):
    """Rows that cross boundaries in different steps, for longer than four blocks; cached blocks are never written."""
    served = Served(align=8, num_layers=2, **how)
    for computed in (1, 7, 8):
        served.admit(computed)
    generator = torch.Generator().manual_seed(3)
    for step in range(12 if not how else 6):
        plan = []
        for index in torch.randperm(3, generator=generator, device="cpu").tolist():
            count = int(torch.randint(1, 6, (), generator=generator, device="cpu"))
            kept = int(torch.randint(0, count + 1, (), generator=generator, device="cpu"))
            if served.requests[index].computed + count < 60:
                plan.append((index, count, kept))
        served.step(plan, padding=step % 3, with_requests=step % 2 == 1)


@pytest.mark.parametrize("align", [None, 8, 16])
@pytest.mark.parametrize("with_requests", [False, True])
def test_plan_row_by_row(how, align, with_requests):
    """Counts beyond the window or below zero, null blocks in table and state, against plain Python."""
    generator = torch.Generator().manual_seed(11)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, device="cpu").to(DEVICE, torch.int32)

    for trial in range(20):
        count, width = 1 + trial % 7, 6
        lengths = integers(0, 6, count)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        indices = integers(0, 4, count, 3)[:, 1] * integers(1, 9, count)
        requests = torch.randperm(9, generator=generator, device="cpu")[:count].to(DEVICE, torch.int32)
        accepted, computed, table = integers(-2, 9, 9), integers(0, 46, 9), integers(0, 30, 9, width)
        blocks = AlignedBlocks(table, computed, align) if align else None
        plan = StepRows(8, DEVICE).commit(accepted, indices, starts, requests if with_requests else None, blocks)
        for row in range(count):
            request = int(requests[row]) if with_requests else row
            slot, length = int(indices[row]), int(lengths[row])
            kept = min(max(int(accepted[request]), 0), length) if slot > 0 else 0
            assert int(plan.rows.slots[row]) == (slot if slot > 0 else -1)
            assert int(plan.num_records[row]) == kept
            into, boundary, before = slot, -1, int(computed[request])
            if align:
                into = int(table[request, min(max(before + kept - 1, 0) // align, width - 1)])
                end = (before // align + 1) * align
                if kept and before + kept >= end:
                    boundary = int(table[request, min(end // align - 1, width - 1)]) or -1
                    assert int(plan.boundary.num_records[row]) == end - before
                assert int(plan.boundary.slots[row]) == boundary
            assert int(plan.destinations[row]) == (into if kept and into > 0 else -1)


def test_definitions_and_buffers_agree(how):
    indices = torch.tensor([3, 0, 7], dtype=torch.int32)
    starts = torch.tensor([0, 5, 5, 6], dtype=torch.int32)
    rows, expected = StepRows(4, DEVICE).verify(indices, starts), verify_rows_ref(indices, starts)
    for name, value in vars(expected).items():
        if name != "max_held":  # a promise for rings; here the checkpoint is always current
            assert torch.equal(getattr(rows, name), value), name
    plan = StepRows(4, DEVICE).commit(torch.tensor([2, 1, 1], dtype=torch.int32), indices, starts)
    expected = commit_plan_ref(torch.tensor([2, 1, 1]), indices, starts)
    assert torch.equal(plan.destinations, expected.destinations)
    assert plan.boundary is None


def test_rows_stay_where_they_are():
    """A CUDA graph that was captured with one step's rows reads the next step's from the same addresses."""
    step = StepRows(4, DEVICE)
    make = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    first = step.verify(make(3, 5), make(0, 5, 10))
    second = step.verify(make(6, 0), make(0, 2, 2))
    for name, value in vars(first).items():
        if name != "max_held":
            assert value.data_ptr() == getattr(second, name).data_ptr(), name
    assert first.slots.tolist() == [6, -1]
    assert first.first_token.tolist() == [0, 2]


def test_refusals():
    pages = ConvPages(draw(3, 8, 5, seed=1), draw(2, 8, seed=2))
    rows = kda_state.verify_rows_ref(torch.tensor([1]), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"page of 5 columns is too short for 4 tokens .*: it takes 6"):
        conv_verify(draw(4, 8, seed=3), draw(8, 4, seed=4), pages, rows, 4)
    with pytest.raises(ValueError, match="layer 1 has pages"):
        ConvTable([pages, ConvPages(draw(3, 8, 6, seed=1), pages.spare)], 4)
    with pytest.raises(ValueError, match="3 rows with 3 query boundaries do not fit: there is room for 2"):
        StepRows(2, DEVICE).verify(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
