"""`dspark eval` over several drafters and draft lengths, `dspark report` and `dspark calibrate`, on a tiny pair."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_target import write_counting_pair

from dspark.checkpoint import load_drafter
from dspark.cli import main
from dspark.confidence import CALIBRATION_FILE
from dspark.cost import CostPoint, CostTable
from dspark.default import TARGET_VARIABLE
from dspark.evals import document
from dspark.evals.records import RecordStore


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, drafter = write_counting_pair(tmp_path_factory.mktemp("pair"))
    return str(target), str(drafter)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "ABCDEFGHIJKLMNOPQRSTUVWX"))
    return str(path)


@pytest.fixture(autouse=True)
def no_plots_and_no_named_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(document, "plots_available", lambda: False)
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)


def run(*arguments: str) -> int:
    """`main`, with argparse's exit turned into its status."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def folders(models, prompts, tmp_path_factory) -> list[str]:
    """Runs with 2 and 4 drafts, and one with 4 at another temperature."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["eval", "--target", models[0], "--drafter", models[1], "--dataset", prompts, "--limit", "2"]
    flags += ["--max-new-tokens", "9"]
    for name, extra in (("two", ["2", "0"]), ("four", ["4", "0"]), ("warm", ["4", "0.5"])):
        extra = ["--num-draft-tokens", extra[0], "--temperature", extra[1], "--out", str(folder / name)]
        assert run(*flags, *extra) == 0
    return [str(folder / name) for name in ("two", "four", "warm")]


@pytest.fixture(scope="module")
def sampled(models, prompts, tmp_path_factory) -> tuple[str, str]:
    """A run in which some drafts are rejected at every position, and its drafter: one that is less sure than the
    target."""
    folder = tmp_path_factory.mktemp("sampled")
    drafter = shutil.copytree(models[1], folder / "drafter")
    weights = load_file(drafter / "model.safetensors")
    weights["markov_head.markov_w2.weight"] *= 0.8
    save_file(weights, drafter / "model.safetensors")
    flags = ["--dataset", prompts, "--max-new-tokens", "120", "--temperature", "20", "--batch-size", "24"]
    out = ["--drafter", str(drafter), "--out", str(folder / "run")]
    assert run("eval", "--target", models[0], *flags, *out) == 0
    return str(folder / "run"), str(drafter)


class TestCells:
    @pytest.fixture
    def flags(self, models, prompts) -> list[str]:
        return ["--target", models[0], "--dataset", prompts, "--limit", "2", "--max-new-tokens", "9"]

    def test_draft_lengths_side_by_side(self, models, flags, tmp_path, capsys):
        lengths = ["--num-draft-tokens", "1", "--num-draft-tokens", "3"]
        command = ["eval", *flags, "--drafter", models[1], *lengths, "--temperature", "0", "--out", str(tmp_path)]
        assert run(*command) == 0
        said = capsys.readouterr()
        rows = [line.split()[:6] for line in said.out.splitlines() if re.match(r"K=\d +mine ", line)]
        assert [(row[0], row[5]) for row in rows] == [("K=1", "2.00"), ("K=3", "4.00")]
        assert "compared: num_draft_tokens" in said.out
        assert "K=3 against K=1, mine T=0, same requests: tokens per step differ by +2.00 [+2.00, +2.00]" in said.out
        assert f"report: {tmp_path / 'report.md'}; plots were not drawn" in said.err
        assert results(tmp_path)["comparison"]["fields"] == {"num_draft_tokens": [1, 3]}
        assert {path.name for path in tmp_path.iterdir()} == {"K=1", "K=3", "results.json", "report.md"}
        records = {path: path.read_bytes() for path in tmp_path.glob("*/records.jsonl")}
        (tmp_path / "K=3" / "records.jsonl").write_bytes(records[tmp_path / "K=3" / "records.jsonl"][:-30])
        assert run(*command) == 0  # continues with the request that was torn
        assert {path: path.read_bytes() for path in records} == records
        capsys.readouterr()
        assert run("eval", *flags, "--drafter", models[1], "--out", str(tmp_path)) == 2
        assert "holds the runs of a comparison" in capsys.readouterr().err
        assert run(*command[:-1], str(tmp_path / "K=1")) == 2
        assert "holds a single run" in capsys.readouterr().err
        assert run("report", str(tmp_path)) == 0  # what the command varied may differ
        assert "compared: num_draft_tokens" in capsys.readouterr().out

    def test_an_interrupted_comparison_says_which_run_never_started(self, models, flags, tmp_path, capsys, monkeypatch):
        def interrupted(run, progress=True):
            raise KeyboardInterrupt

        monkeypatch.setattr("dspark.evals.run.OpenRun.finish", interrupted)
        lengths = ["--num-draft-tokens", "1", "--num-draft-tokens", "3"]
        command = [*flags, "--drafter", models[1], *lengths, "--temperature", "0", "--out", str(tmp_path)]
        assert run("eval", *command) == 130
        assert f"0 of 4 requests are kept in {tmp_path}; the same command continues there" in capsys.readouterr().err
        assert run("report", str(tmp_path)) == 2
        message = f"{tmp_path / 'K=1'} is not finished: 0 of 2 requests of mine at temperature 0"
        assert message in capsys.readouterr().err
        assert (tmp_path / "K=3" / "settings.json").is_file()

    def test_drafters_side_by_side(self, models, flags, tmp_path, capsys):
        copies = [shutil.copytree(models[1], tmp_path / name / "drafter") for name in "ab"]
        drafters = [flag for copy in copies for flag in ("--drafter", str(copy))]
        assert run("eval", *flags, *drafters, "--temperature", "0", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["compared"] == "drafter"
        assert [row["run"] for row in report["rows"]] == ["drafter (1)", "drafter (2)"]
        assert report["rows"][0]["acceptance"] == report["rows"][1]["acceptance"]

    def test_an_interrupted_run_says_what_is_kept(self, models, flags, tmp_path, capsys, monkeypatch):
        def kept_one(records, record, add=RecordStore.add):
            add(records, record)
            raise KeyboardInterrupt

        command = ["eval", *flags, "--drafter", models[1], "--temperature", "0", "--out", str(tmp_path / "out")]
        with monkeypatch.context() as patch:
            patch.setattr(RecordStore, "add", kept_one)
            assert run(*command) == 130
        assert f"1 of 2 requests are kept in {tmp_path / 'out'}; the same command continues" in capsys.readouterr().err
        assert run(*command) == 0
        assert "1 of 2 requests are already there in" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("drafts", "noticed"),
        [
            pytest.param(2, False, id="covered"),
            pytest.param(4, True, id="more-drafts"),
        ],
    )
    def test_a_run_beyond_its_cost_table_is_noticed(self, models, flags, drafts, noticed, tmp_path, capsys):
        points = [CostPoint(size, 1 + k, True, 1.0 + k, 1, 1, 3) for size in (1, 2) for k in range(3)]
        table = CostTable((*points, *(CostPoint(size, 1, False, 1.0, 1, 1, 3) for size in (1, 2))), {})
        table.save(tmp_path / "cost.json")
        drafting = ["--num-draft-tokens", str(drafts), "--schedule", str(tmp_path / "cost.json")]
        assert run("eval", *flags, "--drafter", models[1], "--temperature", "0", *drafting) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "the cost table covers" in line]
        assert len(lines) == noticed
        if noticed:
            assert (
                "1..2 requests with 0..2 drafts each, and the run has up to 2 requests with up to 4 drafts" in lines[0]
            )

    def test_so_is_one_of_generate(self, models, tmp_path, capsys):
        points = (CostPoint(1, 1, True, 1.0, 1, 1, 3), CostPoint(1, 1, False, 1.0, 1, 1, 3))
        CostTable(points, {}).save(tmp_path / "cost.json")
        pair = ["--target", models[0], "--drafter", models[1], "--max-new-tokens", "4"]
        assert run("generate", "--prompt", "A", *pair, "--schedule", str(tmp_path / "cost.json")) == 0
        assert "covers 1..1 requests with 0..0 drafts each, and the run has up to 1 request" in capsys.readouterr().err

    def test_a_damaged_prompt_set_costs_no_loading(self, models, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("dspark.commands_eval.load_pair", lambda *_: pytest.fail("models were loaded"))
        (tmp_path / "torn.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
        command = ["--dataset", str(tmp_path / "torn.jsonl"), "--out", str(tmp_path / "out")]
        assert run("eval", "--target", models[0], "--drafter", models[1], *command) == 2
        assert "torn.jsonl:2: not valid JSON" in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            pytest.param(["--num-draft-tokens", "2", "--num-draft-tokens", "2"], "names one value twice", id="twice"),
            pytest.param(["--num-draft-tokens", "2", "--num-draft-tokens", "0"], "must be at least 1", id="zero"),
            pytest.param(["--num-draft-tokens", "2", "--num-draft-tokens", "9"], "outside 1..4", id="too-many"),
            pytest.param(["--drafter", "nowhere"], "drafter nowhere: no such folder", id="no-such-drafter"),
            pytest.param(["--plain", "--schedule", "threshold:0.5"], "without a drafter", id="plain-schedule"),
            pytest.param(["--plain", "--num-draft-tokens", "2", "--num-draft-tokens", "3"], "--plain", id="plain"),
            pytest.param(
                ["--backend", "vllm", "--num-draft-tokens", "2", "--num-draft-tokens", "3"],
                "set them side by side with dspark report",
                id="vllm",
            ),
        ],
    )
    def test_mistakes_are_one_line_and_come_before_any_run(self, models, flags, extra, message, tmp_path, capsys):
        assert run("eval", *flags, "--drafter", models[1], *extra, "--out", str(tmp_path / "out")) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert message in said.err.splitlines()[-1]
        assert not (tmp_path / "out").exists()


class TestReport:
    def test_runs_that_differ_are_refused_until_it_is_said_that_it_is_meant(self, folders, tmp_path, capsys):
        assert run("report", *folders) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "num_draft_tokens: 2 (two), 4 (four+warm)" in line
        assert line.endswith("add --allow-differences num_draft_tokens")
        out = tmp_path / "out"
        assert run("report", *folders, "--allow-differences", "num_draft_tokens", "--out", str(out)) == 0
        said = capsys.readouterr()
        assert "four+warm against two, mine T=0, same requests" in said.out
        assert "| num_draft_tokens | 2 | 4 |" in (out / "report.md").read_text()
        assert [row["run"] for row in results(out)["rows"]] == ["two", "four+warm", "four+warm"]

    def test_one_run_gets_its_report_again(self, folders, tmp_path, capsys):
        copy = shutil.copytree(folders[0], tmp_path / "copy")
        (copy / "report.md").unlink()
        assert run("report", str(copy), "--out", str(copy)) == 0
        assert (copy / "report.md").is_file()
        assert results(copy)["rows"] == [row | {"run": "copy"} for row in results(Path(folders[0]))["rows"]]

    def test_the_report_of_a_comparison_does_not_go_into_a_run(self, folders, capsys):
        flags = ["--allow-differences", "num_draft_tokens", "--out", folders[0]]
        assert run("report", *folders, *flags) == 2
        assert "the folder of a single run" in capsys.readouterr().err


class TestCalibrate:
    def test_what_is_fitted_is_written_loaded_and_measured_on_others(self, sampled, models, prompts, capsys, tmp_path):
        folder, drafter = sampled
        copy = shutil.copytree(drafter, tmp_path / "drafter")
        assert run("calibrate", folder, "--drafter", str(copy), "--check", folder, "--json") == 0
        said = capsys.readouterr()
        report = json.loads(said.out)
        stored = json.loads((copy / CALIBRATION_FILE).read_text())
        assert f"written: {copy / CALIBRATION_FILE}" in said.err
        scaling = {name: stored[name] for name in ("temperatures", "offsets")}
        assert scaling == {name: report[name] for name in scaling}
        assert load_drafter(copy).calibration.scaling == tuple(tuple(values) for values in scaling.values())
        assert stored["fitted_on"]["num_requests"] == stored["held_out"]["num_requests"] == 12
        assert stored["fitted_on"]["datasets"][0]["num_prompts"] == 24
        assert str(tmp_path) not in json.dumps(stored)  # no paths of this machine
        pooled, half, check = report["effects"]
        assert (pooled["temperature"], half["name"], check["name"]) == (None, "mine, other half", "mine")
        assert (half["effect"]["num_requests"], check["effect"]["num_requests"]) == (12, 24)
        assert pooled["effect"] == half["effect"]  # the run has one cell
        assert pooled["effect"]["brier"]["change"]["high"] < 0  # the tiny head is constant, and wrong

        again = ["--dataset", prompts, "--max-new-tokens", "120", "--temperature", "20", "--batch-size", "24"]
        out = tmp_path / "again"
        assert run("eval", "--target", models[0], *again, "--drafter", str(copy), "--out", str(out)) == 0
        row, before = results(out)["rows"][0], results(Path(folder))["rows"][0]
        assert row["settings"]["drafter"]["confidence_scaling"] == scaling
        assert row["acceptance"]["positions"][0]["conditional"] == before["acceptance"]["positions"][0]["conditional"]
        expected = check["effect"]["brier"]["after"]["value"]
        assert row["acceptance"]["calibration"]["brier"]["value"] == pytest.approx(expected, abs=1e-6)
        assert run("calibrate", str(out), "--drafter", str(copy), "--force", "--json") == 0
        refitted = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert np.log(refitted["temperatures"]) == pytest.approx(np.log(scaling["temperatures"]), abs=1e-3)
        assert refitted["offsets"] == pytest.approx(scaling["offsets"], abs=1e-3)

    def test_a_table_for_people(self, sampled, tmp_path, capsys):
        folder, drafter = sampled
        assert run("calibrate", folder, "--drafter", drafter, "--out", str(tmp_path / "c.json")) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("temperatures: ")
        assert lines[1].startswith("offsets: ")
        assert lines[2].split()[:3] == ["requests", "not", "fitted"]
        assert lines[3].startswith("all that were fitted, other half  all  12")
        assert not (Path(drafter) / CALIBRATION_FILE).exists()

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            pytest.param({"drafter.weights_sha256": "0" * 64}, "Name the drafter of the runs", id="another-drafter"),
            pytest.param({"settings.num_draft_tokens": 3}, "Run dspark eval with --num-draft-tokens 4", id="fewer"),
            pytest.param({"drafter": None}, "without a drafter", id="plain"),
            pytest.param({"backend.not_reported": ["confidence"]}, "without confidences", id="server"),
        ],
    )
    def test_runs_that_cannot_be_fitted_are_refused(self, sampled, edit, message, tmp_path, capsys):
        copy = shutil.copytree(sampled[0], tmp_path / "run")
        settings = json.loads((copy / "settings.json").read_text())
        for path, value in edit.items():
            *outer, key = path.split(".")
            place = settings
            for name in outer:
                place = place[name]
            place[key] = value
        (copy / "settings.json").write_text(json.dumps(settings))
        assert run("calibrate", str(copy), "--drafter", sampled[1], "--out", str(tmp_path / "c.json")) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "c.json").exists()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            pytest.param('{"fitted_on": {"num_requests": 480}}', "fitted on 480 requests", id="calibration"),
            pytest.param("notes", "is no calibration that dspark calibrate wrote", id="something-else"),
        ],
    )
    def test_what_is_there_is_replaced_only_with_force(self, sampled, content, said, tmp_path, capsys, monkeypatch):
        out = tmp_path / "c.json"
        out.write_text(content)
        command = ["calibrate", sampled[0], "--drafter", sampled[1], "--out", str(out)]
        with monkeypatch.context() as patch:
            patch.setattr("dspark.commands_eval.fit_calibration", lambda *_: pytest.fail("it was fitted"))
            assert run(*command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
        assert "--force replaces it" in line
        assert out.read_text() == content
        assert run(*command, "--force") == 0
        assert json.loads(out.read_text())["fitted_on"]["num_requests"] == 12

    @pytest.mark.parametrize("wanted", [["1"], ["20", "--temperature", "1"]])
    def test_a_temperature_that_was_not_run(self, sampled, wanted, tmp_path, capsys):
        flags = ["--drafter", sampled[1], "--out", str(tmp_path / "c.json"), "--temperature", *wanted]
        assert run("calibrate", sampled[0], *flags) == 2
        assert "no requests at a temperature 1" in capsys.readouterr().err

    def test_runs_of_several_lengths_are_refused_without_a_flag_that_is_not_there(self, sampled, tmp_path, capsys):
        copy = shutil.copytree(sampled[0], tmp_path / "run")
        settings = json.loads((copy / "settings.json").read_text())
        settings["settings"]["num_draft_tokens"] = 3
        (copy / "settings.json").write_text(json.dumps(settings))
        assert run("calibrate", sampled[0], str(copy), "--drafter", sampled[1], "--out", str(tmp_path / "c.json")) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "num_draft_tokens: 4" in line
        assert line.endswith("Fit to runs of the same settings")

    def test_too_few_requests(self, models, prompts, tmp_path, capsys):
        flags = ["--target", models[0], "--drafter", models[1], "--dataset", prompts, "--limit", "2"]
        out = str(tmp_path / "run")
        assert run("eval", *flags, "--max-new-tokens", "9", "--temperature", "0.5", "--out", out) == 0
        assert run("calibrate", out, "--drafter", models[1], "--out", str(tmp_path / "c.json")) == 2
        assert re.search(r"Run (some|more than) [\d.]+ times as many requests", capsys.readouterr().err)
