"""Tiny targets with a tokenizer on disk, and drafters in either packaging that know a part of them.

The target is a random Llama whose attention matters little, so that the next token depends mostly on the last one. A
drafter's Markov head holds a low-rank copy of that dependence; the rest of it is random. Acceptance is then far from 0
and from 1, and depends on every part of the path.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints_util import DEEPSPEC, SPECULATORS, changed, random_weights, write_checkpoint
from tiny_target import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 32
LAYERS = 6
# vLLM pads nothing away here: 3 special tokens and 256 bytes.
VOCAB = 259
MAX_POSITIONS = 512


def write_target(folder: Path, vocab_size: int = VOCAB, spread: float = 2.0, seed: int = 0) -> Path:
    """A Llama with float32 weights and the byte tokenizer. vLLM's CPU attention takes no head_dim below 32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
        model.lm_head.weight.mul_(spread)
    model.save_pretrained(folder)
    if vocab_size == VOCAB:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def follow_logits(target: Path) -> torch.Tensor:
    """[V, V] float32: the target's logits after each single token."""
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.inference_mode():
        return model(torch.arange(model.config.vocab_size)[:, None]).logits[:, 0].float()


def write_drafter(
    folder: Path, target: Path, packaging: str = "deepspec", changes: Mapping[str, Any] | None = None, rank: int = 28
) -> Path:
    """A drafter for `target`; `changes` as in `checkpoints_util`. A reduced vocabulary keeps every second target id."""
    follow = follow_logits(target)
    vocab_size = follow.shape[0]
    base, section = (DEEPSPEC, "") if packaging == "deepspec" else (SPECULATORS, "transformer_layer_config.")
    fitted = {
        section + "vocab_size": vocab_size,
        section + "max_position_embeddings": MAX_POSITIONS,
        "mask_token_id": 0,
        "markov_rank": rank,
        "sample_from_anchor": packaging == "deepspec",
    }
    fitted |= {"num_target_layers": LAYERS} if packaging == "deepspec" else {"draft_vocab_size": vocab_size // 2}
    config = changed(base, fitted | dict(changes or {}))
    weights = random_weights(config)
    weights["lm_head.weight"] *= 0.05
    if config["markov_rank"]:
        kept = torch.arange(vocab_size)
        if "d2t" in weights:
            kept = weights["d2t"] + torch.arange(len(weights["d2t"]))
        left, scale, right = torch.linalg.svd(follow[:, kept], full_matrices=False)
        root = scale[:rank].sqrt()
        weights["markov_head.markov_w1.weight"] = left[:, :rank] * root
        weights["markov_head.markov_w2.weight"] = right[:rank].T * root
    return write_checkpoint(folder, config, weights)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
