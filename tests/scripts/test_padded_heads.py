"""Heads of zeros change nothing: the padded checkpoint computes the same logits, and its heads can be cut in two."""

import json
from pathlib import Path

import pytest
import torch
from padded_heads import pad_heads
from transformers import LlamaConfig, LlamaForCausalLM

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_the_same(tmp_path: Path, bias: bool):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        intermediate_size=24,
        num_hidden_layers=2,
        attention_bias=bias,
        attention_dropout=0.0,
        **NINE_HEADS,
    )
    model = LlamaForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "nine")
    padded = LlamaForCausalLM.from_pretrained(pad_heads(tmp_path / "nine", tmp_path / "twelve", 2), dtype=torch.float64)
    assert (padded.config.num_attention_heads, padded.config.num_key_value_heads, padded.config.head_dim) == (12, 4, 4)
    ids = torch.arange(20)[None] % 50
    torch.testing.assert_close(padded(ids).logits, model(ids).logits, rtol=0, atol=1e-13)


def test_a_drafter_keeps_its_other_files(tmp_path: Path):
    from dspark.default import default_drafter_path

    folder = pad_heads(default_drafter_path(), tmp_path / "padded", 2)
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "confidence_calibration.json",
    }
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 4
