"""The drafter's context rows in vLLM's paged cache.

vLLM allocates, shares and frees blocks; the drafter's layers join the target's block tables, so that a request's
context rows live and die with its target rows, prefix-cache hits and preemption included. Only committed context is
stored. The draft block's own keys and values stay outside the cache: they are never reused, and so no slot beyond the
request's own is ever written, and any number of block rows fits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec


class DraftContextMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Nothing to prepare: the layers are read and written by the proposer, not by the target's forward pass."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class DraftContextBackend(AttentionBackend):
    """Storage without kernels: any block size and any cache layout will do."""

    @staticmethod
    def get_name() -> str:
        return "DSPARK_CONTEXT"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("the drafter's context layers hold rows; they compute no attention in vLLM")

    @staticmethod
    def get_builder_cls() -> type[DraftContextMetadataBuilder]:
        return DraftContextMetadataBuilder


class DraftContextLayer(nn.Module, AttentionLayerBase):
    """The rows of one drafter layer.

    vLLM binds `kv_cache`, logical shape [blocks, kv heads, block size, 2 * head_dim]: keys, then values. All layers are
    declared as full attention; a layer's window is applied when the rows are read, so that drafters which mix windowed
    and full layers stay in one cache group.
    """

    is_draft_layer = True

    def __init__(self, name: str, num_heads: int, head_dim: int, dtype: torch.dtype, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.name, self.num_kv_heads, self.head_dim, self.dtype = name, num_heads, head_dim, dtype
        self.kv_cache = torch.empty(0)
        registered = vllm_config.compilation_config.static_forward_context
        assert name not in registered, f"layer {name} is registered twice"
        registered[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DraftContextBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )

    @property
    def block_size(self) -> int:
        """Rows of one block."""
        return self.kv_cache.shape[2]

    def store(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows.

        Args:
            slots: [T] int64, block * block size + row within the block.
            keys: [T, kv heads, head_dim].
            values: the same shape.
        """
        rows = torch.cat([keys, values], dim=-1)
        self.kv_cache[slots // self.block_size, :, slots % self.block_size] = rows


class PagedContext:
    """Context of a batch, read through block tables; to `Backbone.forward_block` what `RaggedKV` is.

    `lengths`: [B] int64, context rows of each request; row j of a request is absolute position j.
    """

    def __init__(self, layers: Sequence[DraftContextLayer], block_table: torch.Tensor, lengths: torch.Tensor) -> None:
        """`block_table`: [B, n] block ids; entries past a request's own blocks are read but never visible."""
        self.layers, self.block_table, self.lengths = layers, block_table.long(), lengths
        self.max_length = int(lengths.max())

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    def read(self, layer: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions 0..num_slots-1, two [B, kv heads, num_slots, head_dim]."""
        store = self.layers[layer]
        num_blocks = -(-num_slots // store.block_size)
        pages = store.kv_cache[self.block_table[:, :num_blocks]]  # [B, blocks, kv heads, block size, 2 * head_dim]
        rows = pages.transpose(1, 2).flatten(2, 3)[:, :, :num_slots]
        keys, values = rows.split(store.head_dim, dim=-1)
        return keys, values
