"""The folder of a report: a page that states every figure, and plots that can be read."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from runs import coin_run, record
from step_records import step

from dspark.evals import document
from dspark.evals.compare import Run, compare_runs
from dspark.evals.document import write_report
from dspark.evals.report import format_comparison, format_table
from dspark.evals.stats import Estimate

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed: pip install 'dspark[plots]'"
)


def page(folder, comparison) -> str:
    """report.md without drawing anything."""
    document.write_report(folder, comparison)
    return (folder / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setattr(document, "plots_available", lambda: False)


def rows_of_table(text, title):
    """Cells of the first Markdown table behind a heading."""
    lines = text[text.index(title) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [table[0], *table[2:]]


@pytest.mark.usefixtures("without_matplotlib")
class TestPage:
    def test_figures_of_one_run_with_their_intervals(self, tmp_path):
        run = coin_run(datasets=("math", "code"), domains=("easy", "hard"))
        text = page(tmp_path, compare_runs([run]))
        header, first, *others = rows_of_table(text, "## Tokens per step")
        figures = run.rows[0].acceptance
        assert header[:4] == ["prompts", "temperature", "requests", "steps"]
        assert first[:4] == ["math", "0", "8", "320"]
        value = figures.tokens_per_step
        assert first[4] == f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"
        assert [row[0] for row in others] == ["math", "code", "code", "mean of 2 sets", "mean of 2 sets"]
        positions = rows_of_table(text, "**math, temperature 1**")
        assert [row[0] for row in positions[1:]] == ["1", "2", "3"]
        assert all(
            re.fullmatch(r"-?\d\.\d+ \[-?\d\.\d+, -?\d\.\d+\]", cell) for row in positions[1:] for cell in row[4:]
        )
        assert [row[0] for row in rows_of_table(text, "By domain")[1:3]] == ["math: easy", "math: hard"]
        assert [row[0] for row in rows_of_table(text, "## Calibration")[1:]][:2] == [
            "math, temperature 0",
            "math, temperature 1",
        ]
        assert "target a target; drafter a drafter; dspark 0.1.0, torch 2.13.0; commit 0000" in text

    def test_what_is_compared_is_stated(self, tmp_path):
        runs = [coin_run("short", num_draft_tokens=2), coin_run("long")]
        comparison = compare_runs(runs, ["num_draft_tokens"])
        text = page(tmp_path, comparison)
        assert "The runs differ in num_draft_tokens." in text
        assert rows_of_table(text, "## Compared") == [["setting", "short", "long"], ["num_draft_tokens", "2", "3"]]
        assert len(rows_of_table(text, "Against short")) == 3
        printed = format_comparison(comparison)
        assert "compared: num_draft_tokens\n  num_draft_tokens: 2 (short), 3 (long)" in printed
        change = next(line for line in printed.splitlines() if line.startswith("long against short, math T=0"))
        assert re.search(
            r"same requests: tokens per step differ by \+\d\.\d\d \[[-+]\d\.\d\d, \+\d\.\d\d\], ratio 1", change
        )
        reversed_order = format_comparison(compare_runs(runs[::-1], ["num_draft_tokens"]))
        assert re.search(r"short against long, math T=0, .* tokens per step differ by -\d\.\d\d \[", reversed_order)

    def test_missing_plots_are_said_with_the_remedy(self, tmp_path):
        assert "pip install 'dspark[plots]'" in (write_report(tmp_path, compare_runs([coin_run()])) or "")
        text = (tmp_path / "report.md").read_text()
        assert "Plots were not drawn: matplotlib is not installed" in text
        assert "![" not in text
        assert list(tmp_path.glob("*.png")) == []

    def test_realised_acceptance_is_set_against_its_expectation(self, tmp_path):
        """Coin flips with the reported chances: most of the 95% intervals of three positions and one cell hold 0."""
        text = page(tmp_path, compare_runs([coin_run(num_prompts=20)]))
        inside, total = map(int, re.search(r"requests: (\d+) of (\d+) intervals", text).groups())
        assert total == 3  # temperature 0 is left out
        assert inside >= 2

    def test_a_run_without_confidences_or_drafts(self, tmp_path):
        described = coin_run(temperatures=(1.0,), num_prompts=3).description
        cells = {("math", 1.0): [record("math", 1.0, i, [step(2, 1)] * 5) for i in range(3)]}
        text = page(tmp_path / "a", compare_runs([Run("run", described, cells)]))
        assert "No confidences were reported." in text
        plain = coin_run(drafter=None, num_draft_tokens=0, temperatures=(1.0,), num_prompts=3).description
        cells = {("math", 1.0): [record("math", 1.0, i, [step(0, 0)] * 5) for i in range(3)]}
        text = page(tmp_path / "b", compare_runs([Run("run", plain, cells)]))
        assert "plain decoding" in text
        assert "## Acceptance by draft position" not in text

    def test_calibration_that_was_applied_is_named(self, tmp_path):
        run = coin_run(drafter={"confidence_scaling": {"temperatures": [1.25, 2.0], "offsets": [0.5, -1.0]}})
        assert "scaled by temperatures 1.25 2, offsets 0.5 -1." in page(tmp_path, compare_runs([run]))


def test_the_printed_table_ends_with_the_means_of_the_sets():
    run = coin_run(datasets=("math", "code"), temperatures=(1.0,))
    lines = format_table(run.rows, run.macro_rows).splitlines()
    assert lines[3].startswith("mean of 2")
    assert f"{run.macro_rows[0].tokens_per_step.value:.2f} [" in lines[3]


def test_a_run_in_which_the_schedule_verified_nothing_says_so():
    described = coin_run(temperatures=(1.0,), num_prompts=3).description
    cells = {("math", 1.0): [record("math", 1.0, i, [step(0, 0)] * 5) for i in range(3)]}
    row = Run("run", described, cells).rows[0]
    printed = format_table([row])
    assert "no drafts were verified" in printed
    assert row.label not in printed


@needs_matplotlib
class TestPlots:
    """What is drawn is looked at by people; here only that each figure is there, shown in the page, and not blank."""

    def test_one_run(self, tmp_path):
        assert write_report(tmp_path, compare_runs([coin_run(datasets=("math", "code"))])) is None
        names = {"acceptance.png", "reliability.png", "accepted_length.png", "tokens_per_step.png"}
        assert {path.name for path in tmp_path.glob("*.png")} == names
        self.check(tmp_path)

    def test_several_runs(self, tmp_path):
        runs = [coin_run(name, drafter={"weights_sha256": str(i) * 64}) for i, name in enumerate(("a b", "c/d"))]
        write_report(tmp_path, compare_runs(runs, ["drafter"]))
        names = {"runs.png", "tokens_per_step.png", "acceptance-a_b.png", "acceptance-c_d.png", "reliability-c_d.png"}
        assert names <= {path.name for path in tmp_path.glob("*.png")}
        self.check(tmp_path)

    def test_a_server_that_reports_neither_expectations_nor_confidences(self, tmp_path):
        described = coin_run(temperatures=(1.0,), num_prompts=1).description
        cells = {("math", 1.0): [record("math", 1.0, 0, [step(2, 1)] * 12)]}
        write_report(tmp_path, compare_runs([Run("run", described, cells)]))
        assert not (tmp_path / "reliability.png").exists()
        self.check(tmp_path)

    def test_a_plain_run_beside_a_drafted_one(self, tmp_path):
        plain = coin_run("plain", drafter=None, num_draft_tokens=0, num_prompts=3).description
        cells = {("math", t): [record("math", t, i, [step(0, 0)] * 9) for i in range(3)] for t in (0.0, 1.0)}
        runs = [Run("plain", plain, cells), coin_run("drafted", num_prompts=3)]
        write_report(tmp_path, compare_runs(runs, ["drafter", "num_draft_tokens"]))
        assert not (tmp_path / "acceptance-plain.png").exists()
        self.check(tmp_path)

    def check(self, folder: Path):
        from matplotlib.image import imread

        shown = set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", (folder / "report.md").read_text()))
        assert shown == {path.name for path in folder.glob("*.png")}
        for name in shown:
            pixels = imread(folder / name)[..., :3]
            assert 300 < pixels.shape[1] < 4000
            assert 0.02 < (pixels < 0.9).any(axis=2).mean() < 0.7  # something is drawn, on a light ground

    def test_whiskers_reach_from_the_value_to_the_interval(self):
        from dspark.evals.plots import _whiskers

        value, reach = _whiskers([Estimate(0.5, 0.4, 0.7), Estimate(0.2), Estimate(None)])
        assert value == pytest.approx([0.5, 0.2, np.nan], nan_ok=True)
        assert reach == pytest.approx(np.array([[0.1, 0, 0], [0.2, 0, 0]]))

    @pytest.mark.parametrize("drawn", ["_lines", "_bars"])
    def test_a_series_has_one_colour_in_every_panel(self, drawn):
        """Runs of other temperatures leave panels empty; the legend names every run once, in the runs' order."""
        from dspark.evals import plots

        some = [Estimate(0.5, 0.4, 0.6)]
        panels = [("0", {"a": [], "b": some, "c": some}), ("1", {"a": some, "b": [], "c": some})]
        figure = plots._draw([panels], getattr(plots, drawn), "", "", 3.0)
        colours = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                colour = handle.lines[0].get_color() if drawn == "_lines" else handle.patches[0].get_facecolor()
                colours.setdefault(label, set()).add(colour)
        assert sorted(map(len, colours.values())) == [1, 1, 1]
        assert len(set.union(*colours.values())) == 3
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
