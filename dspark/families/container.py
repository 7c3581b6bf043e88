"""The files of a checkpoint: config.json, and safetensors headers (single or sharded). No tensor data is read here.

From the Hub, config and index come first, so that a repository which is no supported drafter is refused before its
weights are fetched.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from dspark.config import HUB_ID
from dspark.families.findings import CheckpointError, refusal
from dspark.families.recognise import recognise, refuse_unsupported

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Names of the safetensors header, as far as torch has the type.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, by its header. `dtype` is the header's own name, such as "BF16"."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Container:
    """A checkpoint folder: parsed config and every stored tensor."""

    folder: Path
    raw: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def local_folder(path: str | Path) -> Path:
    """The checkpoint's folder on disk, fetched from the Hub if `path` is a repository id.

    Raises:
        CheckpointError: no such folder or repository, or its config is of no supported packaging (its weights are
        then not fetched).
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        refuse_gguf(folder.name)
    if folder.exists():
        raise refusal(
            f"{folder.name} is a file",
            "the folder that holds it",
            f"Its config.json would not be found. Pass {str(folder.parent)!r}.",
        )
    if not HUB_ID.fullmatch(str(path)):
        raise refusal(
            "no such folder",
            "an existing folder or a Hub id such as owner/name",
            "There is nothing to load. Check the path.",
        )
    return _from_hub(str(path))


def _from_hub(repository: str) -> Path:
    try:
        folder = Path(snapshot_download(repository, allow_patterns=["*.json"]))
        raw = read_config(folder)
        index = read_json(folder / INDEX) if (folder / INDEX).exists() else {}
        refuse_unsupported(recognise(raw, index.get("weight_map", {})))
        return Path(snapshot_download(repository, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise refusal(
            f"not a folder here, and the Hub gave {type(error).__name__}: {error}",
            "an existing folder or a reachable repository",
            "There is nothing to load. Check the name, the network and, for a gated repository, the login.",
        ) from error


def open_container(path: str | Path) -> Container:
    """Config and tensor headers of a checkpoint folder or Hub id.

    Raises:
        CheckpointError: files are missing, damaged, or contradict one another.
    """
    folder = local_folder(path)
    raw = read_config(folder)
    if list(folder.glob("mask_embedding.pt")):
        raise refusal(
            "the folder has mask_embedding.pt",
            "a mask token whose embedding is a row of embed_tokens",
            "Mask rows would be embedded by the wrong vector, and pickled files are not opened.",
            "Store the vector in the mask_token_id row of embed_tokens and delete the file.",
        )
    try:
        return Container(folder, raw, read_headers(folder))
    except CheckpointError:
        refuse_unsupported(recognise(raw))  # the better message for packagings that keep their weights elsewhere
        raise


def read_config(folder: Path) -> dict[str, Any]:
    """Parsed config.json of a folder."""
    if not (folder / "config.json").exists():
        if list(folder.glob("*.gguf")):
            refuse_gguf("the folder's checkpoint")
        raise refusal(
            "config.json is missing",
            "one beside the weights",
            "Block layout and taps would be unknown.",
            "Pass the folder that has it (some repositories keep the drafter in dspark/).",
        )
    return read_json(folder / "config.json")


def refuse_gguf(name: str) -> None:
    """Refuse a GGUF file by name."""
    raise refusal(
        f'{name} is recognised as packaging "GGUF": reading it is not implemented',
        "safetensors",
        "Its weights would have to be dequantised and renamed.",
        "Use the safetensors checkpoint that it was converted from.",
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise refusal(
            f"{file.name} is not valid JSON ({error})",
            "a JSON object",
            "No field of it can be trusted. Fetch the file again.",
        ) from error
    if not isinstance(value, dict):
        raise refusal(
            f"{file.name} holds a {type(value).__name__}",
            "a JSON object",
            "It has no fields. Fetch the file again.",
        )
    return value


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its stored name."""
    weight_map = _weight_map(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in _file_headers(folder / file).items():
            if name in tensors:
                raise refusal(
                    f"tensor {name} is in {tensors[name].file.name} and in {file}",
                    "one copy",
                    "Which of them is used would depend on the order of the files. Remove the stale shard.",
                )
            tensors[name] = tensor
    lost = sorted(name for name, file in weight_map.items() if name and tensors.get(name) is None)
    if lost:
        raise refusal(
            f"{INDEX} lists tensors that its files do not have: {', '.join(lost[:8])}",
            "an index that matches its shards",
            "Those weights would stay uninitialised. Fetch the checkpoint again.",
        )
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    """Stored tensor name -> file name; the name is "" where no index says which tensors a file has."""
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if not (folder / INDEX).exists():
        if SINGLE in found:
            return {"": SINGLE}
        if len(found) != 1:
            listed = ", ".join(found) or "none"
            raise refusal(
                f"safetensors files without {INDEX}: {listed}",
                f"{SINGLE}, or shards with an index",
                "Weights would be missing or come from the wrong file (other formats, such as pickles, are not read).",
                "Fetch the checkpoint again, or convert it with save_pretrained(safe_serialization=True).",
            )
        return {"": found[0]}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal(
            f"{INDEX} has no weight_map",
            "a map from tensor to file",
            "No tensor could be found. Fetch the checkpoint again.",
        )
    weight_map = {name: str(file) for name, file in weight_map.items()}
    shards = set(weight_map.values())
    if SINGLE in found and SINGLE not in shards:
        raise refusal(
            f"both {SINGLE} and {INDEX} are present, and the index does not use {SINGLE}",
            "one of them",
            "Which weights are loaded would depend on the tool. Delete the stale one.",
        )
    absent = sorted(shards - set(found))
    if absent:
        raise refusal(
            f"{INDEX} names files that are not in the folder: {', '.join(absent[:8])}",
            "every shard",
            "Their weights would stay uninitialised. Fetch the checkpoint again.",
        )
    return weight_map


def _file_headers(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            headers = {}
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                header = opened.get_slice(name)
                headers[name] = StoredTensor(name, file, tuple(header.get_shape()), str(header.get_dtype()))
            return headers
    except SafetensorError as error:
        raise CheckpointError(
            f"{file.name} cannot be read ({error}); expected a complete safetensors file. Weights would be missing. "
            "Fetch it again, it may be truncated."
        ) from error
