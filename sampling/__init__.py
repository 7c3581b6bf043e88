"""Distributions, random streams, draft sampling and rejection sampling; import as `dspark.sampling`."""
