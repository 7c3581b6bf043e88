"""Recurrent layers of Hugging Face targets, run through a state that can be rolled back.

The forward pass of a recurrent layer in transformers updates its state in place, so a rejected draft could not be taken
back. `attach` gives each such layer of a model a second forward pass, used whenever the cache is this project's: the
same projections, norm and output, with the convolution and the recurrence of `RecurrentState`. With any other cache
the layer runs as transformers wrote it.

Where the two differ, on purpose: the sigmoid of beta is taken in float32 (transformers takes it in the model's dtype
and rounds it to bfloat16), and a float64 model computes in float64 throughout.
Source: transformers, `KimiLinearDeltaAttention`, `Qwen3NextGatedDeltaNet` and `Qwen3_5GatedDeltaNet`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn

from dspark.kernels.kda import Gate, Tokens
from dspark.rollback import RecurrentSpec, RecurrentState

RECURRENT_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")  # in `config.layer_types`


class ReplayLayer:
    """What a recurrent layer finds in place of a transformers cache layer: the state of the pass, and its number in
    it."""

    def __init__(self, state: RecurrentState, index: int) -> None:
        self.state, self.index = state, index


class ReplayedModule(ABC):
    """Forward pass of one recurrent module; stands in for the module's own wherever the cache holds a `ReplayLayer`."""

    def __init__(self, module: Any) -> None:
        self.module = module  # a class of transformers
        self.original = type(module).forward

    def __call__(self, hidden_states: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
        layer = None if cache is None else cache.layers[self.module.layer_idx]
        if not isinstance(layer, ReplayLayer):
            return self.original(self.module, hidden_states, cache=cache, **options)
        return self.run(hidden_states, layer.state, layer.index)

    @abstractmethod
    def run(self, hidden_states: torch.Tensor, state: RecurrentState, index: int) -> torch.Tensor:
        """Output [B, T, hidden] of the module for [B, T, hidden], as layer `index` of `state`."""

    @property
    @abstractmethod
    def spec(self) -> RecurrentSpec:
        """Sizes and gate; the state is float64 beside a float64 model and float32 beside any other."""


class KimiDeltaAttention(ReplayedModule):
    """`KimiLinearDeltaAttention`."""

    def run(self, hidden_states: torch.Tensor, state: RecurrentState, index: int) -> torch.Tensor:
        module, shape = self.module, (*hidden_states.shape[:2], -1, self.module.head_dim)
        projections, gate = (module.q_proj, module.k_proj, module.v_proj), module.forget_gate
        query, key, value = (project(hidden_states).view(shape) for project in projections)
        raw_gate = gate.f_b_proj(gate.f_a_proj(hidden_states)).view(shape)
        tokens = Tokens(query, key, value, raw_gate, module.b_proj(hidden_states))
        outputs = state.attend(index, tokens, module.conv1d.weight[:, 0])
        output_gate = module.g_b_proj(module.g_a_proj(hidden_states)).view(shape)
        return module.o_proj(module.o_norm(outputs, output_gate).flatten(2))

    @property
    def spec(self) -> RecurrentSpec:
        module, gate = self.module, self.module.forget_gate
        bias = gate.dt_bias.detach().view(module.num_heads, -1)
        return _spec(module, module.q_proj, module.head_dim, gate.A_log.detach().flatten(), bias)


class GatedDeltaNet(ReplayedModule):
    """Gated DeltaNet: KDA whose gate is one number a head instead of one a key channel, with fewer key heads than
    value heads.

    The number is repeated over the channels and the key over its heads, so records are as large as KDA's. Only the
    projections differ among the models.
    """

    def run(self, hidden_states: torch.Tensor, state: RecurrentState, index: int) -> torch.Tensor:
        module, lead = self.module, hidden_states.shape[:2]
        mixed, output_gate, beta, raw_gate = self._project(hidden_states)
        mixed = state.convolve(index, mixed, module.conv1d.weight[:, 0])
        query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        repeats = module.num_v_heads // module.num_k_heads
        query, key = (x.reshape(*lead, -1, module.head_k_dim).repeat_interleave(repeats, 2) for x in (query, key))
        value = value.reshape(*lead, -1, module.head_v_dim)
        outputs = state.attend(index, Tokens(query, key, value, raw_gate[..., None].expand_as(key), beta))
        return module.out_proj(module.norm(outputs, output_gate.reshape(value.shape)).flatten(2))

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Convolution inputs, output gate, raw beta and raw gate."""
        module = self.module
        if hasattr(module, "in_proj_qkv"):
            projections = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
            return tuple(project(hidden_states) for project in projections)
        packed = (module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states))
        query, key, value, output_gate, beta, raw_gate = module.fix_query_key_value_ordering(*packed)
        return torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1), output_gate, beta, raw_gate

    @property
    def spec(self) -> RecurrentSpec:
        module = self.module
        bias = module.dt_bias.detach()[:, None].repeat(1, module.head_k_dim)
        return _spec(module, module.out_proj, module.head_v_dim, module.A_log.detach(), bias)


def _spec(module: Any, projection: nn.Linear, value_dim: int, a_log: torch.Tensor, bias: torch.Tensor) -> RecurrentSpec:
    """`a_log` [H] and `bias` [H, K] make the gate; `projection` tells the type of activations."""
    dtype = projection.weight.dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return RecurrentSpec(
        gate=Gate(a_log.to(exact), bias.to(exact)),
        value_dim=value_dim,
        channels=module.conv_dim,
        conv_width=module.conv_kernel_size,
        dtype=dtype,
        state_dtype=exact,
    )


SUPPORTED: dict[str, type[ReplayedModule]] = {
    "KimiLinearDeltaAttention": KimiDeltaAttention,
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
}


def attach(layers: Sequence[nn.Module], layer_types: Sequence[str]) -> dict[int, ReplayedModule]:
    """Make the recurrent layers of a model able to run through a `RecurrentState`.

    Args:
        layers: the decoder layers.
        layer_types: `config.layer_types`, one per layer (or empty: no layer is recurrent).

    Returns:
        The recurrent layers by decoder layer index, in order.

    Raises:
        ValueError: a recurrent layer is of a class whose state cannot be undone here, or of a transformers too old.
    """
    found: dict[int, ReplayedModule] = {}
    for index, kind in enumerate(layer_types):
        if kind not in RECURRENT_TYPES:
            continue
        modules = [child for child in layers[index].children() if type(child).__name__ in SUPPORTED]
        if not modules:
            names = [type(child).__name__ for child in layers[index].children() if "Norm" not in type(child).__name__]
            raise ValueError(
                f"layer {index} of the target is recurrent ({kind}: {', '.join(names)}), and its state cannot be "
                "undone: a rejected draft would stay in it and the output would drift from the target's. Supported are "
                f"{', '.join(SUPPORTED)}; choose a target with those or with full attention only"
            )
        name = type(modules[0]).__name__
        if "cache" not in signature(type(modules[0]).forward).parameters:
            raise ValueError(
                f"layer {index}: {name} of transformers {transformers.__version__} has no argument `cache`, by which "
                "its state could be replaced by one that can be undone; install a newer transformers (5.24 has it)"
            )
        found[index] = SUPPORTED[name](modules[0])
    for layer in found.values():
        layer.module.forward = layer
    return found
