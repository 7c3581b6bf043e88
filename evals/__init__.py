"""Acceptance, draft quality, calibration and reports; import as `dspark.evals`."""
