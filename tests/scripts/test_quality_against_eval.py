"""The comparison of expected and counted figures: what is matched, and when it fails."""

import json

import pytest
import quality_against_eval


def estimate(value, half_width=0.1):
    return {"value": value, "low": value - half_width, "high": value + half_width}


@pytest.fixture
def folders(tmp_path):
    """Equal results of one row with one draft; `write(counted=...)` changes a counted figure."""

    def write(**counted):
        quality = {name: estimate(0.5) for name in quality_against_eval.WHOLE}
        position = {"unconditional": estimate(0.5), "conditional": estimate(0.5), "position": 0, "num_reached": 60}
        scored = quality | {"positions": [position | {"one_minus_tv": estimate(0.5)}], "calibration": None}
        seen = quality | {"positions": [position | {"expected": estimate(0.5)}], "calibration": None} | counted
        shared = {"dataset": "set", "temperature": 1.0}
        for name, row in (("quality", {"variant": "", "quality": scored}), ("eval", {"acceptance": seen})):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "results.json").write_text(json.dumps({"rows": [shared | row]}))
        return [str(tmp_path / "quality"), str(tmp_path / "eval")]

    return write


def test_equal_results_pass(folders, capsys):
    assert quality_against_eval.main(folders()) == 0
    said = capsys.readouterr()
    assert said.out.count("set T=1 K=1") == 6
    assert "6 figures; largest difference +0.00 standard errors" in said.err


def test_a_difference_is_in_standard_errors_of_both(folders, capsys):
    """Half widths of 0.1 are 0.051 each, together 0.0722: 0.29 more is 4.02 of them."""
    paths = folders(tokens_per_step=estimate(0.79))
    assert quality_against_eval.main([*paths, "--json"]) == 1
    (line,) = [each for each in json.loads(capsys.readouterr().out) if each["figure"] == "tokens_per_step"]
    assert line["standard_errors"] == pytest.approx(4.02, abs=0.01)
    assert quality_against_eval.main([*paths, "--limit", "4.1"]) == 0


def test_positions_that_few_steps_reached_are_left_out(folders, capsys):
    assert quality_against_eval.main([*folders(), "--min-steps", "61"]) == 0
    assert capsys.readouterr().out.count("set T=1 K=1") == 3


def test_no_common_row_is_an_error(folders):
    with pytest.raises(SystemExit, match="no row of the two"):
        quality_against_eval.main(folders(positions=[]))
