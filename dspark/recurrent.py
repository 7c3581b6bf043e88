"""Recurrent layers of Hugging Face targets, run through a state that can be rolled back.

The forward pass of a KDA layer in transformers updates its state in place, so a rejected draft could not be taken
back. `attach` gives each KDA layer of a model a second forward pass, used whenever the cache is this project's: the
same projections, norm and output, with the convolution and the recurrence of `RecurrentState`. With any other cache
the layer runs as transformers wrote it.

Where the two differ, on purpose: the sigmoid of beta is taken in float32 (transformers takes it in the model's dtype
and rounds it to bfloat16), and a float64 model computes in float64 throughout.
Source: transformers, models/kimi_linear/modeling_kimi_linear.py, `KimiLinearDeltaAttention`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dspark.kernels.kda import Gate, Tokens
from dspark.rollback import RecurrentSpec, RecurrentState

RECURRENT_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")  # in `config.layer_types`
_SUPPORTED = "KimiLinearDeltaAttention"


class ReplayLayer:
    """What a KDA layer finds in place of a transformers cache layer: the state of the pass under way and the layer's
    number in it."""

    def __init__(self, state: RecurrentState, index: int) -> None:
        self.state, self.index = state, index


class KimiDeltaAttention:
    """Forward pass of one `KimiLinearDeltaAttention`; replaces the module's own wherever the cache holds a
    `ReplayLayer`."""

    def __init__(self, module: Any) -> None:
        self.module = module  # transformers' class; only its documented parts are used
        self.original = type(module).forward

    def __call__(self, hidden_states: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
        layer = None if cache is None else cache.layers[self.module.layer_idx]
        if not isinstance(layer, ReplayLayer):
            return self.original(self.module, hidden_states, cache=cache, **options)
        module, shape = self.module, (*hidden_states.shape[:2], -1, self.module.head_dim)
        projections = (module.q_proj, module.k_proj, module.v_proj)
        mixed = torch.cat([project(hidden_states) for project in projections], dim=-1)
        mixed = layer.state.convolve(layer.index, mixed, module.conv1d.weight[:, 0])
        query, key, value = (part.view(shape) for part in mixed.chunk(3, dim=-1))
        gate = module.forget_gate
        raw_gate = gate.f_b_proj(gate.f_a_proj(hidden_states)).view(shape)
        tokens = Tokens(query, key, value, raw_gate, module.b_proj(hidden_states))
        outputs = layer.state.attend(layer.index, tokens)
        output_gate = module.g_b_proj(module.g_a_proj(hidden_states)).view(shape)
        return module.o_proj(module.o_norm(outputs, output_gate).flatten(2))

    @property
    def spec(self) -> RecurrentSpec:
        """Sizes and gate; the state is float64 beside a float64 model and float32 beside any other."""
        module, gate = self.module, self.module.forget_gate
        dtype = module.q_proj.weight.dtype
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return RecurrentSpec(
            gate=Gate(
                gate.A_log.detach().flatten().to(exact), gate.dt_bias.detach().view(module.num_heads, -1).to(exact)
            ),
            value_dim=module.head_dim,
            conv_width=module.conv_kernel_size,
            dtype=dtype,
            state_dtype=exact,
        )


def attach(layers: Sequence[nn.Module], layer_types: Sequence[str]) -> dict[int, KimiDeltaAttention]:
    """Make the recurrent layers of a model able to run through a `RecurrentState`.

    Args:
        layers: the decoder layers.
        layer_types: `config.layer_types`, one per layer (or empty: no layer is recurrent).

    Returns:
        The recurrent layers by decoder layer index, in order.

    Raises:
        ValueError: a recurrent layer is of a class whose state cannot be undone here.
    """
    found: dict[int, KimiDeltaAttention] = {}
    for index, kind in enumerate(layer_types):
        if kind not in RECURRENT_TYPES:
            continue
        module = getattr(layers[index], "self_attn", layers[index])
        if type(module).__name__ != _SUPPORTED:
            names = [type(child).__name__ for child in layers[index].children() if "Norm" not in type(child).__name__]
            raise ValueError(
                f"layer {index} of the target is recurrent ({kind}: {', '.join(names)}), and its state cannot be "
                f"undone: a rejected draft would stay in it and "
                f"the output would drift from the target's. Supported is Kimi Delta Attention ({_SUPPORTED}); choose "
                f"a target with that or with full attention only"
            )
        found[index] = KimiDeltaAttention(module)
    for layer in found.values():
        layer.module.forward = layer
    return found
