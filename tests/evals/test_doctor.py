"""`dspark doctor` on a trained pair: the intact drafter passes, and one that is broken in each way is told what to
change. Texts and anchors are seeded, so that nothing here is a matter of chance.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from doctor_pair import LAYERS, MASK, VOCAB, sample_language, stored_drafter, stored_target, target_model, write_drafter

from dspark import HFTarget, load_drafter
from dspark.cli import main
from dspark.convert import convert
from dspark.evals.doctor import DoctorSettings, diagnose, format_diagnosis
from dspark.evals.readings import alternatives, mask_candidates
from dspark.evals.target_states import TargetPath
from dspark.evals.text_groups import ScoringRule
from dspark.families import CheckpointError
from dspark.sampling import SamplingParams

SETTINGS = DoctorSettings(prompts=16, new_tokens=24, anchors=5)
HEAD_DIM, HIDDEN = 8, 32


@pytest.fixture(scope="module")
def target():
    return stored_target()


@pytest.fixture(scope="module")
def prompts():
    return sample_language(SETTINGS.prompts, 9, torch.Generator().manual_seed(5)).tolist()


@pytest.fixture
def examine(target, prompts, tmp_path):
    """Write a checkpoint with changes, load it as users do, and examine it."""

    def run(weights=None, **changes):
        folder = write_drafter(tmp_path / "drafter", weights or stored_drafter(), **changes)
        drafter = load_drafter(folder, target=target)
        return diagnose(drafter, target, json.loads((folder / "config.json").read_text()), prompts, SETTINGS)

    return run


def changed(change, *names):
    """The stored weights with `change` applied to those whose name ends with one of `names`."""
    return {name: change(value) if name.endswith(names) else value for name, value in stored_drafter().items()}


def interleave_rows(weight):
    """Rows of every head from (even ones, odd ones) to interleaved pairs, as interleaved rotary weights are stored."""
    order = torch.arange(HEAD_DIM).view(2, -1).T.flatten()
    return weight.unflatten(0, (-1, HEAD_DIM))[:, order].flatten(0, 1) if weight.ndim > 1 else weight[order]


ATTENTION = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
BROKEN = [
    pytest.param(None, {"target_layer_ids": [1, 3]}, "taps", "target_layer_ids=[0, 2]", id="taps-late"),
    pytest.param(None, {"target_layer_ids": [-1, 1]}, "taps", "target_layer_ids=[0, 2]", id="taps-early"),
    pytest.param(None, {"sample_from_anchor": False}, "layout", "sample_from_anchor=true", id="layout"),
    pytest.param(None, {"mask_token_id": 7}, "mask", f"mask_token_id={MASK}", id="mask"),
    pytest.param(
        lambda: changed(interleave_rows, *ATTENTION), {}, "rope", "rope_is_neox_style=false", id="interleaved"
    ),
    pytest.param(
        None,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "rope",
        "rope_parameters.rope_theta=100",
        id="rotary-base",
    ),
    pytest.param(None, {"is_causal": True}, "causality", "is_causal=false", id="causality"),
    pytest.param(
        lambda: changed(lambda w: w * HIDDEN**0.5, "embed_tokens.weight"),
        {},
        "embedding",
        "divide embed_tokens.weight by that factor",
        id="embedding-scale",
    ),
    pytest.param(
        lambda: changed(lambda w: w.roll(11, dims=0), "embed_tokens.weight"),
        {},
        "embedding",
        "leave embed_tokens.weight out",
        id="foreign-embedding",
    ),
    pytest.param(
        lambda: changed(lambda w: w.roll(5, dims=0), "lm_head.weight"),
        {},
        "head",
        "leave lm_head.weight out",
        id="head",
    ),
    pytest.param(
        lambda: changed(lambda w: w - 1, "norm.weight"), {}, "norm", "add 1 to every norm weight", id="norm-offset"
    ),
]


def test_the_intact_drafter_passes(examine):
    diagnosis = examine()
    assert diagnosis.healthy, format_diagnosis(diagnosis)
    assert diagnosis.score == diagnosis.best_score
    assert diagnosis.acceptance[0] > 0.5
    by_topic = {finding.topic: finding for finding in diagnosis.findings}
    for topic in ("taps", "layout", "mask", "rope", "causality", "head", "norm"):
        assert by_topic[topic].verdict == "declared", topic
        assert by_topic[topic].difference.high < 0
    assert format_diagnosis(diagnosis).startswith("healthy")
    assert any("lm_head.weight is a copy of the target's" in remark for remark in diagnosis.remarks)


@pytest.mark.parametrize(("weights", "changes", "topic", "remedy"), BROKEN)
def test_each_fault_is_found_and_its_remedy_named(weights, changes, topic, remedy, examine):
    diagnosis = examine(None if weights is None else weights(), **changes)
    wrong = [finding for finding in diagnosis.findings if finding.verdict == "wrong"]
    assert [finding.topic for finding in wrong] == [topic], format_diagnosis(diagnosis)
    assert wrong[0].difference.low > 0
    assert remedy in wrong[0].remedy
    assert len(diagnosis.faults) == 1
    assert remedy in diagnosis.faults[0]
    assert diagnosis.best_score.value > diagnosis.score.value
    assert format_diagnosis(diagnosis).startswith("faults:")


def test_readings_that_draft_alike_are_named_together(examine):
    """Where the text cannot tell two fillers apart, neither is said to be the one of training."""
    other = 30  # no word of the language
    weights = stored_drafter()
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name] = weights[name].clone()
    weights[name][other] = weights[name][MASK]
    (fault,) = examine(weights, mask_token_id=7, pad_token_id=other).faults
    best, tied = re.search(
        r"mask token (\d+) drafts better \(nothing in these texts tells it from ([\d, ]+)\)", fault
    ).groups()
    assert {str(MASK), str(other)} <= {best, *tied.split(", ")}
    (fault,) = examine(None, mask_token_id=7, pad_token_id=other).faults
    assert "nothing in these texts" not in fault


def test_two_faults_are_found_together(examine):
    diagnosis = examine(None, sample_from_anchor=False, target_layer_ids=[1, 3])
    wrong = {finding.topic for finding in diagnosis.findings if finding.verdict == "wrong"}
    assert wrong == {"layout", "taps"}, format_diagnosis(diagnosis)


def test_a_speculators_checkpoint_is_told_in_its_own_words(target, prompts, tmp_path):
    source = write_drafter(tmp_path / "a", stored_drafter())
    convert(source, tmp_path / "b", "speculators")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    config["aux_hidden_state_layer_ids"] = [0, 2]  # written as if layer outputs were counted
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    diagnosis = diagnose(load_drafter(tmp_path / "b", target=target), target, config, prompts, SETTINGS)
    assert [finding.topic for finding in diagnosis.findings if finding.verdict == "wrong"] == ["taps"]
    assert "write aux_hidden_state_layer_ids=[1, 3]" in diagnosis.faults[0]


def reduced(table):
    """The drafter over tokens 0, 2, ..., 22 only, with a `d2t` of the caller's."""
    ids = torch.arange(0, 24, 2)
    weights = stored_drafter()
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        weights[name] = weights[name][ids]
    return {**weights, "d2t": table(ids)}


def test_a_table_of_ids_is_told_from_offsets(examine):
    intact = examine(reduced(lambda ids: ids - torch.arange(len(ids))), draft_vocab_size=12)
    assert intact.healthy, format_diagnosis(intact)
    broken = examine(reduced(lambda ids: ids), draft_vocab_size=12)
    assert [finding.topic for finding in broken.findings if finding.verdict == "wrong"] == ["vocabulary"]
    assert "store offsets in d2t" in broken.faults[0]


def test_a_drafter_of_another_target_drafts_under_no_reading(prompts, tmp_path):
    other = HFTarget(target_model(seed=9))
    folder = write_drafter(tmp_path, stored_drafter())
    drafter = load_drafter(folder, target=other)
    diagnosis = diagnose(drafter, other, json.loads((folder / "config.json").read_text()), prompts, SETTINGS)
    assert not diagnosis.healthy
    assert any("trained for another target" in fault for fault in diagnosis.faults), format_diagnosis(diagnosis)
    assert any("has little in common with the target's" in remark for remark in diagnosis.remarks)


def test_a_matrix_of_zeros_is_named(examine):
    diagnosis = examine(changed(torch.zeros_like, "layers.1.mlp.down_proj.weight"))
    assert any("layers.1.mlp.down_proj.weight [32, 64] is zero everywhere" in fault for fault in diagnosis.faults)


def test_the_command_reports_and_its_status_tells(target, tmp_path, capsys):
    from tiny_target import tiny_tokenizer

    target.model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    nan = changed(lambda w: torch.full_like(w, float("nan")), "fc.weight")
    write_drafter(tmp_path / "nan", nan)
    assert main(["doctor", str(tmp_path / "target"), str(tmp_path / "nan"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["healthy"]
    assert "fc.weight contains non-finite values" in report["faults"][0]
    write_drafter(tmp_path / "layers", stored_drafter(), num_target_layers=LAYERS + 1)
    assert main(["doctor", str(tmp_path / "target"), str(tmp_path / "layers")]) == 1
    assert "it cannot be loaded for this target" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "target"), str(tmp_path / "nan"), "--prompts", "1"]) == 2
    assert "prompts=1 must be at least 2" in capsys.readouterr().err


def test_anchors_are_spread_over_those_with_a_whole_block_behind_them():
    rule = ScoringRule(SamplingParams(), 4, max_anchors=3)
    path = TargetPath(0, (1,), tuple(range(24)), 24)  # 23 anchors, the last with 4 tokens behind it is 19
    assert rule.anchors_of(path).tolist() == [0, 10, 19]
    assert rule.anchors_of(replace(path, token_ids=(1, 2, 3))).tolist() == []
    assert replace(rule, max_anchors=None).anchors_of(path).tolist() == list(range(23))


def test_readings_leave_the_drafter_as_it_was(target, tmp_path):
    drafter = load_drafter(write_drafter(tmp_path, stored_drafter()), target=target)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    config = drafter.config
    readings = list(alternatives(drafter, target, {}))
    assert {reading.topic for reading in readings} >= {
        "taps",
        "layout",
        "mask",
        "rope",
        "causality",
        "embedding",
        "norm",
    }
    assert drafter.config is config
    assert all(torch.equal(before[name], value) for name, value in drafter.state_dict().items())
    assert MASK not in mask_candidates(config, target, {})
    assert MASK in mask_candidates(replace(config, mask_token_id=3), target, {})
    assert max(mask_candidates(config, target, {"pad_token_id": VOCAB + 3})) < VOCAB


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="new_tokens=3 must be at least 4"):
        DoctorSettings(new_tokens=3)
    with pytest.raises(CheckpointError):
        load_drafter("/nowhere")
