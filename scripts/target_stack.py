"""The target as a stack of fused matrices, for the two programs that run it over millions of tokens.

Hugging Face's layers launch some twenty kernels each. Here a layer is two functions around its attention, `enter`
(norm, one product for q, k and v, RoPE) and `leave` (output product, norm, gated MLP), over a flat list of rows:
compiled once, they serve every layer, every bucket of sequence lengths in training and every decoding step in data
generation. Only Llama-type targets are read; anything else is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspark.backbone import rotate
from dspark.target import HFTarget

# Flash on a GPU in half precision, the plain product otherwise. The fused kernels that plan per shape would plan anew
# for each bucket.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; `qkv` stacks the rows of q, k and v, `gate_up` those of gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def enter(
    x: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual rows x [M, hidden] -> rotated queries [M, heads, d], rotated keys and values [M, kv heads, d]."""
    cos, sin = tables
    projected = F.linear(F.rms_norm(x, norm.shape, norm, eps), qkv).unflatten(-1, (-1, 2 * cos.shape[-1]))
    kv_heads = (projected.shape[1] - heads) // 2
    queries, keys, values = projected.split([heads, kv_heads, kv_heads], dim=1)
    return rotate(queries, cos, sin), rotate(keys, cos, sin), values.contiguous()


def leave(
    x: torch.Tensor,
    attended: torch.Tensor,
    output: torch.Tensor,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Residual rows x [M, hidden] and attention output [M, heads * d] -> residual rows after the layer."""
    x = x + F.linear(attended, output)
    gate, up = F.linear(F.rms_norm(x, norm.shape, norm, eps), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


class TargetStack:
    """Weights of a Llama-type target and the passes over them. Nothing here is differentiable."""

    def __init__(self, target: HFTarget, *, compile: bool) -> None:
        """Fuse the weights of a loaded target; the copies keep its dtype and device.

        Raises:
            ValueError: the target is not of the Llama form that these passes compute.
        """
        config = target.config
        refuse_other_forms(config)
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        self.theta: float = config.rope_parameters["rope_theta"]
        self.embedding = target.input_embedding.detach()
        self.head = target.output_head.detach()
        self.final_norm = target.model.get_decoder().norm.weight.detach()
        self.layers = [fused(layer) for layer in target.layers]
        self.num_layers = len(self.layers)
        self._enter: Callable[..., Any] = torch.compile(enter, dynamic=False) if compile else enter
        self._leave: Callable[..., Any] = torch.compile(leave, dynamic=False) if compile else leave

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def rotary_tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [num_positions, 1, d / 2] of the target's dtype; angles in float64."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=self.device) / self.head_dim
        angles = torch.arange(num_positions, device=self.device)[:, None, None].double() * self.theta**-exponents
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def layer(
        self,
        index: int,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """One decoder layer over rows x [M, hidden]; `attend(index, q, k, v)` returns [M, heads * d]."""
        own = self.layers[index]
        queries, keys, values = self._enter(x, own.input_norm, own.qkv, tables, self.heads, self.eps)
        attended = attend(index, queries, keys, values)
        return self._leave(x, attended, own.output, own.mlp_norm, own.gate_up, own.down, self.eps)

    def final(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm: residual rows -> rows that the output head reads."""
        return F.rms_norm(x, self.final_norm.shape, self.final_norm, self.eps)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, tap_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal pass over whole sequences, each from position 0; padding belongs at the end of a row.

        Args:
            tokens: [N, L] int64.
            tap_ids: Hugging Face `hidden_states` indices, increasing: k is the raw output of layer k - 1, 0 the
                embedding.

        Returns:
            taps [N * L, num_taps * hidden] and final normed hidden states [N * L, hidden], row n * L + t for position t
            of sequence n.
        """
        num_sequences, length = tokens.shape
        cos, sin = (table.repeat(num_sequences, 1, 1) for table in self.rotary_tables(length))

        def attend(_: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            q, k, v = (rows.unflatten(0, (num_sequences, length)).transpose(1, 2) for rows in (queries, keys, values))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return attended.transpose(1, 2).reshape(num_sequences * length, -1)

        x = F.embedding(tokens.flatten(), self.embedding)
        states = [x] if 0 in tap_ids else []
        with sdpa_kernel(ATTENTION_BACKENDS):
            for index in range(self.num_layers):
                x = self.layer(index, x, (cos, sin), attend)
                if index + 1 in tap_ids:
                    states.append(x)
        return torch.cat(states, dim=-1), self.final(x)


def fused(layer: Any) -> LayerWeights:
    """Weights of one Hugging Face Llama layer, concatenated."""
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach(),
        output=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
        down=mlp.down_proj.weight.detach(),
    )


def refuse_other_forms(config: Any) -> None:
    """ValueError for a target that the fused passes would compute wrongly."""
    facts = {
        "model_type": (config.model_type, "llama"),
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (bool(getattr(config, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(config, "mlp_bias", False)), False),
        "rope_type": (config.rope_parameters.get("rope_type", "default"), "default"),
    }
    for name, (value, expected) in facts.items():
        if value != expected:
            raise ValueError(
                f"the target has {name}={value!r}, and the training programs compute Llama layers with {expected!r} "
                "only: its hidden states would be wrong, and with them everything the drafter learns. "
                "Extend scripts/target_stack.py first"
            )
