"""`dspark quality` on a counting pair: tables, JSON, exit statuses, and how the words of the command are read."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_target import write_counting_pair

from dspark.cli import main
from dspark.cli_paths import named_models


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, drafter = write_counting_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(drafter)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Two prompts at temperature 0, five tokens a step."""
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "A"}\n{"prompt": "B"}\n')
    states = ["--states", str(tmp_path / "states")]
    return ["--dataset", str(prompts), "--max-new-tokens", "6", "--temperature", "0", *states]


def run(*arguments: str) -> int:
    """`main`, with argparse's exit turned into its status."""
    try:
        return main(["quality", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_a_table_and_the_files(pair, flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(*pair, *flags, "--num-draft-tokens", "2", "4", "--out", str(tmp_path / "out")) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines() if line.startswith("drafter (vanilla head)  mine")]
    assert [row[3:9] for row in rows] == [["mine", "0", "2", "2", "4", "2.50"], ["mine", "0", "4", "2", "2", "5.00"]]
    assert "target states are kept in" in said.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["quality"]["tokens_per_step"]["value"] for row in results["rows"]] == [2.5, 5.0]
    assert results["rows"][0]["settings"]["target_name"] == f"local folder {pair[0]}"


def test_a_second_run_reads_the_states(pair, flags, capsys: pytest.CaptureFixture[str]):
    assert run(*pair, *flags, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert run(*pair, *flags, "--json") == 0
    said = capsys.readouterr()
    assert "continue:" not in said.err
    second = json.loads(said.out)
    for report in (first, second):
        report["rows"][0].pop("seconds")
    assert first == second


@pytest.mark.parametrize(("threshold", "status"), [("5", 0), ("5.01", 1)])
def test_requirements_decide_the_status(pair, flags, capsys: pytest.CaptureFixture[str], threshold, status):
    required = f"tokens_per_step>={threshold}"
    assert run(*pair, *flags, "--require", "acceptance_rate>=1", required) == status
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0] == "ok acceptance_rate>=1: lowest 1, drafter, mine T=0 K=4 (of 1 rows)"
    assert lines[1].startswith(f"{'FAILED' if status else 'ok'} {required}: lowest 5, drafter, mine T=0 K=4")


def test_a_wrong_requirement_costs_no_loading(pair, flags, capsys: pytest.CaptureFixture[str]):
    assert run(*pair, *flags, "--require", "speed>=2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no figure 'speed'; there are tokens_per_step" in line


def test_a_position_beyond_the_drafts_is_refused(pair, flags, capsys: pytest.CaptureFixture[str]):
    assert run(*pair, *flags, "--require", "one_minus_tv[5]>=0.5") == 2
    assert "there is no draft 5; positions are 1..4" in capsys.readouterr().err


def test_several_drafters_side_by_side(pair, flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = tmp_path / "other"
    shutil.copytree(pair[1], other)
    assert run(pair[1], str(other), "--target", pair[0], *flags, "--ablate", "markov", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["drafter"], row["variant"]) for row in rows] == [
        ("drafter", ""),
        ("drafter", "without Markov head"),
        ("other", ""),
        ("other", "without Markov head"),
    ]
    assert rows[0]["quality"]["tokens_per_step"]["value"] == 5.0
    assert rows[1]["quality"]["tokens_per_step"]["value"] == 1.0
    assert run(pair[1], pair[1], "--target", pair[0], *flags) == 2
    assert "is named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "target", "named"),
    [
        ([], None, ("embedded", ["embedded"])),
        (["d"], None, ("embedded", ["d"])),
        (["t", "d"], None, ("t", ["d"])),
        (["t", "d", "e"], None, ("t", ["d", "e"])),
        (["d", "e"], "t", ("t", ["d", "e"])),
        ([], "embedded", ("embedded", ["embedded"])),
    ],
)
def test_how_models_are_named(models, target, named):
    assert named_models(models, target) == named


def test_a_target_alone_is_refused():
    with pytest.raises(ValueError, match="--target t needs a drafter"):
        named_models([], "t")
