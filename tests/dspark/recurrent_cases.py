"""Lines of layer inputs for `RecurrentState`: what a token gives a layer depends on its request and position alone."""

import torch

from dspark.kernels.kda import Gate, Tokens
from dspark.rollback import RecurrentSpec

HEADS, KEY_DIM, VALUE_DIM, WIDTH, LAYERS = 2, 5, 3, 4, 2


def specs(count=LAYERS):
    g = torch.Generator().manual_seed(0)
    draw = [torch.randn(HEADS, KEY_DIM, generator=g, dtype=torch.float64) for _ in range(count)]
    rate = torch.tensor([-2.0, 0.5], dtype=torch.float64)
    return [
        RecurrentSpec(
            Gate(rate, bias, -5.0), VALUE_DIM, HEADS * (2 * KEY_DIM + VALUE_DIM), WIDTH, torch.float64, torch.float64
        )
        for bias in draw
    ]


WEIGHT = torch.randn(specs()[0].channels, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def inputs(seeds, start, count):
    """Rows [B, count, ...] of each request's line from position `start[b]`; a token's values depend on (seed,
    position) alone."""
    rows = []
    for seed, first in zip(seeds, start, strict=True):
        width = specs()[0].channels + HEADS * (KEY_DIM + 1)
        drawn = [
            torch.randn(width, generator=torch.Generator().manual_seed(seed * 4096 + p), dtype=torch.float64)
            for p in range(first, first + count)
        ]
        rows.append(torch.stack(drawn) if drawn else torch.zeros(0, width, dtype=torch.float64))
    return torch.stack(rows)


def layer_tokens(mixed, rest):
    """Split convolved channels and the rest of the inputs into a layer's tokens."""
    batch, count = mixed.shape[:2]
    query, key, value = mixed.split([HEADS * KEY_DIM, HEADS * KEY_DIM, HEADS * VALUE_DIM], dim=-1)
    gate, beta = rest.split([HEADS * KEY_DIM, HEADS], dim=-1)
    shape = (batch, count, HEADS, -1)
    return Tokens(query.reshape(shape), key.reshape(shape), value.reshape(shape), gate.reshape(shape), beta)


def run(state, rows, prompt_lengths=None):
    """One pass of all layers over inputs [B, T, ...]; returns the outputs of the last layer. The first layer's
    convolution is a call of its own, the others' are part of the attention's."""
    state.begin(rows.shape[1], prompt_lengths)
    channels = specs()[0].channels
    for layer in range(LAYERS):
        raw, rest = rows[..., :channels], rows[..., channels:]
        weight = WEIGHT.to(rows)
        mixed = state.convolve(layer, raw, weight) if layer == 0 else raw
        outputs = state.attend(layer, layer_tokens(mixed, rest), None if layer == 0 else weight)
    return outputs
