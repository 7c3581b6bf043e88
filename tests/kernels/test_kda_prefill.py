"""Prefill in chunks is the recurrence, for every length, gate and padding."""

import pytest
import torch
from kda_cases import BOUNDED, SOFTPLUS, close, cut, draw, pad, plain, random_gate, random_tokens

from dspark.kernels.kda_prefill import kda_prefill

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("lower_bound", [SOFTPLUS, BOUNDED, -50.0])
@pytest.mark.parametrize("longest", [1, 15, 16, 17, 40])
def test_ragged_prompts_end_in_their_own_state(lower_bound, longest):
    gate = random_gate(2, 5, lower_bound)
    line = random_tokens(4, longest, 2, 5, 3)
    lengths = [longest, 1, max(1, longest - 1), 0]
    start = draw(4, 2, 3, 5, seed=1, dtype=torch.float64)
    tokens = pad([cut(line, row, 0, length) for row, length in enumerate(lengths)], longest)
    outputs, states = kda_prefill(tokens, gate, start, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        expected, state = plain(cut(line, row, 0, length), gate, start[row : row + 1], length)
        close(states[row], state[0], 1e-12)
        assert not outputs[row, length:].any()
        if length:
            close(outputs[row, :length], torch.cat(expected, 1)[0], 1e-12)


def test_float32_is_as_near_to_float64_as_the_recurrence():
    gate, tokens = random_gate(2, 16, dtype=torch.float32), random_tokens(1, 300, 2, 16, 16, dtype=torch.float32)
    zero = torch.zeros(1, 2, 16, 16)
    exact = type(tokens)(*(x.double() for x in vars(tokens).values()))
    truth = plain(exact, gate, zero.double(), 300)[1]
    close(kda_prefill(tokens, gate, zero, torch.tensor([300]))[1], truth, 1e-6)
