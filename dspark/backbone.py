"""The block-diffusion backbone: context key/value injection and one bidirectional pass over a draft block.

    ctx      = hidden_norm(fc(concat(taps)))                            once per committed token, for all layers
    context    K_ctx = rope(k_norm(k_proj(ctx))), V_ctx = v_proj(ctx)   kept in the draft cache, positions 0..s-1
    block      x = embed([anchor, mask, mask, ...])                     at positions s, s+1, ...
               per layer attention over [K_ctx ; K_block], then the MLP
    hidden   = norm(x)

The block's own keys and values come from mask embeddings and are dropped after the pass. Context rows skip the
layers' `input_layernorm`.
Source: DeepSpec, modeling/dspark, whose Qwen3 drafter also gives modules and tensors their names; windows and
causality also speculators, models/dspark.
"""

from collections.abc import Sequence
from functools import cache as memoize
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.cache import RaggedKV
from dspark.config import DrafterConfig, LayerConfig

# Without cuDNN, which PyTorch prefers for masked attention on recent GPUs: it builds a plan for each new shape, and the
# context grows with every step.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last axis, computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@memoize
def inverse_frequencies(config: DrafterConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """Rotary frequencies and the factor on cos and sin (other than 1 for YaRN).

    Returns:
        [head_dim / 2] float64 radians per position; and the attention factor. Scaled types come from transformers,
        which computes them in float32.
    """
    rope = config.rope
    if rope.rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        return (rope.theta**-exponents).to(device), 1.0
    described = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": rope.rope_type, "rope_theta": rope.theta, **dict(rope.scaling)},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope.rope_type](described, torch.device("cpu"))
    return frequencies.double().to(device), float(attention_factor)


def rotary_tables(
    config: DrafterConfig, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for absolute `positions` [B, T]: two [B, T, 1, head_dim / 2] tensors of `dtype`.

    Angles are formed in float64: at position 30,000 float32 would already be wrong in the third decimal of the fastest
    frequency.
    """
    frequencies, factor = inverse_frequencies(config, positions.device)
    angles = positions[..., None, None].double() * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x [..., heads, head_dim] with tables [..., 1, head_dim / 2], the two halves of the head as the pair
    (neox order).
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DrafterAttention(nn.Module):
    """Grouped-query attention of block rows over cached context rows and the block itself."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, R, hidden] -> [B, R, heads, head_dim], normed and rotated."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, R, hidden] -> keys (normed and rotated) and values, [B, R, kv heads, head_dim] each. The same for
        context and block rows.
        """
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Softmax attention and output projection.

        Args:
            queries: [B, R, heads, head_dim].
            keys: [B, S, kv heads, head_dim].
            values: [B, S, kv heads, head_dim].
            mask: [B, 1, R, S], `additive`.

        Returns:
            [B, R, hidden].
        """
        group = queries.shape[2] // keys.shape[2]
        with sdpa_kernel(ATTENTION_BACKENDS):
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys.transpose(1, 2).repeat_interleave(group, dim=1),
                values.transpose(1, 2).repeat_interleave(group, dim=1),
                attn_mask=mask,
            )
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class DrafterMLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm residual layer: attention, then MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = DrafterMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Backbone(nn.Module):
    """Context projection, draft layers and final norm. `Drafter` adds embedding and heads."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def draft_layers(self) -> list[DrafterLayer]:
        """`layers`, typed."""
        return cast(list[DrafterLayer], list(self.layers))

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def context_features(self, taps: torch.Tensor) -> torch.Tensor:
        """Fuse target states: [B, T, num_taps * target_hidden] of any float dtype -> [B, T, hidden]."""
        return self.hidden_norm(self.fc(taps.to(self.dtype)))

    def write_context(self, cache: RaggedKV, taps: torch.Tensor, num_rows: Sequence[int]) -> None:
        """Store context keys and values of newly committed tokens behind the cached ones (the caller advances the
        cache).

        Args:
            cache: context of B requests.
            taps: [B, T, num_taps * target_hidden], row t of request b belongs to position `cache.lengths[b] + t`.
            num_rows: [B], how many of the T = max(num_rows) rows were committed. Rejected rows are not stored.
        """
        features = self.context_features(taps)
        place = cache.place(num_rows)
        positions = cache.lengths[:, None] + torch.arange(taps.shape[1], device=taps.device)
        cos, sin = rotary_tables(self.config, positions, self.dtype)
        for index, layer in enumerate(self.draft_layers):
            keys, values = layer.self_attn.keys_values(features, cos, sin)
            cache.write(index, keys, values, place)

    def forward_block(self, cache: RaggedKV, embedded: torch.Tensor) -> torch.Tensor:
        """One pass over the block.

        Args:
            cache: context of B requests; not changed.
            embedded: [B, rows, hidden], embeddings of [anchor, mask, ...]; row k of request b stands at position
                `cache.lengths[b] + k`.

        Returns:
            [B, rows, hidden] after the final norm.
        """
        num_rows = embedded.shape[1]
        positions = cache.lengths[:, None] + torch.arange(num_rows, device=embedded.device)
        cos, sin = rotary_tables(self.config, positions, self.dtype)
        masks = {
            each: additive(block_mask(cache.lengths, cache.max_length, num_rows, each), self.dtype)
            for each in set(self.config.layers)
        }
        x = embedded
        for index, (layer, settings) in enumerate(zip(self.draft_layers, self.config.layers, strict=True)):
            normed = layer.input_layernorm(x)
            keys, values = layer.self_attn.keys_values(normed, cos, sin)
            if cache.max_length:
                context_keys, context_values = cache.read(index, cache.max_length)
                keys = torch.cat([context_keys.transpose(1, 2), keys], dim=1)
                values = torch.cat([context_values.transpose(1, 2), values], dim=1)
            x = x + layer.self_attn.attend(layer.self_attn.queries(normed, cos, sin), keys, values, masks[settings])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask [..., S] bool as attention adds it to its scores, 0 or -inf; once, where it would be made in every layer.
    Some targets' attention takes no other.

    Rows start at multiples of 8 entries: kernels of a GPU copy others once more.
    """
    width = visible.shape[-1]
    mask = torch.zeros(*visible.shape[:-1], -(-width // 8) * 8, dtype=dtype, device=visible.device)[..., :width]
    return mask.masked_fill_(~visible, float("-inf"))


def block_mask(lengths: torch.Tensor, num_slots: int, num_rows: int, settings: LayerConfig) -> torch.Tensor:
    """What block rows see: committed context inside the layer's window, then their own block.

    Args:
        lengths: [B] int64, committed context of each request.
        num_slots: context slots in the key tensor.
        num_rows: rows of the block.
        settings: window and causality of the layer. The window is anchored at the block: every row sees context
            positions >= length - window.

    Returns:
        [B, 1, num_rows, num_slots + num_rows] bool, True = visible.
    """
    slots = torch.arange(num_slots, device=lengths.device)
    context = slots < lengths[:, None]
    if settings.window is not None:
        context &= slots >= lengths[:, None] - settings.window
    block = torch.ones(num_rows, num_rows, dtype=torch.bool, device=lengths.device)
    if settings.causal:
        block = block.tril()
    batch_size = lengths.shape[0]
    return torch.cat(
        [context[:, None, None, :].expand(-1, 1, num_rows, -1), block.expand(batch_size, 1, -1, -1)], dim=-1
    )
