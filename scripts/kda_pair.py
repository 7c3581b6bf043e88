"""A tiny random Kimi target with a DSpark drafter that guesses it in part; nothing is trained, nothing is downloaded.

The next token of the target depends on the last one through a fixed permutation sigma, and on everything before it
through its recurrent layers: the row of the output head of token y is A e[sigma^-1(y)] + B r[y], with e the embeddings
and r random, so that sigma(x) wins over the other logits in about two places of three. The drafter's Markov head knows
sigma. Greedy and sampled acceptance are then far from 0 and from 1, and a wrong recurrent state shows in the tokens.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, INTERMEDIATE = 1024, 256, 8, 256
HEADS, HEAD_DIM, WIDTH = 2, 128, 4
MLA_HEADS, KV_RANK, NOPE, ROPE, VALUE = 4, 512, 128, 64, 128
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_HEAD_DIM, RANK, BLOCK = 2, 4, 64, 64, 8
FOLLOWS, OTHERS, LOGITS, DRIFT, MARKOV = 1.25, 2.2, 0.05, 0.08, 12.0


def write_pair(folder: Path, full_rank: bool = True, seed: int = 0) -> tuple[Path, Path]:
    """Write target and drafter below `folder`.

    Args:
        folder: made if missing.
        full_rank: Kimi K3's output gate and bounded decay; else Kimi Linear's low-rank gate and softplus decay.
        seed: of all weights.

    Returns:
        Folders of the target and of the drafter.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    sigma = torch.randperm(VOCAB, generator=generator)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    rows = OTHERS * torch.randn(VOCAB, HIDDEN, generator=generator)
    rows[sigma] += FOLLOWS * embedding
    target, drafter = folder / "target", folder / "drafter"
    weights = {
        "model.embed_tokens.weight": embedding.to(torch.bfloat16),
        "lm_head.weight": (LOGITS * rows).to(torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(LAYERS):
        weights |= _target_layer(layer, normal, full_rank)
    _write(target, _target_config(full_rank), weights)
    codes = torch.randn(VOCAB, RANK, generator=generator) / RANK**0.5
    follow = torch.zeros_like(codes)
    follow[sigma] = MARKOV * codes
    _write(drafter, _drafter_config(), _drafter_weights(normal, embedding, codes, follow))
    return target, drafter


def _write(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def _is_recurrent(layer: int) -> bool:
    return layer % 4 != 3


def _target_config(full_rank: bool) -> dict:
    numbered = range(1, LAYERS + 1)  # the configuration counts layers from 1
    linear = {
        "kda_layers": [n for n in numbered if _is_recurrent(n - 1)],
        "full_attn_layers": [n for n in numbered if not _is_recurrent(n - 1)],
        "head_dim": HEAD_DIM,
        "num_heads": HEADS,
        "short_conv_kernel_size": WIDTH,
    }
    if full_rank:
        linear |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": MLA_HEADS,
        "num_key_value_heads": MLA_HEADS,
        "head_dim": HEAD_DIM,
        "kv_lora_rank": KV_RANK,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "mla_use_nope": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "linear_attn_config": linear,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _target_layer(layer: int, normal, full_rank: bool) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        prefix + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
        prefix + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
        prefix + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        prefix + "input_layernorm.weight": ones,
        prefix + "post_attention_layernorm.weight": ones.clone(),
    }
    if not _is_recurrent(layer):
        shapes = {
            "q_proj": (MLA_HEADS * (NOPE + ROPE), HIDDEN),
            "kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
            "kv_b_proj": (MLA_HEADS * (NOPE + VALUE), KV_RANK),
            "o_proj": (HIDDEN, MLA_HEADS * VALUE),
        }
        weights |= {attention + f"{name}.weight": normal(*shape, std=0.04) for name, shape in shapes.items()}
        weights[attention + "kv_a_layernorm.weight"] = torch.ones(KV_RANK, dtype=torch.bfloat16)
        return weights
    width = HEADS * HEAD_DIM
    for name in "qkv":
        weights[attention + f"{name}_proj.weight"] = normal(width, HIDDEN, std=0.06)
        weights[attention + f"{name}_conv1d.weight"] = normal(width, 1, WIDTH, std=0.5)
    shapes = {"f_a_proj": (HEAD_DIM, HIDDEN), "f_b_proj": (width, HEAD_DIM), "b_proj": (HEADS, HIDDEN)}
    shapes |= (
        {"g_proj": (width, HIDDEN)} if full_rank else {"g_a_proj": (HEAD_DIM, HIDDEN), "g_b_proj": (width, HEAD_DIM)}
    )
    weights |= {attention + f"{name}.weight": normal(*shape, std=0.06) for name, shape in shapes.items()}
    weights[attention + "A_log"] = torch.linspace(-0.5, 0.5, HEADS)
    # From channels that forget within a few tokens to channels that keep hundreds.
    weights[attention + "dt_bias"] = torch.linspace(-7.0, -1.0, HEAD_DIM).repeat(HEADS)
    weights[attention + "o_norm.weight"] = torch.ones(HEAD_DIM, dtype=torch.bfloat16)
    weights[attention + "o_proj.weight"] = normal(HIDDEN, width, std=DRIFT)
    return weights


def _drafter_config() -> dict:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": LAYERS,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [1, LAYERS // 2, LAYERS - 2],
        "num_anchors": 64,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
    }


def _drafter_weights(normal, embedding, codes, follow) -> dict[str, torch.Tensor]:
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    width = DRAFT_HEADS * DRAFT_HEAD_DIM
    weights = {
        "embed_tokens.weight": embedding.to(torch.bfloat16),
        "lm_head.weight": normal(VOCAB, HIDDEN),
        "norm.weight": ones,
        "hidden_norm.weight": ones.clone(),
        "fc.weight": normal(HIDDEN, 3 * HIDDEN),
        "markov_head.markov_w1.weight": codes.to(torch.bfloat16),
        "markov_head.markov_w2.weight": follow.to(torch.bfloat16),
        "confidence_head.proj.weight": normal(1, HIDDEN + RANK),
        "confidence_head.proj.bias": torch.zeros(1, dtype=torch.bfloat16),
    }
    for layer in range(DRAFT_LAYERS):
        prefix = f"layers.{layer}."
        shapes = {
            "self_attn.q_proj": (width, HIDDEN),
            "self_attn.k_proj": (width, HIDDEN),
            "self_attn.v_proj": (width, HIDDEN),
            "self_attn.o_proj": (HIDDEN, width),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        weights |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(DRAFT_HEAD_DIM, dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = ones.clone()
    return weights
