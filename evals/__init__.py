"""Acceptance, draft quality, calibration and reports; import as `dspark.evals`."""

from importlib import import_module
from typing import Any

_HOME = {
    "Acceptance": "acceptance",
    "EvalSettings": "settings",
    "ResultRow": "rows",
    "Run": "compare",
    "compare_runs": "compare",
    "evaluate": "run",
    "fit_sts": "sts",
    "format_prompt": "datasets",
    "format_table": "report",
    "load_dataset": "datasets",
    "load_runs": "compare",
    "measure_acceptance": "acceptance",
    "open_run": "run",
    "packaged_datasets": "datasets",
    "write_report": "document",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: data sets are looked up before anything heavy is imported."""
    if name not in _HOME:
        raise AttributeError(f"module 'dspark.evals' has no attribute {name!r}")
    return getattr(import_module(f"dspark.evals.{_HOME[name]}"), name)
