"""Tiny random checkpoints on disk, in every supported packaging; the tensor lists are written out here, not taken
from the code under test.

    write_deepspec(tmp_path)                                    # valid: vocabulary 64, block of 4, anchor-first
    write_speculators(tmp_path)                                 # valid: vocabulary 96, 40 drafted, 1+N block of 5
    write_deepspec(tmp_path, {"markov_head_type": "gated"})     # changed config, matching weights
    write_deepspec(tmp_path, {"block_size": ABSENT})            # without a key

Changes use dotted keys for nested sections ("transformer_layer_config.head_dim").
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark.config import DrafterConfig
from dspark.families import Findings, resolve_container
from dspark.families.container import Container, StoredTensor

ABSENT = object()

DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 4,
    "confidence_head_with_markov": True,
    "dtype": "float32",
    "enable_confidence_head": True,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "markov_head_type": "vanilla",
    "markov_rank": 8,
    "mask_token_id": 63,
    "max_position_embeddings": 256,
    "num_anchors": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "target_layer_ids": [-1, 1, 4],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 64,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.9.0",
    "aux_hidden_state_layer_ids": [1, 3, 6],
    "block_size": 5,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 40,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 8,
    "mask_token_id": 95,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "tiny/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": 8,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "vocab_size": 96,
    },
}


@dataclass
class FakeTarget:
    """The facts of a target that loading asks for, with random matrices; `tied` makes head and embedding one tensor."""

    vocab_size: int = 64
    num_layers: int = 6
    hidden_size: int = 32
    tied: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.input_embedding = torch.randn(self.vocab_size, self.hidden_size, generator=generator)
        self.output_head = (
            self.input_embedding if self.tied else torch.randn(self.vocab_size, self.hidden_size, generator=generator)
        )


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Deep copy of a config with dotted keys set, or removed where the value is ABSENT."""
    result = copy.deepcopy(dict(config))
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        if value is ABSENT:
            place.pop(key, None)
        else:
            place[key] = value
    return result


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a config of either packaging implies."""
    tlc = config.get("transformer_layer_config", config)
    h, d, r = tlc["hidden_size"], tlc["head_dim"], config.get("markov_rank") or 0
    q, kv = tlc["num_attention_heads"] * d, tlc["num_key_value_heads"] * d
    inner, vocab = tlc["intermediate_size"], tlc["vocab_size"]
    draft = config.get("draft_vocab_size") or vocab
    taps = len(config.get("target_layer_ids") or config.get("aux_hidden_state_layer_ids"))
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, h),
        "lm_head.weight": (draft, h),
        "fc.weight": (h, taps * (config.get("target_hidden_size") or h)),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for layer in range(tlc["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (h,),
            at + "post_attention_layernorm.weight": (h,),
            at + "self_attn.q_proj.weight": (q, h),
            at + "self_attn.k_proj.weight": (kv, h),
            at + "self_attn.v_proj.weight": (kv, h),
            at + "self_attn.o_proj.weight": (h, q),
            at + "self_attn.q_norm.weight": (d,),
            at + "self_attn.k_norm.weight": (d,),
            at + "mlp.gate_proj.weight": (inner, h),
            at + "mlp.up_proj.weight": (inner, h),
            at + "mlp.down_proj.weight": (h, inner),
        }
        if tlc.get("attention_bias"):
            sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": h}
            shapes |= {at + f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    if r:
        shapes |= {"markov_head.markov_w1.weight": (vocab, r), "markov_head.markov_w2.weight": (draft, r)}
        kind = config.get("markov_head_type")
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
        if kind == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + h), "markov_head.joint_proj.bias": (3 * r,)}
    if config.get("enable_confidence_head"):
        width = h + r if config.get("confidence_head_with_markov") else h
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 weights for a config of either packaging, with `d2t` and `t2d` if its draft vocabulary is reduced."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if "norm" in name:
            weights[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            weights[name] = torch.randn(shape, generator=generator) * 0.2
    vocab, draft = weights["embed_tokens.weight"].shape[0], weights["lm_head.weight"].shape[0]
    if draft < vocab:
        weights |= vocabulary_tables(range(0, 2 * draft, 2), vocab)
    return weights


def vocabulary_tables(kept: range | list[int], vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` offsets and `t2d` flags for the target ids a drafter can propose."""
    ids = torch.tensor(list(kept))
    flags = torch.zeros(vocab_size, dtype=torch.bool)
    flags[ids[ids < vocab_size]] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": flags}


def header_container(config: Mapping[str, Any], without: Sequence[str] = ()) -> Container:
    """A checkpoint of which only config and headers exist, so that full-size ones can be resolved without weights."""
    shapes: dict[str, tuple[int, ...]] = weight_shapes(config)
    headers = {name: StoredTensor(name, Path("none"), shape, "BF16") for name, shape in shapes.items()}
    draft, vocab = shapes["lm_head.weight"][0], shapes["embed_tokens.weight"][0]
    if draft < vocab:
        headers["d2t"] = StoredTensor("d2t", Path("none"), (draft,), "I64")
        headers["t2d"] = StoredTensor("t2d", Path("none"), (vocab,), "BOOL")
    return Container(Path("none"), config, {name: header for name, header in headers.items() if name not in without})


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], num_shards: int = 1
) -> Path:
    """Write config.json and one or several safetensors files (several with an index); returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_deepspec(folder: Path, changes: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """A DeepSpec Qwen3 checkpoint, with changes."""
    config = changed(DEEPSPEC, changes or {})
    return write_checkpoint(folder, config, random_weights(config, seed))


def write_speculators(folder: Path, changes: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """A speculators checkpoint with a reduced vocabulary, with changes."""
    config = changed(SPECULATORS, changes or {})
    return write_checkpoint(folder, config, random_weights(config, seed))


def read(config: Mapping[str, Any], without: Sequence[str] = (), **options: Any) -> tuple[Any, Findings]:
    """The record of a checkpoint of which only headers exist (None if it is refused), and what was found."""
    findings = Findings()
    layout, target_vocab_size = options.get("layout"), options.get("target_vocab_size")
    resolved = resolve_container(header_container(config, without), layout, target_vocab_size, findings)
    return (None if resolved is None else resolved.config), findings


def resolve(config: Mapping[str, Any], **options: Any) -> DrafterConfig:
    """The record of a config that must be accepted."""
    record, findings = read(config, **options)
    assert findings.problems == []
    return record


def refuse(config: Mapping[str, Any], **options: Any) -> str:
    """The problems of a config that must be refused."""
    _, findings = read(config, **options)
    assert findings.problems
    return "\n".join(findings.problems)


def deepspec(changes: Mapping[str, Any] | None = None, **options: Any) -> DrafterConfig:
    """The record of the DeepSpec config with changes."""
    return resolve(changed(DEEPSPEC, changes or {}), **options)


def speculators(changes: Mapping[str, Any] | None = None, **options: Any) -> DrafterConfig:
    """The record of the speculators config with changes."""
    return resolve(changed(SPECULATORS, changes or {}), **options)
