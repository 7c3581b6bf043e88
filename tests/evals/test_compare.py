"""Runs side by side: what may be compared, what is merged, and differences that keep the pairing of requests."""

import json
from dataclasses import replace

import numpy as np
import pytest
from runs import coin_run, record, write_run
from step_records import step

from dspark.evals.compare import Run, compare_runs, load_runs, paired_differences
from dspark.evals.document import write_results
from dspark.evals.rows import make_macro_row


def test_a_run_is_read_back_with_the_figures_of_its_records(tmp_path):
    run = coin_run(datasets=("math", "code"))
    (loaded,), varied = load_runs([write_run(tmp_path / "out", run)])
    assert loaded.name == "out"
    assert varied == []
    assert loaded.rows == run.rows
    assert loaded.macro_rows == run.macro_rows


class TestWhatMayBeCompared:
    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            pytest.param({"num_draft_tokens": 2}, "num_draft_tokens: 3 (a), 2 (b)", id="K"),
            pytest.param({"top_p": 0.9}, "top_p: 1.0 (a), 0.9 (b)", id="sampling"),
            pytest.param({"seed": 4}, "seed: 0 (a), 4 (b)", id="seed"),
            pytest.param({"drafter": {"weights_sha256": "e" * 64}}, "drafter.weights_sha256", id="drafter"),
            pytest.param(
                {"drafter": {"confidence_scaling": {"temperatures": [1, 2, 3]}}}, "scaling: null (a)", id="calibration"
            ),
            pytest.param({"drafter": None}, "drafter: {", id="plain"),
            pytest.param({"drafter_name": "copy"}, 'drafter.name: "a drafter" (a), "copy" (b)', id="name"),
            pytest.param({"num_prompts": 4}, 'datasets.math: "first 8 prompts', id="prompts"),
        ],
    )
    def test_settings_that_differ_unsaid_are_refused_with_both_values(self, changes, field):
        runs = [coin_run("a"), coin_run("b", **changes)]
        with pytest.raises(ValueError, match="not named as compared") as error:
            compare_runs(runs)
        assert field in str(error.value)
        name = field.split(":")[0].split(".")[0]
        name = "drafter" if name == "scaling" else name
        assert f"add --allow-differences {name}" in str(error.value)
        assert len(str(error.value).splitlines()) == 1
        comparison = compare_runs(runs, [name])
        assert comparison.compared == name
        assert [run.name for run in comparison.runs] == ["a", "b"]

    def test_allowing_one_difference_does_not_allow_another(self):
        runs = [coin_run("a"), coin_run("b", num_draft_tokens=2, seed=1)]
        with pytest.raises(ValueError, match="seed: 0") as error:
            compare_runs(runs, ["num_draft_tokens"])
        assert "num_draft_tokens: " not in str(error.value)
        both = compare_runs(runs, ["num_draft_tokens", "seed"])
        assert both.fields == {"num_draft_tokens": (3, 2), "seed": (0, 1)}

    def test_a_third_run_is_compared_too(self):
        runs = [coin_run("a"), coin_run("b", num_draft_tokens=2), coin_run("c", num_draft_tokens=2, min_p=0.1)]
        with pytest.raises(ValueError, match=r"min_p: 0.0 \(a\), 0.0 \(b\), 0.1 \(c\)"):
            compare_runs(runs, ["num_draft_tokens"])

    def test_a_name_that_is_no_setting_is_refused(self):
        with pytest.raises(ValueError, match=r"'K' is no setting of these runs.* num_draft_tokens"):
            compare_runs([coin_run()], ["K"])


class TestMerging:
    def test_equal_settings_with_other_prompts_or_temperatures_are_one_run(self):
        parts = [
            coin_run("a", datasets=("math",), temperatures=(1.0,)),
            coin_run("b", datasets=("code",), temperatures=(1.0,)),
            coin_run("c", datasets=("math",), temperatures=(0.0,)),
        ]
        (run,) = compare_runs(parts).runs
        assert run.name == "a+b+c"
        assert list(run.cells) == [("math", 1.0), ("code", 1.0), ("math", 0.0)]
        assert [row.dataset for row in run.rows] == ["math", "code", "math"]
        assert [row.datasets for row in run.macro_rows] == [("math", "code")]

    def test_the_same_requests_twice_are_refused(self):
        with pytest.raises(ValueError, match="both hold math at temperature 0: that would be the same requests twice"):
            compare_runs([coin_run("a"), coin_run("b", coins=1)])

    def test_another_file_of_the_same_name_is_not_merged(self):
        other = coin_run("b", temperatures=(0.5,), num_prompts=4)
        with pytest.raises(ValueError, match=r"datasets\.math"):
            compare_runs([coin_run("a"), other])


class TestLoading:
    def test_an_unfinished_run_is_refused(self, tmp_path):
        folder = write_run(tmp_path / "out", coin_run())
        lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
        (folder / "records.jsonl").write_text("".join(lines[:-3]))
        with pytest.raises(ValueError, match="not finished: 5 of 8 requests of math at temperature 1"):
            load_runs([folder])

    def test_a_folder_without_a_run_is_refused(self, tmp_path):
        folder = write_run(tmp_path / "out", coin_run())
        (folder / "settings.json").unlink()
        with pytest.raises(ValueError, match=r"holds no run: it has no settings\.json"):
            load_runs([folder])

    def test_a_run_that_never_started_is_named_with_what_it_lacks(self, tmp_path):
        """What an evaluation of several cells leaves of the later ones when it is interrupted in the first."""
        write_run(tmp_path / "out" / "K=1", coin_run())
        waiting = write_run(tmp_path / "out" / "K=2", coin_run(num_draft_tokens=2))
        (waiting / "records.jsonl").unlink()
        message = "K=2 is not finished: 0 of 8 requests of math at temperature 0.*Run the same dspark eval command"
        with pytest.raises(ValueError, match=message):
            load_runs([tmp_path / "out"])

    @pytest.mark.parametrize(
        ("text", "message"), [('{"dataset": {}}', "lacks settings and datasets"), ("{", "is damaged: no JSON")]
    )
    def test_settings_of_something_else_are_refused(self, tmp_path, text, message):
        """A folder of target states has files of the same names."""
        folder = write_run(tmp_path / "out", coin_run())
        (folder / "settings.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_runs([folder])

    def test_a_run_whose_calibration_is_not_understood_is_refused(self, tmp_path):
        """Its confidences were scaled, under another name: a fit would take them for the head's own."""
        folder = write_run(tmp_path / "out", coin_run(drafter={"confidence_temperatures": [1.5, 1.0, 1.0]}))
        with pytest.raises(ValueError, match=r"written by an earlier version.*run dspark eval again"):
            load_runs([folder])

    def test_a_folder_named_twice_is_refused(self, tmp_path):
        folder = write_run(tmp_path / "out", coin_run())
        with pytest.raises(ValueError, match="named twice"):
            load_runs([folder, tmp_path / "x" / ".." / "out"])

    def test_the_cells_of_one_evaluation_are_runs_that_may_differ_in_what_it_varied(self, tmp_path):
        runs = [coin_run(f"K={k}", num_draft_tokens=k) for k in (1, 2, 3)]
        for run in runs:
            write_run(tmp_path / "out" / run.name, run)
        write_results(tmp_path / "out", compare_runs(runs, ["num_draft_tokens"]))
        loaded, varied = load_runs([tmp_path / "out"])
        assert [run.name for run in loaded] == ["K=1", "K=2", "K=3"]
        assert varied == ["num_draft_tokens"]
        assert compare_runs(loaded, varied).fields == {"num_draft_tokens": (1, 2, 3)}

    def test_runs_of_one_name_are_told_apart_by_their_folders(self, tmp_path):
        folders = [write_run(tmp_path / name / "out", coin_run(coins=i)) for i, name in enumerate("ab")]
        loaded, _ = load_runs(folders)
        assert [run.name for run in loaded] == ["a/out", "b/out"]


class TestDifferences:
    def test_the_pairing_of_requests_is_kept(self):
        """Run b commits one token more in each step of each request: the difference is 1 in every resample, however
        much the requests differ."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(0, 6, (10, 30))
        runs = []
        for name, more in (("a", 0), ("b", 1)):
            requests = [[step(7, int(n) + more) for n in row] for row in lengths]
            described = coin_run(num_draft_tokens=7, temperatures=(1.0,), num_prompts=10).description
            cells = {("math", 1.0): [record("math", 1.0, i, steps) for i, steps in enumerate(requests)]}
            runs.append(Run(name, described, cells))
        (difference,) = paired_differences(runs)
        assert (difference.run, difference.baseline, difference.dataset) == ("b", "a", "math")
        figures = difference.tokens_per_step
        assert (figures.value, figures.low, figures.high) == pytest.approx((1.0, 1.0, 1.0))
        assert difference.ratio.low < difference.ratio.value < difference.ratio.high
        assert runs[0].rows[0].acceptance.tokens_per_step.low < runs[0].rows[0].acceptance.tokens_per_step.high

    def test_other_requests_have_no_difference(self):
        runs = [coin_run("a"), coin_run("b", num_prompts=4, seed=1), coin_run("c", temperatures=(0.0,), seed=2)]
        found = paired_differences(runs)
        assert [(d.run, d.temperature) for d in found] == [("c", 0.0)]


class TestMacroMeans:
    def test_sets_count_alike_whatever_their_sizes(self):
        """10 requests of 2 tokens a step and 2 of 4: the mean of the sets is 3, the pooled figure would be 2.33."""
        sets = [
            [record("small", 1.0, i, [step(3, 3)] * 5) for i in range(2)],
            [record("large", 1.0, i, [step(3, 1)] * 5) for i in range(10)],
        ]
        macro = make_macro_row(sets)
        assert macro.datasets == ("small", "large")
        assert macro.tokens_per_step.value == 3.0
        assert macro.acceptance_rate.value == pytest.approx((1 + 1 / 3) / 2)
        assert [e.value for e in macro.conditional] == [1.0, 0.5, None]  # the large set never reached the third

    def test_the_interval_is_that_of_independent_sets(self):
        """Variances of the sets add: the width of a mean of two like sets is that of one over sqrt(2), within 15%."""
        run = coin_run(datasets=("a", "b"), temperatures=(1.0,), num_prompts=60, num_steps=10)
        widths = [row.acceptance.tokens_per_step.high - row.acceptance.tokens_per_step.low for row in run.rows]
        (macro,) = run.macro_rows
        expected = np.hypot(*widths) / 2
        assert macro.tokens_per_step.high - macro.tokens_per_step.low == pytest.approx(expected, rel=0.15)

    def test_a_figure_that_a_set_lacks_has_no_mean(self):
        sets = [[record("a", 1.0, i, [step(2, 1)] * 3) for i in range(3)], [record("b", 1.0, 0, [step(0, 0)])]]
        macro = make_macro_row(sets)
        assert macro.acceptance_rate.value is None
        assert macro.ece.value is None
        assert macro.tokens_per_step.value == 1.5
        assert macro.tokens_per_step.low is None  # a set of one request shows no spread


def test_domains_of_a_data_set_get_rows_of_their_own():
    run = coin_run(domains=("math", "chat"), temperatures=(1.0,))
    assert [(row.domain, row.acceptance.num_requests) for row in run.domain_rows] == [("math", 4), ("chat", 4)]
    total = sum(row.acceptance.num_committed for row in run.domain_rows)
    assert total == run.rows[0].acceptance.num_committed
    assert coin_run(domains=("math",)).domain_rows == []
    assert coin_run().domain_rows == []


def test_results_hold_every_figure_and_setting(tmp_path):
    runs = [coin_run("a", datasets=("math", "code")), coin_run("b", datasets=("math", "code"), num_draft_tokens=2)]
    write_results(tmp_path, compare_runs(runs, ["num_draft_tokens"]))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["name"] for run in results["runs"]] == ["a", "b"]
    assert results["runs"][1]["description"] == runs[1].description
    assert results["comparison"]["fields"] == {"num_draft_tokens": [3, 2]}
    assert [(r["run"], r["dataset"], r["temperature"]) for r in results["rows"][:3]] == [
        ("a", "math", 0.0),
        ("a", "math", 1.0),
        ("a", "code", 0.0),
    ]
    position = results["rows"][0]["acceptance"]["positions"][0]
    for figure in ("conditional", "unconditional", "expected", "gap", "confidence"):
        assert position[figure]["low"] <= position[figure]["value"] <= position[figure]["high"]
    assert len(results["macro_means"]) == 4
    assert len(results["comparison"]["differences"]) == 4


def test_shares_and_gaps_are_exact():
    """Steps accept 0, 1, 1 and 2 of 2; the gap is the realised rate less 1 - TV over the steps that reached it."""
    run = coin_run(num_draft_tokens=2, num_prompts=2, temperatures=(1.0,))
    steps = [[step(2, n, accept_probs=(0.75, 0.25)) for n in part] for part in ((0, 1), (1, 2))]
    cells = {("math", 1.0): [record("math", 1.0, i, part) for i, part in enumerate(steps)]}
    figures = replace(run, cells=cells).rows[0].acceptance
    assert [share.value for share in figures.accepted_shares] == [0.25, 0.5, 0.25]
    assert [rates.gap.value for rates in figures.positions] == pytest.approx([0.0, 1 / 3 - 0.25])
