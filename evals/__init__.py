"""Acceptance, draft quality, calibration and reports; import as `dspark.evals`."""

from dspark.evals.acceptance import Acceptance, measure_acceptance
from dspark.evals.compare import Run, compare_runs, load_runs
from dspark.evals.datasets import format_prompt, load_dataset, packaged_datasets
from dspark.evals.folder import write_report
from dspark.evals.report import format_table
from dspark.evals.rows import ResultRow
from dspark.evals.run import evaluate, open_run
from dspark.evals.settings import EvalSettings
from dspark.evals.sts import fit_sts

__all__ = [
    "Acceptance",
    "EvalSettings",
    "ResultRow",
    "Run",
    "compare_runs",
    "evaluate",
    "fit_sts",
    "format_prompt",
    "format_table",
    "load_dataset",
    "load_runs",
    "measure_acceptance",
    "open_run",
    "packaged_datasets",
    "write_report",
]
