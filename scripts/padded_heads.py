"""A checkpoint with attention heads of zeros added: the same function, cut more easily.

Tensor parallelism splits heads, and refuses a model whose number of them the ranks do not divide. A key head of zeros
with its query heads attends to nothing: its values are zero, and so are the columns of o_proj that would read them.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def pad_heads(source: Path, folder: Path, multiple: int) -> Path:
    """Copy a Llama or Qwen3 checkpoint, or a drafter with such layers, with key heads a multiple of `multiple`.

    Args:
        source: folder with config.json and safetensors files.
        folder: of the copy; made, with all other files of `source` in it.
        multiple: of the ranks.

    Returns:
        `folder`.
    """
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // queries
    added_keys = -keys % multiple
    added_queries = added_keys * (queries // keys)
    config |= {
        "num_attention_heads": queries + added_queries,
        "num_key_value_heads": keys + added_keys,
        "head_dim": head_dim,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    added = {"q_proj": added_queries, "k_proj": added_keys, "v_proj": added_keys, "o_proj": added_queries}
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            heads = added.get(layer.rpartition(".")[2], 0) if ".self_attn." in name else 0
            # o_proj reads heads and adds nothing for those; the others write them.
            shape = list(tensor.shape)
            axis = -1 if layer.endswith("o_proj") else 0
            if heads and not (layer.endswith("o_proj") and kind == "bias"):
                shape[axis] = heads * head_dim
                tensors[name] = torch.cat([tensor, tensor.new_zeros(shape)], axis)
        (folder / path.name).unlink()
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder
