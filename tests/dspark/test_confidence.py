"""Calibrated confidences: what lies beside a drafter is applied wherever a confidence leaves it, or refused by name."""

import json
import math

import pytest
import torch
from checkpoints_util import DEEPSPEC, changed, random_weights, write_checkpoint, write_deepspec
from pairs import drafter_config, tiny_drafter, tiny_target

from dspark.checkpoint import load_drafter
from dspark.confidence import CALIBRATION_FILE, ConfidenceCalibration, Scaling, head_digest, write_calibration
from dspark.default import default_drafter_path
from dspark.families import CheckpointError
from dspark.inspect import inspect_checkpoint
from dspark.loop import generate
from dspark.sampling import SamplingParams

TEMPERATURES, OFFSETS = (0.5, 2.0, 1.25, 4.0), (0.25, -1.0, 0.0, 2.5)
SCALING = ("temperatures", "offsets")


def shortened(raw):
    """The file of a drafter with a position less."""
    return raw | {name: raw[name][:-1] for name in SCALING}


def digest_of(folder):
    """The head's digest, as `dspark calibrate` computes it for a drafter that has no calibration yet."""
    head = load_drafter(folder).confidence_head
    return head_digest(
        [("confidence_head.proj.weight", head.proj.weight), ("confidence_head.proj.bias", head.proj.bias)]
    )


@pytest.fixture
def folder(tmp_path):
    return write_deepspec(tmp_path)


@pytest.fixture
def calibration(folder):
    num_positions = load_drafter(folder).config.max_draft_tokens
    scaling = Scaling((TEMPERATURES * 2)[:num_positions], (OFFSETS * 2)[:num_positions])
    return ConfidenceCalibration(scaling, digest_of(folder))


def test_what_lies_beside_the_drafter_is_loaded(folder, calibration):
    write_calibration(folder / CALIBRATION_FILE, calibration)
    drafter = load_drafter(folder)
    assert drafter.calibration == calibration
    logits = torch.linspace(-3, 3, drafter.config.max_draft_tokens)[None]
    expected = logits / torch.tensor(calibration.scaling.temperatures) + torch.tensor(calibration.scaling.offsets)
    assert torch.equal(drafter.confidence_head.calibrated(logits), expected)
    assert torch.equal(drafter.confidence_head.calibrated(logits[:, :2]), expected[:, :2])  # fewer drafts than trained


def test_without_a_file_confidences_are_the_heads_own(folder):
    drafter = load_drafter(folder)
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert drafter.calibration is None
    assert drafter.confidence_head.calibrated(logits) is logits


def test_the_calibration_is_no_tensor_of_the_checkpoint(folder, calibration):
    before = load_drafter(folder).state_dict().keys()
    write_calibration(folder / CALIBRATION_FILE, calibration)
    assert load_drafter(folder).state_dict().keys() == before
    assert load_drafter(folder, dtype=torch.bfloat16).confidence_head.scaling.dtype == torch.float32


def test_step_records_hold_calibrated_confidences_and_the_same_tokens():
    """Only the confidences change: sigmoid(z / T + b) for sigmoid(z), position by position."""
    target = tiny_target()
    drafter = tiny_drafter(drafter_config(), target)
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(temperature=1.0, seed=3, max_new_tokens=12)
    (plain, *_), raw = (runs := generate(target, drafter, prompts, params)), runs
    drafter.calibrate(ConfidenceCalibration(Scaling(TEMPERATURES, OFFSETS), "0" * 64))
    scaled = generate(target, drafter, prompts, params)
    assert [g.token_ids for g in scaled] == [g.token_ids for g in raw]
    assert any(step.confidence for step in plain.steps)
    for before, after in zip(raw, scaled, strict=True):
        for old, new in zip(before.steps, after.steps, strict=True):
            scaling = torch.tensor([TEMPERATURES, OFFSETS], dtype=torch.float64)[:, : len(old.confidence)]
            expected = torch.tensor(old.confidence, dtype=torch.float64).logit() / scaling[0] + scaling[1]
            assert new.confidence == pytest.approx(expected.sigmoid().tolist(), abs=1e-9)
            assert new.accept_probs == old.accept_probs


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(shortened, "temperatures; expected", id="few"),
        pytest.param(lambda raw: {**raw, **{n: raw[n] * 2 for n in SCALING}}, "one for each draft", id="many"),
        pytest.param(
            lambda raw: raw | {"offsets": raw["offsets"][:-1]}, "[0-9] temperatures and [0-9] off", id="fewer"
        ),
        pytest.param(lambda raw: raw | {"offsets": [0, -math.inf]}, r"offsets\[1\].* is -inf;", id="infinite-offset"),
        pytest.param(lambda raw: raw | {"offsets": None}, "lists of temperatures and offsets", id="no-offsets"),
        pytest.param(lambda raw: raw | {"temperatures": [0, *raw["temperatures"][1:]]}, r"\[0\] .* is 0;", id="zero"),
        pytest.param(lambda raw: raw | {"temperatures": [-1.5] * 8}, r"temperatures\[0\].* is -1.5;", id="negative"),
        pytest.param(lambda raw: raw | {"temperatures": [1.0, math.nan]}, r"temperatures\[1\].* is nan;", id="nan"),
        pytest.param(lambda raw: raw | {"temperatures": [math.inf]}, r"temperatures\[0\].* is inf;", id="infinite"),
        pytest.param(lambda raw: raw | {"temperatures": ["1"]}, r"temperatures\[0\].* is '1';", id="text"),
        pytest.param(lambda raw: raw | {"temperatures": [True]}, r"temperatures\[0\].* is True;", id="bool"),
        pytest.param(lambda raw: raw | {"temperatures": 1.0}, "lists of temperatures and", id="no-list"),
        pytest.param(lambda raw: raw | {"fitted_on": 3}, "figures as dspark writes them", id="no-settings"),
        pytest.param(lambda raw: raw | {"held_out": {"ece": {}}}, "figures as dspark writes them", id="no-figures"),
        pytest.param(lambda raw: raw | {"method": "platt"}, "method 'platt'", id="another-method"),
        pytest.param(lambda raw: raw | {"bias": 0.1}, "has the fields bias, confidence_head", id="unknown-field"),
        pytest.param(lambda raw: {"temperatures": raw["temperatures"]}, "a guess", id="missing-fields"),
        pytest.param(lambda raw: raw | {"confidence_head_sha256": "ab" * 32}, "fitted for the conf", id="another-head"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused_by_name(edit, message, folder, calibration):
    path = folder / CALIBRATION_FILE
    path.write_text(json.dumps(edit(calibration.to_dict())))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder)
    inspection = inspect_checkpoint(folder)
    assert not inspection.loadable
    assert "see the refusals" in inspection.calibration


def test_weights_that_were_trained_again_are_noticed(folder, calibration):
    write_calibration(folder / CALIBRATION_FILE, calibration)
    weights = random_weights(DEEPSPEC)
    weights["confidence_head.proj.bias"] += 0.01
    write_checkpoint(folder, DEEPSPEC, weights)
    with pytest.raises(CheckpointError, match="the head of this checkpoint"):
        load_drafter(folder)


def test_a_calibration_beside_a_drafter_without_a_head_is_refused(tmp_path, calibration):
    (tmp_path / "other").mkdir()
    raw = changed(DEEPSPEC, {"enable_confidence_head": False, "confidence_head_with_markov": False})
    weights = {name: value for name, value in random_weights(DEEPSPEC).items() if "confidence_head" not in name}
    other = write_checkpoint(tmp_path / "other", raw, weights)
    write_calibration(other / CALIBRATION_FILE, calibration)
    with pytest.raises(CheckpointError, match="without a confidence head"):
        load_drafter(other)


def test_setting_one_by_hand_is_checked_too(folder):
    drafter = load_drafter(folder)
    with pytest.raises(ValueError, match=f"1 temperatures for {drafter.config.max_draft_tokens} draft positions"):
        drafter.calibrate(ConfidenceCalibration(Scaling((1.0,), (0.0,)), ""))


def test_inspect_says_whether_it_is_there(folder, calibration):
    assert inspect_checkpoint(folder).calibration == f"not calibrated (no {CALIBRATION_FILE})"
    write_calibration(folder / CALIBRATION_FILE, calibration)
    inspection = inspect_checkpoint(folder)
    assert "temperatures 0.5 2 1.25" in inspection.calibration
    assert "offsets 0.25 -1 0 " in inspection.calibration
    assert "sequential temperature scaling" in inspection.to_text()
    assert inspection.to_dict()["calibration"] == inspection.calibration


def test_the_embedded_drafter_is_calibrated():
    """Its file fits its head, and was fitted on sampled requests whose other half was measured."""
    calibration = load_drafter(default_drafter_path()).calibration
    assert len(calibration.scaling.temperatures) == 8
    assert all(0.5 < temperature < 2 for temperature in calibration.scaling.temperatures)
    assert all(abs(offset) < 0.5 for offset in calibration.scaling.offsets)
    assert min(calibration.fitted_on["temperatures"]) > 0
    assert calibration.held_out["num_requests"] >= 200
    assert calibration.held_out["ece"]["after"]["high"] < 0.02
