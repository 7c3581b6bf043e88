"""A second drafter, written from the format description alone in numpy float64.

It shares no code and no structure with `dspark`: nothing is cached, every round starts again from all committed taps,
and requests, rows and heads are Python loops, so a formula stands here as it stands in the description.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.config import DrafterConfig, RopeConfig

Array = np.ndarray


@dataclass(frozen=True)
class ReferenceRound:
    """One request's round: corrected logits [K, D], confidence logits [K] or None, tokens [K] (target ids)."""

    logits: Array
    confidence: Array | None
    tokens: list[int]


class ReferenceDrafter:
    """Computes a round from a config, the checkpoint's tensors and the target's two matrices."""

    def __init__(
        self, config: DrafterConfig, tensors: dict[str, Array], target_embedding: Array, target_head: Array
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.embedding = tensors.get("embed_tokens.weight", target_embedding)
        self.head = tensors.get("lm_head.weight", target_head)
        self.target_vocab_size = target_embedding.shape[0]

    def block_hidden(self, taps: Array, anchor: int) -> Array:
        """Hidden states of the whole block.

        Args:
            taps: [s, num_taps * target_hidden] of all committed tokens, positions 0..s-1.
            anchor: the token at position s.

        Returns:
            [block_size, hidden] after the final norm.
        """
        config, eps = self.config, self.config.rms_norm_eps
        start = taps.shape[0]
        context = rms_norm(taps @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"], eps)
        ids = [anchor] + [config.mask_token_id] * (config.block_size - 1)
        x = np.stack([self.embedding[i] for i in ids])
        for layer in range(config.num_layers):
            weights = {
                name.removeprefix(f"layers.{layer}."): value
                for name, value in self.tensors.items()
                if name.startswith(f"layers.{layer}.")
            }
            x = x + self._attention(layer, weights, context, rms_norm(x, weights["input_layernorm.weight"], eps), start)
            y = rms_norm(x, weights["post_attention_layernorm.weight"], eps)
            gate = y @ weights["mlp.gate_proj.weight"].T
            up = y @ weights["mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["mlp.down_proj.weight"].T
        return rms_norm(x, self.tensors["norm.weight"], eps)

    def _attention(self, layer: int, weights: dict[str, Array], context: Array, block: Array, start: int) -> Array:
        """Rows of the block over the visible context and the block: section 6. [block_size, hidden]."""
        config, setting = self.config, self.config.layers[layer]
        groups = config.num_attention_heads // config.num_key_value_heads
        first = 0 if setting.window is None else max(0, start - setting.window)

        def heads(name: str, rows: Array, count: int) -> Array:
            out = rows @ weights[f"self_attn.{name}_proj.weight"].T + weights.get(f"self_attn.{name}_proj.bias", 0.0)
            return out.reshape(len(rows), count, config.head_dim)

        def rotated(name: str, rows: Array, count: int, position: int) -> Array:
            out = rms_norm(heads(name, rows, count), weights[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
            frequencies, scale = rope_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
            return np.stack([rotate(row, (position + t) * frequencies, scale) for t, row in enumerate(out)])

        kv = config.num_key_value_heads
        queries = rotated("q", block, config.num_attention_heads, start)
        block_keys, block_values = rotated("k", block, kv, start), heads("v", block, kv)
        context_keys, context_values = rotated("k", context[first:], kv, first), heads("v", context[first:], kv)
        out = np.zeros((config.block_size, config.num_attention_heads, config.head_dim))
        for row in range(config.block_size):
            seen = row + 1 if setting.causal else config.block_size
            for head in range(config.num_attention_heads):
                keys = np.concatenate([context_keys[:, head // groups], block_keys[:seen, head // groups]])
                values = np.concatenate([context_values[:, head // groups], block_values[:seen, head // groups]])
                scores = keys @ queries[row, head] / math.sqrt(config.head_dim)
                weight = np.exp(scores - scores.max())
                out[row, head] = weight @ values / weight.sum()
        flat = out.reshape(config.block_size, -1)
        return flat @ weights["self_attn.o_proj.weight"].T + weights.get("self_attn.o_proj.bias", 0.0)

    def target_ids(self) -> list[int]:
        """Target id of each draft logit; rows of a padded head beyond the target's vocabulary are cropped."""
        if "d2t" in self.tensors:
            return [i + int(offset) for i, offset in enumerate(self.tensors["d2t"])]
        return list(range(min(self.config.draft_vocab_size, self.target_vocab_size)))

    def chain(
        self, hidden: Array, anchor: int, num_draft_tokens: int, pick: Callable[[int, Array], int]
    ) -> ReferenceRound:
        """Left to right over the draft rows: section 7.

        Args:
            hidden: [block_size, hidden] of `block_hidden`.
            anchor: the token before the first draft.
            num_draft_tokens: K.
            pick: called with i and the corrected logits of draft i; returns its target id.
        """
        config, ids = self.config, self.target_ids()
        prev, state = anchor, np.zeros(config.markov_rank)
        logits, confidence, tokens = [], [], []
        for row in range(num_draft_tokens + (0 if config.anchor_first else 1)):
            bias, state = self._bias(hidden[row], prev, state)
            if row == 0 and not config.anchor_first:
                continue  # row 0 re-states the anchor: it moves the rnn state and drafts nothing
            corrected = config.logit_scale * (self.head @ hidden[row] + bias)[: len(ids)]
            confidence.append(self._confidence(hidden[row], prev))
            logits.append(corrected)
            tokens.append(pick(len(tokens), corrected))
            prev = tokens[-1]
        return ReferenceRound(np.stack(logits), None if config.confidence == "none" else np.array(confidence), tokens)

    def _bias(self, hidden: Array, prev: int, state: Array) -> tuple[Array | float, Array]:
        """Markov bias of one row and the next rnn state: section 7.2."""
        kind, w = self.config.markov_kind, self.tensors
        if kind == "none":
            return 0.0, state
        embedded = w["markov_head.markov_w1.weight"][prev]
        if kind == "vanilla":
            features = embedded
        elif kind == "gated":
            joint = np.concatenate([hidden, embedded])
            features = sigmoid(w["markov_head.gate_proj.weight"] @ joint + w["markov_head.gate_proj.bias"]) * embedded
        else:
            joint = np.concatenate([state, embedded, hidden])
            z = w["markov_head.joint_proj.weight"] @ joint + w["markov_head.joint_proj.bias"]
            gate, candidate, out = np.split(z, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            features = np.tanh(out)
        return w["markov_head.markov_w2.weight"] @ features, state

    def _confidence(self, hidden: Array, prev: int) -> float:
        """Logit that a draft survives: section 7.4."""
        if self.config.confidence == "none":
            return math.nan
        features = hidden
        if self.config.confidence == "hidden+markov":
            features = np.concatenate([hidden, self.tensors["markov_head.markov_w1.weight"][prev]])
        return float(
            self.tensors["confidence_head.proj.weight"][0] @ features + self.tensors["confidence_head.proj.bias"][0]
        )

    def greedy(self, hidden: Array, anchor: int, num_draft_tokens: int) -> ReferenceRound:
        """The chain that takes the most probable draft at each row."""
        ids = self.target_ids()
        return self.chain(hidden, anchor, num_draft_tokens, lambda _, logits: ids[int(np.argmax(logits))])

    def forced(self, hidden: Array, anchor: int, tokens: Sequence[int]) -> ReferenceRound:
        """The chain along given tokens."""
        return self.chain(hidden, anchor, len(tokens), lambda i, _: tokens[i])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis."""
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rotate(heads: Array, angles: Array, scale: float) -> Array:
    """Rotate [heads, head_dim] by pairs (i, i + head_dim/2)."""
    low, high = np.split(heads, 2, axis=-1)
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Array, float]:
    """Angle per position of each pair, and the factor on cos and sin."""
    plain = np.array([rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    if rope.rope_type == "default":
        return plain, 1.0
    factor = rope.scaling["factor"]
    if rope.rope_type == "linear":
        return plain / factor, 1.0
    trained = rope.scaling.get("original_max_position_embeddings", max_positions)
    if rope.rope_type == "llama3":
        low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
        turns = trained * plain / (2 * math.pi)  # full turns of a pair within the trained length
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    assert rope.rope_type == "yarn"

    def pair_with(turns: float) -> float:
        """Index of the pair that makes so many turns within the trained length."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(pair_with(rope.scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(pair_with(rope.scaling.get("beta_slow", 1))), head_dim - 1)
    interpolated = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0, 1)
    frequencies = interpolated * plain / factor + (1 - interpolated) * plain
    return frequencies, rope.scaling.get("attention_factor", 0.1 * math.log(factor) + 1)
