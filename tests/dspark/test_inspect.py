"""`inspect_checkpoint`: the record, every tensor, and every reason for a refusal, without raising."""

import json

import pytest
import torch
from checkpoints_util import (
    DEEPSPEC,
    SPECULATORS,
    FakeTarget,
    changed,
    random_weights,
    write_checkpoint,
    write_deepspec,
    write_speculators,
)

from dspark.checkpoint import load_drafter
from dspark.families import CheckpointError
from dspark.inspect import inspect_checkpoint


@pytest.mark.parametrize(
    ("write", "family", "num_tensors", "num_elements"),
    [
        pytest.param(write_deepspec, "DeepSpec Qwen3", 31, 29_993, id="deepspec"),
        pytest.param(write_speculators, "speculators", 33, 30_449 - 40 - 96, id="speculators-without-its-tables"),
    ],
)
def test_a_valid_checkpoint_is_described(write, family, num_tensors, num_elements, tmp_path):
    found = inspect_checkpoint(write(tmp_path))
    assert (found.family, found.supported, found.loadable) == (family, True, True)
    assert (len(found.tensors), found.num_parameters) == (num_tensors, num_elements)
    assert found.config == load_drafter(tmp_path).config
    assert found.ownership == {"embedding": "own", "head": "own"}
    assert found.num_bytes == (tmp_path / "model.safetensors").stat().st_size - _header_bytes(tmp_path)
    assert "not used" not in {row.role for row in found.tensors}


def _header_bytes(folder):
    with open(folder / "model.safetensors", "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_what_inspect_refuses_is_what_loading_refuses(tmp_path):
    folder = write_deepspec(tmp_path, {"block_size": 0, "target_layer_ids": [4, 1, -1]})
    found = inspect_checkpoint(folder)
    assert not found.loadable
    assert found.config is None
    with pytest.raises(CheckpointError) as error:
        load_drafter(folder)
    assert len(found.refusals) == 2
    assert all(refusal in str(error.value) for refusal in found.refusals)


def test_problems_of_config_tensors_values_and_target_are_found_together(tmp_path):
    weights = random_weights(DEEPSPEC)
    weights["lm_head.weight"][0, 0] = float("nan")
    del weights["norm.weight"]
    weights["extra.weight"] = torch.zeros(2)
    folder = write_checkpoint(tmp_path, changed(DEEPSPEC, {"mask_token_id": 64}), weights)
    found = inspect_checkpoint(folder, target=FakeTarget(num_layers=9))
    text = "\n".join(found.refusals)
    for part in ("mask_token_id=64", "missing norm.weight", "extra.weight", "non-finite", "9 layers"):
        assert part in text
    assert {row.name: row.role for row in found.tensors}["extra.weight"] == "not used"


def test_an_unsupported_packaging_is_named_and_its_tensors_listed(tmp_path):
    folder = write_checkpoint(tmp_path, {"model_type": "k3_dspark"}, {"context_proj.weight": torch.zeros(2, 3)})
    found = inspect_checkpoint(folder)
    assert (found.family, found.supported) == ("K3 MLA", False)
    assert [(row.name, row.shape) for row in found.tensors] == [("context_proj.weight", (2, 3))]
    assert "latent attention" in found.refusals[0]


@pytest.mark.parametrize(
    ("changes", "num_layers", "fits", "words"),
    [
        pytest.param({}, 6, True, "yes", id="fits"),
        pytest.param({}, 9, False, "no, see the refusals", id="misfit"),
        pytest.param({"mask_token_id": 64}, 6, True, "yes", id="a-fault-of-its-own"),
        pytest.param({"block_size": 0}, 6, None, "not known, see the refusals", id="no-record"),
    ],
)
def test_whether_it_fits_the_target_is_said(changes, num_layers, fits, words, tmp_path):
    folder = write_checkpoint(tmp_path, changed(DEEPSPEC, changes), random_weights(DEEPSPEC))
    found = inspect_checkpoint(folder, target=FakeTarget(num_layers=num_layers), target_name="local folder t")
    plain = json.loads(json.dumps(found.to_dict()))["target"]
    sizes = {"num_layers": num_layers, "hidden_size": 32, "vocab_size": 64}
    assert plain == {"name": "local folder t", **sizes, "fits": fits}
    lines = found.to_text().splitlines()
    assert f"fits target  {words} ({num_layers} layers, hidden size 32, vocabulary 64)" in lines
    assert "target       local folder t" in lines
    assert inspect_checkpoint(folder).to_dict()["target"] is None


def test_what_a_damaged_file_hides_is_left_out(tmp_path):
    folder = write_deepspec(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = inspect_checkpoint(folder)
    assert found.family == "DeepSpec Qwen3"
    text, plain = found.to_text(), found.to_dict()
    assert "cannot be read" in text
    assert "packaging   DeepSpec Qwen3" in text
    assert "parameters" not in text
    assert "size " not in text
    assert (plain["num_parameters"], plain["num_bytes"]) == (None, None)
    (folder / "config.json").write_text("{")
    assert "packaging" not in inspect_checkpoint(folder).to_text()


def test_numbers_are_written_as_people_write_them(tmp_path):
    found = inspect_checkpoint(write_deepspec(tmp_path, {"rms_norm_eps": 9.999999747378752e-06}))
    assert found.config.rms_norm_eps == 9.999999747378752e-06
    assert "1e-05" in found.to_text()
    assert "9.99999" not in found.to_text()


def test_one_problem_is_singular(tmp_path):
    assert "would be refused, 1 problem below" in inspect_checkpoint(tmp_path).to_text()


def test_a_path_that_does_not_exist_is_a_refusal(tmp_path):
    found = inspect_checkpoint(tmp_path / "nothing")
    assert not found.loadable
    assert "no such folder" in found.to_text()


@pytest.mark.parametrize(
    ("same", "expected"), [(True, "own, equal to the target's"), (False, "own, different from the target's")]
)
def test_own_copies_of_the_targets_matrices_are_recognised(same, expected, tmp_path):
    target = FakeTarget()
    weights = random_weights(DEEPSPEC)
    if same:
        weights |= {"embed_tokens.weight": target.input_embedding, "lm_head.weight": target.output_head}
    found = inspect_checkpoint(write_checkpoint(tmp_path, DEEPSPEC, weights), target=target)
    assert found.ownership == {"embedding": expected, "head": expected}


def test_matrices_of_the_target_are_reported_as_shared(tmp_path):
    weights = random_weights(DEEPSPEC)
    del weights["lm_head.weight"]
    found = inspect_checkpoint(write_checkpoint(tmp_path, DEEPSPEC, weights))
    assert found.ownership["head"] == "the target's (the checkpoint has none)"
    assert found.loadable


def test_layout_choices_are_reported_and_can_be_overridden(tmp_path):
    folder = write_deepspec(tmp_path)
    assert any("layout: anchor-first, assumed" in note for note in inspect_checkpoint(folder).notes)
    assert inspect_checkpoint(folder, layout="fill").config.max_draft_tokens == 3


def test_fused_and_ignored_tensors_show_where_they_are_stored(tmp_path):
    weights = random_weights(DEEPSPEC)
    parts = [weights.pop(f"layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    weights["layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)
    weights["verifier_norm.weight"] = torch.ones(4)
    found = inspect_checkpoint(write_checkpoint(tmp_path, DEEPSPEC, weights))
    rows = {row.name: row for row in found.tensors}
    assert rows["layers.0.self_attn.k_proj.weight"].stored_as == "layers.0.self_attn.qkv_proj.weight"
    assert rows["layers.0.self_attn.k_proj.weight"].shape == (32, 32)
    assert rows["verifier_norm.weight"].role == "ignored"
    assert found.num_parameters == 29_993


def test_the_dictionary_survives_json(tmp_path):
    found = inspect_checkpoint(write_speculators(tmp_path), target=FakeTarget(96, num_layers=8))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["loadable"] is True
    assert plain["config"]["tap_ids"] == [1, 3, 6]
    assert plain["config"]["max_draft_tokens"] == 4
    assert len(plain["tensors"]) == 33


def test_the_text_has_the_verdict_the_record_and_aligned_tensors(tmp_path):
    text = inspect_checkpoint(write_checkpoint(tmp_path, SPECULATORS, random_weights(SPECULATORS))).to_text()
    assert "verdict     would load" in text
    assert "bidirectional, full context; causal, window 8" in text
    columns = {line.index("F32") for line in text.splitlines() if " F32 " in line}
    assert len(columns) == 1
