"""Targets with Gated DeltaNet layers: the same rollback, with the gate of a head repeated over its channels."""

import pytest
import torch
from pairs import HIDDEN, drafter_config, tiny_drafter
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from dspark import SamplingParams, generate
from dspark.recurrent import attach
from dspark.target import HFTarget

FIELDS = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DENSE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
FAMILIES = {
    "qwen3-next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**FIELDS, **DENSE, mlp_only_layers=[0, 1, 2, 3])),
    "qwen3.5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**FIELDS)),
}
PROMPTS = [[1, 2, 3], [9, 4, 6, 7, 21, 8, 5], [30]]
BOTH = pytest.mark.parametrize("family", FAMILIES)


def tiny_model(family, dtype=torch.float64):
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3.0, 1.0)
    return model


@BOTH
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
def test_greedy_output_is_that_of_plain_decoding(family, num_draft_tokens):
    target = HFTarget(tiny_model(family))
    drafter = tiny_drafter(drafter_config(32), target)
    params = SamplingParams(temperature=0, max_new_tokens=40)
    plain = generate(target, None, PROMPTS, params)
    drafted = generate(target, drafter, PROMPTS, params, num_draft_tokens=num_draft_tokens, max_batch_size=2)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]
    assert {s.num_accepted == s.num_offered for g in drafted for s in g.steps} == {True, False}


@BOTH
def test_logits_after_rejections_are_those_of_transformers(family):
    """float32: transformers sums a chunk in another order, which is worth a few 1e-6."""
    model = tiny_model(family, torch.float32)
    prompt = torch.randint(0, 32, (1, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(prompt).logits
    target = HFTarget(model)
    cache = target.new_cache(1)
    verified = [target.prefill(cache, [prompt[0, :20].tolist()]).logits[:, None]]
    for start in range(20, 41, 3):
        drafts = prompt[:, start : start + 3]
        verified.append(target.verify(cache, torch.cat([drafts, 31 - drafts], 1)).logits[:, :3])
        target.commit(cache, [3])
    got = torch.cat(verified, 1)
    assert (got - expected[:, 19:]).norm() <= 1e-5 * expected[:, 19:].norm()


def test_a_transformers_that_passes_the_state_under_another_name_is_refused():
    def forward(self, hidden_states, past_key_values=None):
        """The signature before `cache`."""

    older = type("Qwen3NextGatedDeltaNet", (torch.nn.Module,), {"forward": forward})
    layer = torch.nn.ModuleDict({"linear_attn": older()})
    with pytest.raises(ValueError, match=r"no argument `cache`.*install a newer transformers"):
        attach([layer], ["linear_attention"])
