"""A tiny trained pair for the doctor's tests, and how it was made.

The language repeats itself at distance three: token t is token t - 3 with probability 0.85, otherwise any of 24. A
target of four layers and a drafter of two learned it, so the drafter depends on everything that can be read wrongly:
the taps hold the tokens, rotary positions find the one three back, the mask token's embedding and the layout tell the
rows apart. Weights are stored in tests/golden/doctor, in float32. To make them anew:

    .venv/bin/python tests/evals/doctor_pair.py
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "dspark"))  # where this file is run as a program

import pairs
from pairs import LAYERS, tiny_target

from dspark.config import DrafterConfig, RopeConfig
from dspark.convert_config import to_deepspec
from dspark.drafter import Drafter
from dspark.families import Findings
from dspark.target import HFTarget

FOLDER = Path(__file__).parent.parent / "golden" / "doctor"
WORDS, VOCAB, MASK, DISTANCE, SAME = 24, 40, 39, 3, 0.85
BLOCK = 5


def sample_language(num_texts: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[num_texts, length] int64."""
    tokens = torch.randint(WORDS, (num_texts, length), generator=generator)
    for t in range(DISTANCE, length):
        same = torch.rand(num_texts, generator=generator) < SAME
        tokens[:, t] = torch.where(same, tokens[:, t - DISTANCE], tokens[:, t])
    return tokens


def target_model(seed: int = 0) -> LlamaForCausalLM:
    """The target before training."""
    changes = {"intermediate_size": 64, "num_key_value_heads": 4, "rope_theta": 100.0, "initializer_range": 0.2}
    return tiny_target(VOCAB, seed=seed, dtype=torch.float32, spread=1.0, **changes).model


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
    raw = to_deepspec(drafter_config(), torch.float32, Findings())
    del raw["rope_theta"]  # a second place, which `changes` would have to know
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
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
    """The record of the trained drafter."""
    return pairs.drafter_config(
        VOCAB,
        family="DeepSpec Qwen3",
        intermediate_size=64,
        num_key_value_heads=4,
        block_size=BLOCK,
        mask_token_id=MASK,
        rope=RopeConfig(100.0),
        num_target_layers=LAYERS,
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
        drafter.write_context(context, taps[:, :length], [length] * len(tokens))
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
