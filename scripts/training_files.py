"""What training reads and writes: the token shards of make_training_data.py, and the exported drafter in DeepSpec's
Qwen3 packaging.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from dspark.config import DrafterConfig
from dspark.target import HFTarget

MANIFEST = "manifest.json"
MAX_STORED_BYTES = 32_000_000


class TrainingData:
    """Documents end to end on the device. `held_out` numbers those for validation, `training` the others.

    The first ones are held out: they stay the same when more data is made, and the last ones were cut short when data
    generation stopped.
    """

    def __init__(self, folder: Path, device: torch.device, num_validation: int) -> None:
        """Read every shard that the manifest names.

        Raises:
            ValueError: no data, or nothing left to train on.
        """
        if not (folder / MANIFEST).is_file():
            raise ValueError(
                f"{folder} has no {MANIFEST}: make training data first (scripts/make_training_data.py --out {folder})"
            )
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        shards = [load_file(folder / shard["file"]) for shard in self.manifest["shards"]]
        lengths = np.concatenate([np.diff(shard["offsets"]) for shard in shards])
        if len(lengths) <= num_validation:
            raise ValueError(
                f"{folder} holds {len(lengths)} documents, and --validation {num_validation} of them are held out: "
                "make more"
            )
        self.tokens = torch.from_numpy(np.concatenate([shard["tokens"] for shard in shards]).astype(np.int32)).to(
            device
        )
        self.answer = torch.from_numpy(np.concatenate([shard["answer"] for shard in shards]).astype(bool)).to(device)
        self.starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]])).to(device)
        self.host_lengths = lengths
        self.lengths = torch.from_numpy(lengths).to(device)
        self.held_out = np.arange(num_validation)
        self.training = np.arange(num_validation, len(lengths))

    def batch(self, documents: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Documents [N] as tokens [N, length] int64 (padding is token 0) and answer mask [N, length] bool (False in the
        padding).
        """
        place = torch.arange(length, device=documents.device)
        inside = place < self.lengths[documents, None]
        index = (self.starts[documents, None] + place).clamp_max(self.tokens.shape[0] - 1)
        return self.tokens[index].long().masked_fill(~inside, 0), self.answer[index] & inside

    def batches(
        self, documents: np.ndarray, buckets: list[int], batch_tokens: int, seed: list[int]
    ) -> list[tuple[int, np.ndarray]]:
        """All documents once, in batches of one bucket each: (length L, document ids [batch_tokens / L]), shuffled by
        `seed`.

        The last batch of a bucket is filled up with documents from its start.
        """
        rng = np.random.default_rng(seed)
        bucket_of = np.searchsorted(buckets, self.host_lengths[documents])
        made = []
        for index, length in enumerate(buckets):
            members, size = rng.permutation(documents[bucket_of == index]), batch_tokens // length
            num_batches = -(-len(members) // size)
            made += [(length, ids) for ids in np.resize(members, (num_batches, size))]
        return [made[index] for index in rng.permutation(len(made))]

    def summary(self) -> dict[str, Any]:
        """What the model card says about the data."""
        shards = self.manifest["shards"]
        totals = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "answer_tokens")}
        return {
            **self.manifest["settings"],
            **totals,
            "generation_s": self.manifest["generation_s"],
            "shards": len(shards),
        }


def find_buckets(batch_tokens: int, step: int, max_length: int) -> list[int]:
    """Sequence lengths, multiples of `step`, of which a whole number makes a batch; the last one is at least
    `max_length`.
    """
    buckets = [length for length in range(step, batch_tokens + 1, step) if batch_tokens % length == 0]
    enough = next((index for index, length in enumerate(buckets) if length >= max_length), None)
    if enough is None:
        raise ValueError(
            f"--batch-tokens {batch_tokens} has no multiple of {step} that divides it and holds {max_length} "
            "positions: 23040 has 640 and seven below"
        )
    return buckets[: enough + 1]


def hub_config(config: DrafterConfig, target: HFTarget) -> dict[str, Any]:
    """config.json of the export."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": target.config.bos_token_id,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "eos_token_id": target.config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "markov_head_type": "vanilla",
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
        "rope_theta": config.rope.theta,
        "sample_from_anchor": True,
        "sliding_window": None,
        "target_hidden_size": config.target_hidden_size,
        "target_layer_ids": [tap - 1 for tap in config.tap_ids],
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def export(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any], record: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and training.json, each by a rename, so that an interrupted run leaves whole
    files.

    Raises:
        ValueError: the weights are larger than the drafter may be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "model.safetensors.tmp"
    save_file(weights, scratch, metadata={"format": "pt"})
    if scratch.stat().st_size > MAX_STORED_BYTES:
        raise ValueError(
            f"the drafter takes {scratch.stat().st_size} bytes, more than {MAX_STORED_BYTES}: make it smaller "
            "(--intermediate, --layers)"
        )
    scratch.replace(folder / "model.safetensors")
    for name, content in (("config.json", config), ("training.json", record)):
        (folder / (name + ".tmp")).write_text(json.dumps(content, indent=1) + "\n")
        (folder / (name + ".tmp")).replace(folder / name)
