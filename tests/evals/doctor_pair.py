"""A tiny trained pair for the doctor's tests, and how it was made.

The language repeats itself at distance three: token t is token t - 3 with probability 0.85, otherwise any of 24. A
target of four layers and a drafter of two learned it, so the drafter depends on everything that can be read wrongly:
the taps hold the tokens, rotary positions find the one three back, the mask token's embedding and the layout tell the
rows apart. Weights are stored in tests/golden/doctor, in float32. To make them anew:

    .venv/bin/python tests/evals/doctor_pair.py
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterConfig, LayerConfig, RopeConfig
from dspark.drafter import Drafter
from dspark.target import HFTarget

FOLDER = Path(__file__).parent.parent / "golden" / "doctor"
WORDS, VOCAB, MASK, DISTANCE, SAME = 24, 40, 39, 3, 0.85
HIDDEN, LAYERS, BLOCK = 32, 4, 5
DRAFTER_JSON = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": BLOCK,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": 8,
    "mask_token_id": MASK,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "sample_from_anchor": True,
    "target_layer_ids": [0, 2],
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def sample_language(num_texts: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[num_texts, length] int64."""
    tokens = torch.randint(WORDS, (num_texts, length), generator=generator)
    for t in range(DISTANCE, length):
        same = torch.rand(num_texts, generator=generator) < SAME
        tokens[:, t] = torch.where(same, tokens[:, t - DISTANCE], tokens[:, t])
    return tokens


def target_model(seed: int = 0) -> LlamaForCausalLM:
    """The target before training."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            max_position_embeddings=256,
            rope_theta=100.0,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
            initializer_range=0.2,
        )
    )


def stored_target() -> HFTarget:
    """The trained target."""
    model = target_model()
    model.load_state_dict(load_file(FOLDER / "target.safetensors"))
    return HFTarget(model)


def stored_drafter() -> dict[str, torch.Tensor]:
    """The trained drafter's weights by their canonical names."""
    return load_file(FOLDER / "drafter.safetensors")


def write_drafter(folder: Path, weights: dict[str, torch.Tensor], **changes) -> Path:
    """A checkpoint folder; `changes` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**DRAFTER_JSON, **changes}))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def train_target(steps: int = 1200) -> LlamaForCausalLM:
    """Next-token training on the language."""
    model, generator = target_model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        tokens = sample_language(64, 32, generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"target {step}: {loss.item():.3f}", flush=True)
    return model.eval()


def drafter_config() -> DrafterConfig:
    """The record of `DRAFTER_JSON`."""
    raw = DRAFTER_JSON
    return DrafterConfig(
        family="DeepSpec Qwen3",
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        anchor_first=True,
        mask_token_id=MASK,
        tap_ids=tuple(layer + 1 for layer in raw["target_layer_ids"]),
        target_hidden_size=HIDDEN,
        rope=RopeConfig(100.0),
        layers=(LayerConfig(),) * 2,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        markov_kind="vanilla",
        markov_rank=8,
        confidence="hidden+markov",
    )


def train_drafter(target: HFTarget, steps: int = 1500) -> Drafter:
    """Block training on the language; embedding and head are copies of the target's that stay as they are."""
    torch.manual_seed(2)
    config, generator = drafter_config(), torch.Generator().manual_seed(3)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif "norm" not in name:
                parameter.zero_()
        drafter.embed_tokens.weight.copy_(target.input_embedding)
        drafter.lm_head.weight.copy_(target.output_head)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    learned = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    target.tap(config.tap_ids)
    for step in range(steps):
        tokens = sample_language(48, 32, generator)
        cache = target.new_cache(len(tokens))
        taps = target.verify(cache, tokens).taps.clone()
        length = int(torch.randint(4, 32 - BLOCK - 1, (), generator=generator))
        context = drafter.new_cache(len(tokens))
        drafter.write_context(context, taps[:, :length], torch.ones(len(tokens), length, dtype=torch.bool))
        context.advance([length] * len(tokens))
        logits: list[torch.Tensor] = []

        def pick(i, row, at=length, text=tokens, rows=logits):
            rows.append(row)
            return text[:, at + 1 + i]

        drafter.chain(drafter.block_hidden(context, tokens[:, length]), tokens[:, length], BLOCK, pick)
        truth = tokens[:, length + 1 : length + 1 + BLOCK]
        loss = F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), truth.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"drafter {step}: {loss.item():.3f}", flush=True)
    return drafter.eval()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = train_target()
    save_file(model.state_dict(), FOLDER / "target.safetensors")
    trained = train_drafter(HFTarget(model))
    save_file(
        {name: value.contiguous() for name, value in trained.state_dict().items()}, FOLDER / "drafter.safetensors"
    )
