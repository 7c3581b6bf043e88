"""Gathering a step's requests from vLLM's buffers, and putting rows back under their slots: kernels and definition."""

import pytest
import torch

from dspark.kernels import HAS_TRITON
from dspark.vllm.v2_rows import StepBuffers, gather_rows_ref, launch_gather, launch_scatter, scatter_rows

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: there are no kernels to compare with")


def buffers(device, num_reqs, steps=3, rows=4):
    generator = torch.Generator().manual_seed(num_reqs)
    slots = torch.randperm(300, generator=generator)[:num_reqs]
    slots[1::4] = -1
    return StepBuffers(
        input_ids=torch.randint(0, 9999, (num_reqs * rows,), generator=generator, dtype=torch.int32).to(device),
        rows=rows,
        slots=slots.repeat_interleave(steps).to(device),
        positions=torch.randint(1, 2**31, (num_reqs * steps,), generator=generator).to(device),
        steps=steps,
        temperature=torch.rand(300, generator=generator).to(device),
        seeds=torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator).to(device),
    )


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("step_noise", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 5, 130])
def test_one_launch_gathers_what_the_definition_does(device, num_reqs, step_noise, greedy):
    step = buffers(device, num_reqs)
    expected = gather_rows_ref(step, num_reqs, greedy=greedy, step_noise=step_noise)
    rows = launch_gather(step, num_reqs, greedy=greedy, step_noise=step_noise)
    for name in ("anchors", "slots", "positions", "seeds", "temperature"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name


@pytest.mark.parametrize("shape", [(3,), (3, 700)])
def test_rows_go_under_their_slots_and_nowhere_else(device, shape):
    slots = torch.tensor([4, -1, 0, 6, -1], device=device)
    source = torch.randn(5, *shape, device=device)
    target, expected = torch.zeros(8, *shape, device=device), torch.zeros(8, *shape, device=device)
    expected[[4, 0, 6]] = source[[0, 2, 3]]
    launch_scatter(slots, source, target)
    assert torch.equal(target, expected)
    target.zero_()
    scatter_rows(slots, source, target)
    assert torch.equal(target, expected)
