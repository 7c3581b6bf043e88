"""Finished runs side by side: read them, merge what belongs together, and say what differs between the others.

Figures of two runs compare only if everything but the compared thing is the same, so every difference of settings has
to be named by whoever compares. Where two runs have the same requests, differences are taken request by request: the
same resamples of requests weigh both runs.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from dspark.evals.acceptance import acceptance_statistics
from dspark.evals.records import (
    RECORDS_FILE,
    RESULTS_FILE,
    SETTINGS_FILE,
    RequestRecord,
    differing_fields,
    read_json,
    read_records,
)
from dspark.evals.rows import NOT_TIMED, MacroRow, ResultRow, Timing, make_macro_row, make_row
from dspark.evals.settings import row_settings
from dspark.evals.stats import Bootstrap, Estimate, divide

NAME_A_RUN = "name a folder that dspark eval --out wrote"

Cell = tuple[str, float]  # data set and temperature


@dataclass(frozen=True)
class Run:
    """The requests of one run: `cells` holds those of each data set and temperature in prompt order, data sets
    outermost."""

    name: str
    description: dict[str, Any]
    cells: dict[Cell, list[RequestRecord]]
    timings: dict[Cell, Timing] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[ResultRow]:
        """Figures of each cell."""
        return [
            make_row(records, row_settings(self.description, *cell), timing=self.timings.get(cell, NOT_TIMED))
            for cell, records in self.cells.items()
        ]

    @cached_property
    def domain_rows(self) -> list[ResultRow]:
        """Figures of each domain in the cells whose prompts name more than one; prompts without are in none of them."""
        found = []
        for cell, records in self.cells.items():
            settings = row_settings(self.description, *cell)
            domains = [name for name in dict.fromkeys(r.domain for r in records) if name is not None]
            for name in domains if len(domains) > 1 else ():
                found.append(make_row([r for r in records if r.domain == name], settings, name))
        return found

    @cached_property
    def macro_rows(self) -> list[MacroRow]:
        """Means over data sets at each temperature that has several."""
        temperatures = dict.fromkeys(temperature for _, temperature in self.cells)
        sets = [[records for (_, t), records in self.cells.items() if t == value] for value in temperatures]
        return [make_macro_row(parts) for parts in sets if len(parts) > 1]


def load_run(folder: Path, name: str) -> Run:
    """Read a finished run from its folder.

    Raises:
        ValueError: there is no run, it is not finished, an earlier version wrote it, or its files are damaged.
    """
    if not (folder / SETTINGS_FILE).is_file():
        raise ValueError(f"{folder} holds no run: it has no {SETTINGS_FILE}; {NAME_A_RUN}")
    description = read_json(folder / SETTINGS_FILE, "Run dspark eval again")
    if not isinstance(description, dict) or not {"settings", "datasets", "target", "drafter"} <= description.keys():
        raise ValueError(
            f"{folder} holds no run of dspark eval: its {SETTINGS_FILE} lacks settings and datasets, as in the folders "
            f"of dspark quality --states; {NAME_A_RUN}"
        )
    if "confidence_temperatures" in (description["drafter"] or {}):
        raise ValueError(
            f"{folder} was written by an earlier version, whose calibration had no offsets: its confidences would be "
            "taken for the head's own, whatever was applied to them; run dspark eval again"
        )
    records, _ = read_records(folder / RECORDS_FILE)  # none where no request has ended yet
    cells: dict[Cell, list[RequestRecord]] = {}
    for dataset in description["datasets"]:
        for temperature in description["settings"]["temperatures"]:
            cell = (dataset["name"], temperature)
            cells[cell] = sorted((r for key, r in records.items() if key[:2] == cell), key=lambda r: r.index)
            if len(cells[cell]) < dataset["num_prompts"]:
                raise ValueError(
                    f"{folder} is not finished: {len(cells[cell])} of {dataset['num_prompts']} requests of {cell[0]} "
                    f"at temperature {temperature:g}, and those that end first are not like the others. Run the same "
                    "dspark eval command again, it continues"
                )
    return Run(name, description, cells)


def load_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs of some folders; one that `dspark eval` filled with several cells gives a run for each.

    Returns:
        The runs, each with a name that no other has, and the fields that the commands which wrote the folders were
        asked to vary.

    Raises:
        ValueError: as for `load_run`, or a folder is named twice.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a folder is named twice: {', '.join(map(str, folders))}")
    found: list[Path] = []
    compared: list[str] = []
    for folder in folders:
        inner = sorted(path.parent for path in folder.glob(f"*/{SETTINGS_FILE}"))
        found += [folder] if (folder / SETTINGS_FILE).exists() or not inner else inner
        if inner and (folder / RESULTS_FILE).is_file():
            results = read_json(folder / RESULTS_FILE, "Run dspark eval again")
            compared += results.get("comparison", {}).get("allowed", [])
    paths = [run.resolve() for run in found]
    short, longer = [path.name for path in paths], [f"{path.parent.name}/{path.name}" for path in paths]
    names = next((names for names in (short, longer) if len(set(names)) == len(names)), [str(run) for run in found])
    return [load_run(run, name) for run, name in zip(found, names, strict=True)], compared


def merge_runs(runs: Sequence[Run]) -> list[Run]:
    """Join runs of equal settings that have different data sets or temperatures; the others stay as they are.

    Raises:
        ValueError: two runs of equal settings hold the same data set at the same temperature.
    """
    merged: list[Run] = []
    for run in runs:
        for i, other in enumerate(merged):
            if differing_settings([other, run]):
                continue
            shared = [cell for cell in run.cells if cell in other.cells]
            if shared:
                raise ValueError(
                    f"{other.name} and {run.name} have the same settings, and both hold {shared[0][0]} at temperature "
                    f"{shared[0][1]:g}: that would be the same requests twice. Leave one out"
                )
            datasets = {d["name"]: d for one in (other, run) for d in one.description["datasets"]}
            description = {**other.description, "datasets": list(datasets.values())}
            cells, timings = {**other.cells, **run.cells}, {**other.timings, **run.timings}
            merged[i] = Run(f"{other.name}+{run.name}", description, cells, timings)
            break
        else:
            merged.append(run)
    return merged


@dataclass(frozen=True)
class Comparison:
    """Runs that may be shown side by side.

    `fields` holds each setting that differs, with its value in every run; `allowed` what the caller said may differ.
    """

    runs: tuple[Run, ...]
    fields: dict[str, tuple[Any, ...]]
    allowed: tuple[str, ...]

    @property
    def compared(self) -> str:
        """In words: what differs between the runs."""
        return ", ".join(dict.fromkeys(map(_group, self.fields))) or "nothing: the runs have the same settings"


def compare_runs(runs: Sequence[Run], allowed: Iterable[str] = (), remedy: str | None = None) -> Comparison:
    """Merge runs of equal settings, and refuse to put others side by side unless what differs was named.

    Args:
        runs: as `load_runs` gives them.
        allowed: names of settings that may differ, as the error lists them; "drafter" covers all that is said of it.
        remedy: what to do about others, the end of the error; None is the flags of `dspark report` that allow them.

    Raises:
        ValueError: settings differ that were not named, with their values; or a name is no setting.
    """
    allowed = tuple(dict.fromkeys(allowed))
    known = sorted({name for run in runs for name in _comparable(run)} | {"datasets"})
    for name in allowed:
        if name not in known:
            raise ValueError(
                f"{name!r} is no setting of these runs, so nothing can differ in it; there are {', '.join(known)}"
            )
    merged = merge_runs(runs)
    fields = differing_settings(merged)
    unnamed = [name for name in fields if _group(name) not in allowed]
    if unnamed:
        listed = "; ".join(f"{name}: {_values(fields[name], merged)}" for name in unnamed)
        flags = " ".join(f"--allow-differences {name}" for name in dict.fromkeys(map(_group, unnamed)))
        raise ValueError(
            f"the runs differ in settings that were not named as compared, so a difference of their figures could come "
            f"from any of them: {listed}. {remedy or f'If that is meant, add {flags}'}"
        )
    return Comparison(tuple(merged), fields, allowed)


def differing_settings(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """Every setting in which some runs differ, with its value in each of them; None where a run lacks it.

    Which data sets and temperatures a run has does not count: those are rows. The contents of a data set do, where two
    runs have it.
    """
    described = [_comparable(run) for run in runs]
    names = dict.fromkeys(name for other in described[1:] for name in differing_fields(described[0], other))
    fields = {name: tuple(_lookup(value, name) for value in described) for name in names}
    contents = [{d["name"]: _contents(d) for d in run.description["datasets"]} for run in runs]
    for name in dict.fromkeys(name for content in contents for name in content):
        if len({content[name] for content in contents if name in content}) > 1:
            fields[f"datasets.{name}"] = tuple(content.get(name) for content in contents)
    return fields


def _comparable(run: Run) -> dict[str, Any]:
    """The settings of a run that may not differ unsaid, in the words of the command line."""
    settings = {key: value for key, value in run.description["settings"].items() if key != "temperatures"}
    target_name, drafter_name = settings.pop("target_name", None), settings.pop("drafter_name", None)
    others = {key: value for key, value in run.description.items() if key not in ("settings", "datasets")}
    drafter = others["drafter"]
    return {
        **settings,
        **others,
        "target": {"name": target_name, **others["target"]},
        "drafter": drafter if drafter is None else {"name": drafter_name, **drafter},
    }


def _contents(dataset: dict[str, Any]) -> str:
    return f"first {dataset['num_prompts']} prompts of the file with sha256 {dataset['sha256'][:12]}"


def _lookup(value: Any, path: str) -> Any:
    return reduce(lambda part, key: part.get(key) if isinstance(part, dict) else None, path.split("."), value)


def _group(name: str) -> str:
    return name.split(".")[0]


def _values(values: Sequence[Any], runs: Sequence[Run]) -> str:
    """A setting in every run, long ones cut."""
    texts = [json.dumps(value) for value in values]
    shown = [text if len(text) <= 40 else text[:36] + '..."' for text in texts]
    return ", ".join(f"{text} ({run.name})" for text, run in zip(shown, runs, strict=True))


@dataclass(frozen=True)
class Difference:
    """One run against the first on the same requests; `ratio` is that of tokens per step."""

    run: str
    baseline: str
    dataset: str
    temperature: float
    tokens_per_step: Estimate
    ratio: Estimate


def paired_differences(runs: Sequence[Run]) -> list[Difference]:
    """Tokens per step of every run against the first, wherever both have the same requests."""
    found = []
    for run in runs[1:]:
        for cell, records in run.cells.items():
            others = runs[0].cells.get(cell, [])
            if [record.index for record in others] != [record.index for record in records]:
                continue
            parts = [[record.steps for record in part] for part in (records, others)]
            mine, theirs = (acceptance_statistics(steps)["tokens_per_step"] for steps in parts)
            both = (lambda w, a=mine, b=theirs: a(w) - b(w), lambda w, a=mine, b=theirs: divide(a(w), b(w)))
            estimates = (Bootstrap(len(records)).estimates(statistic)[0] for statistic in both)
            found.append(Difference(run.name, runs[0].name, *cell, *estimates))
    return found
