"""How often a step waits for the device, counted on the CPU by the operations that would make a GPU's host wait."""

import pytest
import torch
from pairs import drafter_config, tiny_drafter, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from dspark import SamplingParams, generate

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
WAITING = ("is_nonzero", "item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select")
MOST = 9  # of a step


class Waits(TorchDispatchMode):
    """Counts values that the host reads. Indexing by a mask is such, since it has to know how many are chosen."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        for name in ("tolist", "cpu"):  # no operations where the tensor is on the CPU already
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, read):
        def wrapped(*args, **kwargs):
            self.count += 1
            return read(*args, **kwargs)

        return wrapped

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        index = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        masks = [i for i in index if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
        self.count += name in WAITING or bool(masks)
        return operation(*args, **(kwargs or {}))


def waits_of_a_step(params, num_draft_tokens, **options):
    """The most of any step in which all requests verify K drafts."""
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(block_size=8), target)
    found, before = [], 0
    with pytest.MonkeyPatch.context() as monkeypatch, Waits(monkeypatch) as waits:

        def on_tokens(index, tokens, step):
            nonlocal before
            if index == 0:
                if step is not None and step.num_offered == num_draft_tokens:
                    found.append(waits.count - before)
                before = waits.count

        generate(target, drafter, PROMPTS, params, num_draft_tokens=num_draft_tokens, on_tokens=on_tokens, **options)
    assert len(found) > 8
    return max(found[2:])  # the first ones read the parameters of a new batch


def settings(**changes):
    """Parameters of three requests, of which the others end later than the first."""
    return [SamplingParams(**{"seed": i, "max_new_tokens": 70 + i} | changes) for i in range(3)]


@pytest.mark.parametrize(
    ("params", "options"),
    [
        pytest.param(settings(), {}, id="sampled"),
        pytest.param(settings(temperature=0), {}, id="greedy"),
        pytest.param([*settings(temperature=0)[:1], *settings()[1:]], {}, id="mixed"),
        pytest.param(settings(top_k=9, min_p=0.02), {}, id="truncated"),
        pytest.param([*settings(top_k=9)[:1], *settings()[1:]], {}, id="one-truncated"),
        pytest.param(settings(), {"drafting": "greedy"}, id="greedy-drafts"),
    ],
)
def test_a_step_waits_as_often_whatever_the_number_of_drafts(params, options):
    assert waits_of_a_step(params, 8, **options) <= waits_of_a_step(params, 2, **options) <= MOST


def test_top_p_waits_once_more_for_each_draft():
    """Whether the largest probabilities reach top_p, or the row has to be sorted whole."""
    params = settings(top_p=0.8)
    assert waits_of_a_step(params, 8) <= waits_of_a_step(params, 2) + 6
