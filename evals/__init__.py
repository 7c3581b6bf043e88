"""Acceptance, draft quality, calibration and reports; import as `dspark.evals`."""

from dspark.evals.acceptance import Acceptance, measure_acceptance
from dspark.evals.datasets import format_prompt, load_dataset, packaged_datasets
from dspark.evals.report import format_table
from dspark.evals.rows import ResultRow
from dspark.evals.run import evaluate, evaluate_backend
from dspark.evals.settings import EvalSettings

__all__ = [
    "Acceptance",
    "EvalSettings",
    "ResultRow",
    "evaluate",
    "evaluate_backend",
    "format_prompt",
    "format_table",
    "load_dataset",
    "measure_acceptance",
    "packaged_datasets",
]
