"""Damaged or ambiguous files, and drafters that do not belong to the target, are refused before anything is built."""

import json
import shutil

import pytest
from checkpoints_util import DEEPSPEC, FakeTarget, random_weights, write_checkpoint, write_deepspec, write_speculators

from dspark.checkpoint import load_drafter
from dspark.families import CheckpointError


def break_config(folder):
    (folder / "config.json").write_text("{not json")


def list_as_config(folder):
    (folder / "config.json").write_text("[]")


def truncate_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def pickled_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def only_gguf(folder):
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "model.gguf")


def pickled_mask(folder):
    (folder / "mask_embedding.pt").write_bytes(b"")


def second_file(folder):
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")


def stale_index(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "x.safetensors"}}))


def empty_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        pytest.param(lambda folder: (folder / "config.json").unlink(), ["config.json is missing"], id="no-config"),
        pytest.param(break_config, ["config.json is not valid JSON"], id="broken-config"),
        pytest.param(list_as_config, ["config.json holds a list"], id="list-as-config"),
        pytest.param(truncate_weights, ["model.safetensors cannot be read"], id="truncated"),
        pytest.param(pickled_weights, ["safetensors files without", "none"], id="pickled-weights"),
        pytest.param(only_gguf, ['packaging "GGUF"'], id="gguf"),
        pytest.param(pickled_mask, ["mask_embedding.pt"], id="pickled-mask-embedding"),
        pytest.param(second_file, ["a.safetensors, b.safetensors"], id="files-without-index"),
        pytest.param(stale_index, ["both model.safetensors and"], id="index-beside-a-single-file"),
        pytest.param(empty_index, ["has no weight_map"], id="index-without-map"),
    ],
)
def test_damaged_or_ambiguous_files_are_refused(damage, parts, tmp_path):
    folder = write_deepspec(tmp_path / "drafter")
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        load_drafter(folder)
    assert str(error.value).startswith(f"{folder}: ")
    assert all(part in str(error.value) for part in parts)


def remove_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def lose_tensor(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["layers.9.extra"] = "model-00001-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def garble_index(folder):
    index = {"weight_map": {"fc.weight": ["model-00001-of-00003.safetensors"]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def double_shard(folder):
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        pytest.param(remove_shard, "names files that are not in the folder: model-00002", id="missing-shard"),
        pytest.param(garble_index, "names files that are not in the folder: .'model-00001", id="list-as-file-name"),
        pytest.param(lose_tensor, "lists tensors that its files do not have: layers.9.extra", id="lost-tensor"),
        pytest.param(double_shard, "is in model-00001-of-00003.safetensors and in model-00002", id="doubled-tensor"),
    ],
)
def test_shards_that_contradict_their_index_are_refused(damage, part, tmp_path):
    folder = write_checkpoint(tmp_path / "drafter", DEEPSPEC, random_weights(DEEPSPEC), num_shards=3)
    damage(folder)
    with pytest.raises(CheckpointError, match=part):
        load_drafter(folder)


def test_paths_that_are_no_folder_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_drafter(tmp_path / "nothing")
    folder = write_deepspec(tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="is a file"):
        load_drafter(folder / "model.safetensors")


# --- against a target ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "changes", "target", "parts"),
    [
        pytest.param(
            write_deepspec, {}, FakeTarget(num_layers=8), ["a target with 6 layers", "8 layers"], id="other-depth"
        ),
        pytest.param(
            write_deepspec,
            {},
            FakeTarget(hidden_size=48),
            ["width 32 (target_hidden_size)", "width 48"],
            id="other-width",
        ),
        pytest.param(
            write_speculators, {}, FakeTarget(96, num_layers=5), ["target layer id 5", "-1..4"], id="tap-past-the-end"
        ),
        pytest.param(
            write_deepspec,
            {},
            FakeTarget(vocab_size=80),
            ["vocab_size=64: target token ids up to 79 cannot be embedded"],
            id="target-ids-without-rows",
        ),
        pytest.param(
            write_speculators,
            {},
            FakeTarget(vocab_size=78, num_layers=8),
            ["entry 39 maps to 78", "ids below 78"],
            id="draft-ids-past-the-target",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(write, changes, target, parts, tmp_path):
    folder = write(tmp_path / "drafter", changes)
    with pytest.raises(CheckpointError) as error:
        load_drafter(folder, target=target)
    assert str(error.value).startswith(f"{folder}: ")
    assert all(part in str(error.value) for part in parts), str(error.value)


def without(missing):
    return {name: tensor for name, tensor in random_weights(DEEPSPEC).items() if name != missing}


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("embed_tokens.weight", "input vocabulary vocab_size=64 exceeds the target's 63 embedding rows"),
        ("lm_head.weight", "lm_head of draft_vocab_size=64 rows is neither shipped nor equal to the target's 63"),
    ],
)
def test_rows_beyond_the_target_cannot_be_shared(missing, part, tmp_path):
    folder = write_checkpoint(tmp_path / "drafter", DEEPSPEC, without(missing))
    with pytest.raises(CheckpointError, match=part):
        load_drafter(folder, target=FakeTarget(vocab_size=63))
