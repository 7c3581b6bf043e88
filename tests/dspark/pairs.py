"""Tiny targets and drafters for tests: random ones, and a counting pair whose acceptance is known by construction."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.drafter import Drafter
from dspark.target import HFTarget

HIDDEN = 32
LAYERS = 4
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def tiny_target(
    vocab_size=16, family="llama", seed=0, dtype=torch.float64, max_positions=256, spread=3.0, **changes
) -> HFTarget:
    """A random causal LM. `spread` scales the head, so that the distributions are neither flat nor one-hot; `changes`
    replace fields of its configuration."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.3,
    }
    model = model_class(config_class(**fields | changes)).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(spread)
    return HFTarget(model)


def drafter_config(vocab_size=16, **changes) -> DrafterConfig:
    """A drafter for `tiny_target`, two layers, four rows."""
    fields = {
        "family": "deepspec_qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "block_size": 4,
        "anchor_first": True,
        "mask_token_id": vocab_size - 1,
        "tap_ids": (1, 3),
        "target_hidden_size": HIDDEN,
        "rope": RopeConfig(10000.0),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "markov_kind": "vanilla",
        "markov_rank": 8,
        "confidence": "hidden+markov",
    }
    fields |= changes
    fields.setdefault("layers", (LayerConfig(),) * fields["num_layers"])
    return DrafterConfig(**fields)


def tiny_drafter(config: DrafterConfig, target: HFTarget, seed=1, dtype=torch.float64) -> Drafter:
    """Random weights, large enough that drafts depend on everything; `d2t` keeps every other target id first."""
    torch.manual_seed(seed)
    drafter = Drafter(config).to(dtype).requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.5 if "markov" in name or "head" in name else 0.3)
    if drafter.d2t is not None:
        ids = torch.arange(config.draft_vocab_size)
        drafter.d2t.copy_(torch.minimum(ids, torch.tensor(config.vocab_size - config.draft_vocab_size)))
    drafter.share(target.input_embedding, target.output_head, target.vocab_size)
    return drafter.eval()


def counting_pair(vocab_size=32, wrong_after=(), dtype=torch.float64, **changes) -> tuple[HFTarget, Drafter]:
    """A target that always continues t with t + 1 (modulo the vocabulary), and a drafter that does the same by its
    Markov head.

    After a token in `wrong_after` the drafter proposes t + 2 instead, so every accepted length is known beforehand.
    """
    target = tiny_target(vocab_size, dtype=dtype)
    ids = torch.arange(vocab_size)
    with torch.no_grad():
        for layer in target.layers:  # the residual stream stays the embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        basis = torch.zeros(vocab_size, HIDDEN, dtype=dtype)
        basis[ids, ids % HIDDEN] = 1.0
        target.input_embedding.copy_(basis)
        target.output_head.copy_(20 * basis.roll(1, dims=0))
    drafter = tiny_drafter(drafter_config(vocab_size, markov_rank=vocab_size, **changes), target, dtype=dtype)
    drafter.lm_head.weight.zero_()
    drafter.markov_head.markov_w1.weight.copy_(torch.eye(vocab_size, dtype=dtype))
    follow = torch.zeros(vocab_size, vocab_size, dtype=dtype)
    for token in range(vocab_size):
        follow[(token + (2 if token in wrong_after else 1)) % vocab_size, token] = 20.0
    drafter.markov_head.markov_w2.weight.copy_(follow)
    return target, drafter
