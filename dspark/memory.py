"""Bytes that a request's recurrent state takes, by the way in which rejected drafts are undone.

    snapshots    a state and a convolution page for every position of the window: T = K + 1 copies
    fold         one state, the inputs of one window, folded at every commit
    ring         one state, a ring of recent inputs, folded when it fills

A state is H V K numbers a layer. A record is one token's correction, key and gate, H (V s + 2 K a) bytes with s bytes
a number in the state and a in the activations: 1,024 bytes a head at K = V = 128, float32 and bfloat16. A convolution
column is one token's H (2 K + V) inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspark.rollback import ring_capacity

Scheme = Literal["snapshots", "fold", "ring"]
SCHEMES: tuple[Scheme, ...] = ("snapshots", "fold", "ring")


@dataclass(frozen=True)
class RecurrentSizes:
    """The recurrent layers of a target, on one device.

    Attributes:
        num_layers: KDA or Gated DeltaNet layers.
        num_heads: heads on this device.
        key_dim: K.
        value_dim: V.
        conv_width: W of the short convolution; W - 1 columns are its history.
        state_bytes: of one number in a state and in a correction, 4 or 2.
        activation_bytes: of one number in a recorded key or gate, and in a convolution column.
        num_key_heads: heads of queries and keys in the convolution, where they are fewer (Gated DeltaNet).
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    state_bytes: int = 4
    activation_bytes: int = 2
    num_key_heads: int | None = None

    @classmethod
    def from_config(cls, config: Any, *, tensor_parallel: int = 1, state_bytes: int = 4) -> "RecurrentSizes":
        """Read a model configuration, as transformers object or as the content of a config.json.

        Understands `linear_attn_config` (Kimi), `linear_num_heads` (Kimi in transformers) and `linear_num_value_heads`
        (Gated DeltaNet).

        Raises:
            ValueError: the model has no such layers, or its heads can't be divided.
        """
        fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        fields = fields.get("text_config") or fields
        kimi, types = fields.get("linear_attn_config") or {}, fields.get("layer_types") or ()
        layers = len(kimi.get("kda_layers") or ()) or sum(kind == "linear_attention" for kind in types)
        heads = kimi.get("num_heads") or fields.get("linear_num_heads") or fields.get("linear_num_value_heads")
        key_heads = heads if kimi else fields.get("linear_num_key_heads") or heads
        dim = kimi.get("head_dim") or fields.get("linear_head_dim")
        key_dim, value_dim = dim or fields.get("linear_key_head_dim"), dim or fields.get("linear_value_head_dim")
        width = kimi.get("short_conv_kernel_size") or fields.get("linear_conv_kernel_dim") or 4
        if not (layers and heads and key_heads and key_dim and value_dim):
            raise ValueError(
                f"model type {fields.get('model_type')!r} has no Kimi Delta Attention or Gated DeltaNet layers that "
                "are known here (no linear_attn_config, and no layer_types with linear_num_heads or "
                "linear_num_value_heads): there is no recurrent state to account for"
            )
        if tensor_parallel < 1 or heads % tensor_parallel or key_heads % tensor_parallel:
            raise ValueError(
                f"tensor_parallel={tensor_parallel} does not divide the {heads} heads (of keys: {key_heads}) of the "
                "recurrent layers"
            )
        shared = (heads // tensor_parallel, key_dim, value_dim, width, state_bytes)
        return cls(layers, *shared, num_key_heads=key_heads // tensor_parallel if key_heads != heads else None)

    @property
    def state(self) -> int:
        """Bytes of one state, all layers."""
        return self.num_layers * self.num_heads * self.key_dim * self.value_dim * self.state_bytes

    @property
    def record(self) -> int:
        """Bytes of one token's record, all layers."""
        head = self.value_dim * self.state_bytes + 2 * self.key_dim * self.activation_bytes
        return self.num_layers * self.num_heads * head

    @property
    def column(self) -> int:
        """Bytes of one token's convolution inputs, all layers."""
        key_heads = self.num_heads if self.num_key_heads is None else self.num_key_heads
        channels = 2 * key_heads * self.key_dim + self.num_heads * self.value_dim
        return self.num_layers * channels * self.activation_bytes


@dataclass(frozen=True)
class RecurrentMemory:
    """Bytes a request: its `states`, the `records` of recent tokens, and its convolution `window`."""

    states: int
    records: int
    window: int

    @property
    def total(self) -> int:
        return self.states + self.records + self.window


def recurrent_memory(sizes: RecurrentSizes, num_draft_tokens: int, scheme: Scheme = "ring") -> RecurrentMemory:
    """What one running request takes.

    Args:
        sizes: the target's recurrent layers.
        num_draft_tokens: K; a step verifies K + 1 tokens.
        scheme: how rejected drafts are undone; "ring" and "fold" are what `RecurrentState` allocates with and without
            deferred folding.

    Raises:
        ValueError: the scheme is unknown, or K is negative.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is unknown; choose among {', '.join(SCHEMES)}")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} must be at least 0")
    window, history = num_draft_tokens + 1, sizes.conv_width - 1
    if scheme == "snapshots":  # a page must hold the history behind any of the window's positions
        return RecurrentMemory(window * sizes.state, 0, window * (history + num_draft_tokens) * sizes.column)
    rows = ring_capacity(window) if scheme == "ring" else window
    return RecurrentMemory(sizes.state, rows * sizes.record, (history + window) * sizes.column)


def describe_memory(sizes: RecurrentSizes, num_draft_tokens: int) -> list[str]:
    """One line a scheme for people: MiB a request and its parts."""
    lines = []
    for scheme in SCHEMES:
        memory = recurrent_memory(sizes, num_draft_tokens, scheme)
        parts = ", ".join(f"{name} {value / 2**20:.2f}" for name, value in vars(memory).items() if value)
        lines.append(f"{scheme}: {memory.total / 2**20:.2f} MiB a request ({parts})")
    return lines
