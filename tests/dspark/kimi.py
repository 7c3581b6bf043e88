"""A miniature Kimi Linear target, and a drafter that is right often enough for every accepted length to occur."""

import warnings

import torch
from pairs import HIDDEN, drafter_config, tiny_drafter
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from dspark.drafter import Drafter
from dspark.target import HFTarget

KDA, ATTENTION = "linear_attention", "full_attention"


def kimi_model(layer_types=(KDA, KDA, ATTENTION, KDA), vocab_size=HIDDEN, seed=0, dtype=torch.float64, **changes):
    """Random weights with decays from slow to fast; one of the layers is a mixture of experts."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_head_dim": 6,
        "linear_num_heads": 3,
        "layer_types": list(layer_types),
        "mlp_layer_types": ["sparse" if i == 1 else "dense" for i in range(len(layer_types))],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "model_max_length": 512,
        "initializer_range": 0.3,
    }
    model = KimiLinearForCausalLM(KimiLinearConfig(**(fields | changes))).to(dtype).eval()
    model.set_experts_implementation("eager")  # the grouped one has no float64
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.block_type == KDA:
                layer.self_attn.forget_gate.A_log.uniform_(-3.0, 1.0)
                layer.self_attn.conv1d.weight.normal_(0, 0.5)
    return model


def kimi_target(**options) -> HFTarget:
    """`kimi_model` as a target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return HFTarget(kimi_model(**options))


def kimi_pair(strength=0.035, dtype=torch.float64, **changes) -> tuple[HFTarget, Drafter]:
    """A target that mostly continues t with t + 1 and a drafter that always does.

    `strength` scales what the layers add to the embedding: where their state has its way, the target deviates, and the
        draft is rejected there.
    """
    target = kimi_target(dtype=dtype)
    ids = torch.arange(HIDDEN)
    basis = torch.eye(HIDDEN, dtype=dtype)
    with torch.no_grad():
        target.input_embedding.copy_(basis)
        target.output_head.copy_(20 * basis.roll(1, dims=0))
        for layer in target.layers:
            layer.self_attn.o_proj.weight.mul_(strength)
            for name, weight in layer.mlp.named_parameters():
                if "down_proj" in name:
                    weight.mul_(strength)
    config = drafter_config(HIDDEN, markov_rank=HIDDEN, **({"block_size": 8} | changes))
    drafter = tiny_drafter(config, target, dtype=dtype)
    drafter.lm_head.weight.zero_()
    drafter.markov_head.markov_w1.weight.copy_(basis)
    follow = torch.zeros_like(basis)
    follow[(ids + 1) % HIDDEN, ids] = 20.0
    drafter.markov_head.markov_w2.weight.copy_(follow)
    return target, drafter
