"""`dspark convert`: there and back is the same drafter, bit for bit; what a packaging cannot say is refused."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from checkpoints_util import (
    ABSENT,
    DEEPSPEC,
    SPECULATORS,
    FakeTarget,
    changed,
    random_weights,
    write_checkpoint,
    write_deepspec,
    write_speculators,
)
from safetensors import safe_open

from dspark import load_drafter
from dspark.cli import main
from dspark.confidence import CALIBRATION_FILE, ConfidenceCalibration, Scaling, head_digest, write_calibration
from dspark.convert import convert, same_drafter
from dspark.families import CheckpointError
from dspark.sampling import SamplingParams, SamplingTensors, Streams

BOTH = {
    "deepspec": [
        pytest.param({}, id="vanilla"),
        pytest.param({"markov_head_type": "gated"}, id="gated"),
        pytest.param({"markov_head_type": "rnn"}, id="rnn"),
        pytest.param({"markov_rank": 0, "confidence_head_with_markov": False}, id="rank-0"),
        pytest.param({"confidence_head_with_markov": False}, id="confidence-of-hidden"),
        pytest.param({"enable_confidence_head": False}, id="no-confidence"),
        pytest.param({"sample_from_anchor": False}, id="1pN"),
        pytest.param({"attention_bias": True}, id="attention-bias"),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            id="yarn",
        ),
        pytest.param({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": True}, id="causal"),
        pytest.param(
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "is_causal": False},
            id="windows-that-are-not-causal",
        ),
    ],
    "speculators": [
        pytest.param({}, id="reduced-vocabulary"),
        pytest.param({"sample_from_anchor": ABSENT}, id="layout-inferred"),
        pytest.param({"sliding_window_non_causal": True}, id="windows-that-are-not-causal"),
        pytest.param({"markov_head_type": "rnn"}, id="rnn"),
    ],
}
FULL = {"draft_vocab_size": 96}  # the fixture of speculators with a full vocabulary


def write(packaging, folder, changes):
    return (write_deepspec if packaging == "deepspec" else write_speculators)(folder, changes)


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def proposals(folder):
    """Draft tokens, q and confidences for random contexts."""
    drafter = load_drafter(folder)
    config = drafter.config
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(3, 9, len(config.tap_ids) * config.target_hidden_size, generator=generator)
    cache = drafter.new_cache(3)
    drafter.extend(cache, taps, [9, 4, 7])
    params = [SamplingParams(seed=i) for i in range(3)]
    draft = drafter.propose(
        cache,
        torch.tensor([1, 2, 3]),
        SamplingTensors.stack(params),
        Streams.for_params(params),
        config.max_draft_tokens,
    )
    confidence = draft.confidence_logits
    return [draft.tokens, draft.proposal.dense(config.vocab_size), *([] if confidence is None else [confidence])]


def assert_same_drafter(first, second):
    assert same_drafter(load_drafter(first).config, load_drafter(second).config) == []
    for mine, theirs in zip(proposals(first), proposals(second), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("changes", BOTH["deepspec"])
def test_deepspec_there_and_back(changes, tmp_path):
    source = write("deepspec", tmp_path / "a", changes)
    there = convert(source, tmp_path / "b", "speculators", verifier="owner/target")
    assert there.config.family == "speculators"
    assert there.config.verifier_name == "owner/target"
    convert(tmp_path / "b", tmp_path / "c", "deepspec")
    for first, second in pairwise(["a", "b", "c"]):
        assert_same_drafter(tmp_path / first, tmp_path / second)
    for name, tensor in tensors_of(source).items():
        assert torch.equal(tensor, tensors_of(tmp_path / "c")[name]), name


@pytest.mark.parametrize("changes", BOTH["speculators"])
def test_speculators_there_and_back(changes, tmp_path):
    source = write("speculators", tmp_path / "a", {**changes, **FULL})
    convert(source, tmp_path / "b", "deepspec")
    convert(tmp_path / "b", tmp_path / "c", "speculators", verifier="tiny/target")
    for first, second in pairwise(["a", "b", "c"]):
        assert_same_drafter(tmp_path / first, tmp_path / second)
    assert load_drafter(tmp_path / "c").config.verifier_name == load_drafter(source).config.verifier_name


def test_a_reduced_vocabulary_keeps_its_tables_and_is_refused_by_deepspec(tmp_path):
    source = write_speculators(tmp_path / "a")
    convert(source, tmp_path / "b", "speculators")
    before, after = tensors_of(source), tensors_of(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    with pytest.raises(CheckpointError, match="draft_vocab_size=40 of vocab_size=96; expected a full vocabulary"):
        convert(source, tmp_path / "c", "deepspec")
    assert not (tmp_path / "c").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_t2d_is_made_from_d2t(tmp_path):
    config = changed(DEEPSPEC, {"draft_vocab_size": 20})
    weights = random_weights(config)
    write_checkpoint(tmp_path / "a", config, {name: value for name, value in weights.items() if name != "t2d"})
    convert(tmp_path / "a", tmp_path / "b", "speculators")
    assert torch.equal(tensors_of(tmp_path / "b")["t2d"], weights["t2d"])
    assert_same_drafter(tmp_path / "a", tmp_path / "b")


def test_types_are_kept_as_they_are_and_shards_and_fused_tensors_are_written_plainly(tmp_path):
    weights = {name: value.bfloat16() for name, value in random_weights(DEEPSPEC).items()}
    weights["norm.weight"] = weights["norm.weight"].float()
    stored = dict(weights)
    for layer in range(2):
        at = f"layers.{layer}.self_attn."
        stored[f"{at}qkv_proj.weight"] = torch.cat([stored.pop(f"{at}{part}_proj.weight") for part in "qkv"])
    write_checkpoint(tmp_path / "a", DEEPSPEC, {f"model.{name}": value for name, value in stored.items()}, num_shards=3)
    convert(tmp_path / "a", tmp_path / "b", "speculators")
    after = tensors_of(tmp_path / "b")
    assert after.keys() == weights.keys()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in weights.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text())["transformer_layer_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("packaging", "to", "changes", "message"),
    [
        pytest.param("speculators", "deepspec", FULL | {"target_hidden_size": 48}, "target_hidden_size=48", id="width"),
        pytest.param("deepspec", "speculators", {"logit_scale": 0.5}, "logit_scale=0.5; expected 1", id="logit-scale"),
        pytest.param("deepspec", "speculators", {"is_causal": True}, "no causal layer without a window", id="causal"),
    ],
)
def test_what_the_other_packaging_cannot_say_is_refused(packaging, to, changes, message, tmp_path):
    source = write(packaging, tmp_path / "a", changes)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "b", to)
    assert not (tmp_path / "b").exists()


def test_layers_that_neither_packaging_can_say_are_refused():
    from pairs import drafter_config

    from dspark.config import LayerConfig
    from dspark.convert_config import to_deepspec, to_speculators
    from dspark.families import Findings

    for layers, message in (
        ((LayerConfig(window=4), LayerConfig(window=8)), "layers with windows 4, 8"),
        ((LayerConfig(causal=True), LayerConfig()), "causal with full context, bidirectional with full context"),
    ):
        for write_config in (to_deepspec, to_speculators):
            findings = Findings()
            write_config(replace(drafter_config(), layers=layers), torch.float32, findings)
            assert message in "\n".join(findings.problems)


def test_matrices_of_the_target_are_copied_if_it_is_named(tmp_path):
    weights = random_weights(changed(SPECULATORS, FULL))
    own = {name: value for name, value in weights.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    write_checkpoint(tmp_path / "a", changed(SPECULATORS, FULL), own)
    target = FakeTarget(vocab_size=96, num_layers=8)
    convert(tmp_path / "a", tmp_path / "b", "deepspec", target=target)
    assert torch.equal(tensors_of(tmp_path / "b")["lm_head.weight"], target.output_head)
    assert torch.equal(tensors_of(tmp_path / "b")["embed_tokens.weight"], target.input_embedding)
    for name, to in (("c", "speculators"), ("d", "deepspec")):
        result = convert(tmp_path / "a", tmp_path / name, to)
        assert tensors_of(tmp_path / name).keys() == own.keys()
    assert any("embed_tokens and lm_head are not in the checkpoint" in note for note in result.notes)


def test_the_calibration_comes_along(tmp_path):
    source = write_deepspec(tmp_path / "a")
    weights = tensors_of(source)
    digest = head_digest((name, weights[name]) for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"))
    write_calibration(
        source / CALIBRATION_FILE, ConfidenceCalibration(Scaling((1.5, 0.7, 1.0, 2.0), (0.1, 0.0, -0.2, 0.5)), digest)
    )
    convert(source, tmp_path / "b", "speculators")
    assert load_drafter(tmp_path / "b").calibration == load_drafter(source).calibration
    assert_same_drafter(source, tmp_path / "b")


def test_nothing_is_overwritten_without_force(tmp_path, capsys):
    source = write_deepspec(tmp_path / "a")
    place = tmp_path / "b"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "model-00001-of-00002.safetensors").write_text("an older checkpoint")
    command = ["convert", str(source), str(place), "--to", "speculators"]
    assert main(command) == 2
    assert "exists; give another folder, or --force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert_same_drafter(source, place)
    assert main(["convert", str(source), str(source), "--to", "speculators", "--force"]) == 2
    assert "is the source itself" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "none" / "b"), "--to", "speculators"]) == 2
    assert f"there is no folder {tmp_path / 'none'} to make it in" in capsys.readouterr().err
    assert main(["convert", str(source), str(place / "notes.txt"), "--to", "speculators", "--force"]) == 2
    assert "notes.txt is a file; give a folder" in capsys.readouterr().err


def test_the_command_says_what_it_did(tmp_path, capsys):
    source = write_deepspec(tmp_path / "a")
    assert main(["convert", str(source), str(tmp_path / "b"), "--to", "speculators", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["source"], report["destination"], report["num_tensors"]) == ("DeepSpec Qwen3", "speculators", 31)
    assert report["config"]["tap_ids"] == [0, 2, 5]
    assert any("num_target_layers=6 is not written" in note for note in report["notes"])
    assert any("the verifier has no name" in note for note in report["notes"])


def test_a_refused_source_is_refused_with_its_own_problems(tmp_path):
    source = write_deepspec(tmp_path / "a", {"mask_token_id": 64})
    with pytest.raises(CheckpointError, match="mask_token_id=64 is outside"):
        convert(source, tmp_path / "b", "speculators")
    with pytest.raises(ValueError, match="to='gguf': expected one of deepspec, speculators"):
        convert(source, tmp_path / "b", "gguf")
    with pytest.raises(ValueError, match="only a speculators config names its target; leave it out for deepspec"):
        convert(source, tmp_path / "b", "deepspec", verifier="owner/name")
