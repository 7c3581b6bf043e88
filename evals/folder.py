"""The folder of a report: results.json, report.md, and plots where matplotlib is installed."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark.evals.compare import Comparison, paired_differences
from dspark.evals.document import render_report
from dspark.evals.plots import HOW_TO_GET, draw_plots, plots_available
from dspark.evals.records import RESULTS_FILE, write_json

REPORT_FILE = "report.md"


def write_results(folder: Path, comparison: Comparison) -> None:
    """Write results.json: all figures of the runs, the settings that they hold for, and the versions of the code.

    `rows` and `macro_means` name their run; `comparison` holds what differs between the runs and what was allowed to;
    `timing` is that of the requests which this process ran, and is not part of the rows.
    """
    runs = comparison.runs
    timing = [
        {"run": run.name, "dataset": dataset, "temperature": temperature, **timing.to_dict()}
        for run in runs
        for (dataset, temperature), timing in run.timings.items()
    ]
    results: dict[str, Any] = {
        "runs": [{"name": run.name, "description": run.description} for run in runs],
        "comparison": {
            "compared": comparison.compared if len(runs) > 1 else None,
            "allowed": list(comparison.allowed),
            "fields": {name: list(values) for name, values in comparison.fields.items()},
            "differences": paired_differences(runs),
        },
        "rows": [{"run": run.name, **row.to_dict()} for run in runs for row in run.rows],
        "domain_rows": [{"run": run.name, **row.to_dict()} for run in runs for row in run.domain_rows],
        "macro_means": [{"run": run.name, **asdict(row)} for run in runs for row in run.macro_rows],
        "timing": timing,
    }
    write_json(folder / RESULTS_FILE, results)


def write_report(folder: Path, comparison: Comparison) -> str | None:
    """Write results.json, report.md and the plots into a folder, which is made if needed.

    Returns:
        None, or why there are no plots; the page says it too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, comparison)
    remark = None if plots_available() else HOW_TO_GET
    plots = draw_plots(folder, comparison) if remark is None else {}
    page = render_report(comparison, paired_differences(comparison.runs), plots, remark)
    (folder / REPORT_FILE).write_text(page, encoding="utf-8")
    return remark
