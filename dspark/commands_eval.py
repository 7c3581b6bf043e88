"""`dspark eval`, `dspark report` and `dspark calibrate`: measure, compare, and fit the confidence head."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dspark.backend_flags import connect_server, start_engine
from dspark.cli_paths import drafter_location, find_drafter, output_folder
from dspark.commands import Pair, eval_settings, load_pair, locate_target
from dspark.confidence import CALIBRATION_FILE, write_calibration
from dspark.drafter import check_num_draft_tokens
from dspark.evals import EvalSettings
from dspark.evals.backends import Backend, LoopBackend
from dspark.evals.compare import Comparison, compare_runs, load_run, load_runs
from dspark.evals.folder import REPORT_FILE, write_report
from dspark.evals.records import SETTINGS_FILE
from dspark.evals.report import format_comparison, number
from dspark.evals.run import OpenRun, open_run
from dspark.evals.sts_runs import Check, fit_calibration, measure_scaling
from dspark.loop import check_schedule
from dspark.schedule import parse_schedule
from dspark.terminal import align, say
from dspark.vllm.backends import check_installed

VARIED = ("drafter", "num_draft_tokens")  # flags of eval that make cells, beside data sets and temperatures


@dataclass(frozen=True)
class Variant:
    """One drafter with one K out of those that the command line asks for; `options` has one value of each."""

    name: str
    options: argparse.Namespace


def evaluate(options: argparse.Namespace) -> int:
    """`dspark eval`."""
    variants = list_variants(options)
    settings = [
        eval_settings(variant.options) for variant in variants
    ]  # a wrong value must not cost loading two models
    out = output_folder(options)
    if out is not None:
        _check_folder(out, several=len(variants) > 1)
    opened: list[OpenRun] = []  # all before the first runs, so that a folder says what is missing in it
    pairs = _load_all(variants)
    for variant, chosen, pair in zip(variants, settings, pairs, strict=True):
        backend, target_name, drafter_name = _open_backend(variant.options, chosen, pair)
        chosen = replace(chosen, target_name=target_name, drafter_name=drafter_name)
        folder = out if out is None or len(variants) == 1 else out / variant.name
        opened.append(open_run(backend, chosen, folder, variant.name))
    runs = [run.finish() for run in opened]
    comparison = compare_runs(runs, _varied(variants))
    if out is not None:
        _say_where(out, write_report(out, comparison))
    return _show(comparison, options, "eval")


def _check_folder(out: Path, several: bool) -> None:
    """Refuse to mix a single run with the runs of a comparison: which of them a report is of would be unclear."""
    if several and (out / SETTINGS_FILE).exists():
        raise ValueError(f"--out {out} holds a single run; several runs need a folder of their own")
    if not several and any(out.glob(f"*/{SETTINGS_FILE}")):
        raise ValueError(f"--out {out} holds the runs of a comparison; a single run needs a folder of its own")


def list_variants(options: argparse.Namespace) -> list[Variant]:
    """Every drafter with every K of the command line.

    Raises:
        ValueError: a value is given twice, or several of them where only one engine or server can run.
    """
    values = {name: getattr(options, name, None) or [None] for name in VARIED}
    for name, chosen in values.items():
        flag = f"--{name.replace('_', '-')}"
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{flag} names one value twice: its rows could not be told apart")
        if len(chosen) > 1 and (hasattr(options, "endpoint") or getattr(options, "backend", "dspark") == "vllm"):
            raise ValueError(
                f"{flag} given {len(chosen)} times does not go with vLLM, where one engine runs one of them: run them "
                "one by one, each with its own --out, and set them side by side with dspark report"
            )
        if len(chosen) > 1 and getattr(options, "plain", False):
            raise ValueError(f"{flag} given {len(chosen)} times does not go with --plain, which runs without a drafter")
    labels = _labels(values["drafter"])
    variants = []
    for drafter, label in zip(values["drafter"], labels, strict=True):
        for num_draft_tokens in values["num_draft_tokens"]:
            single = argparse.Namespace(**{k: v for k, v in vars(options).items() if k not in VARIED})
            if drafter is not None:
                single.drafter = drafter
            if num_draft_tokens is not None:
                single.num_draft_tokens = num_draft_tokens
            words = [label] if len(labels) > 1 else []
            words += [f"K={num_draft_tokens}"] if len(values["num_draft_tokens"]) > 1 else []
            variants.append(Variant("_".join(words) or "run", single))
    return variants


def _labels(drafters: Sequence[str | None]) -> list[str]:
    """Short names of drafters that tell them apart."""
    paths = [Path(str(drafter)) for drafter in drafters]
    names = [path.resolve().name if path.exists() else str(path).replace("/", "--") for path in paths]
    repeated = [names.count(name) > 1 for name in names]
    return [f"{name} ({i})" if twice else name for i, (name, twice) in enumerate(zip(names, repeated, strict=True), 1)]


def _varied(variants: Sequence[Variant]) -> list[str]:
    """Settings in which the variants were asked to differ."""
    chosen = {name: {getattr(variant.options, name, None) for variant in variants} for name in VARIED}
    varied = [name for name, values in chosen.items() if len(values) > 1]
    return [*varied, "num_draft_tokens"] if varied == ["drafter"] else varied  # each drafter's own maximum


def _load_all(variants: Sequence[Variant]) -> list[Pair | None]:
    """The models of every variant. What does not load, and a K or a schedule that a drafter cannot follow, must not
    cost the runs before it, nor leave a folder of a run that cannot be.
    """
    pairs: list[Pair | None] = []
    for variant in variants:
        pairs.append(_load(variant.options, pairs[-1] if pairs else None))
        if pairs[-1] is None:
            continue
        drafter = pairs[-1].drafter
        check_schedule(parse_schedule(getattr(variant.options, "schedule", None)), drafter)
        if drafter is not None and hasattr(variant.options, "num_draft_tokens"):
            check_num_draft_tokens(drafter.config, variant.options.num_draft_tokens)
    return pairs


def _load(options: argparse.Namespace, loaded: Pair | None) -> Pair | None:
    """The models of a variant in this process, None where vLLM has them; the target of the variant before is kept."""
    if getattr(options, "backend", "dspark") == "vllm":
        check_installed()
    if hasattr(options, "endpoint") or getattr(options, "backend", "dspark") == "vllm":
        return None
    if loaded is not None and loaded.drafter_name == find_drafter(options):
        return loaded
    return load_pair(options, loaded)


def _open_backend(
    options: argparse.Namespace, settings: EvalSettings, pair: Pair | None
) -> tuple[Backend, str, str | None]:
    """What the flags say to run an evaluation on, and words for its report on target and drafter."""
    if pair is not None:
        return LoopBackend(pair.target, pair.drafter, settings), pair.target_name, pair.drafter_name
    if hasattr(options, "endpoint"):
        return connect_server(options, settings)
    drafter = find_drafter(options)
    location, source = locate_target(getattr(options, "target", None))
    return start_engine(options, settings, location or options.target, drafter), source, drafter


def report(options: argparse.Namespace) -> int:
    """`dspark report`."""
    runs, varied = load_runs([Path(folder).expanduser() for folder in options.runs])
    comparison = compare_runs(runs, [*varied, *getattr(options, "allow_differences", [])])
    out = output_folder(options)
    if out is not None:
        if any((out / name).exists() for name in ("settings.json", "records.jsonl")) and len(comparison.runs) > 1:
            raise ValueError(f"--out {out} is the folder of a single run, whose report would be lost; name another one")
        _say_where(out, write_report(out, comparison))
    return _show(comparison, options, "report")


def _say_where(out: Path, remark: str | None) -> None:
    say(f"report: {out / REPORT_FILE}" + (f"; plots were not drawn: {remark}" if remark else ""))


def _show(comparison: Comparison, options: argparse.Namespace, command: str) -> int:
    """Rows on stdout, as a table or as one line of JSON; speed on stderr."""
    runs = comparison.runs
    if options.json:
        rows = [{"run": run.name, **row.to_dict(), "timing": row.timing.to_dict()} for run in runs for row in run.rows]
        macro_means = [{"run": run.name, **asdict(row)} for run in runs for row in run.macro_rows]
        compared = comparison.compared if len(runs) > 1 else None
        print(json.dumps({"command": command, "compared": compared, "rows": rows, "macro_means": macro_means}))
        return 0
    print(format_comparison(comparison))
    for run in runs:
        settings = run.description["settings"]
        prefix = "" if len(runs) == 1 else f"{run.name}: "
        print(f"{prefix}target: {settings['target_name']}\n{prefix}drafter: {settings['drafter_name'] or 'none'}")
        for row in run.rows:
            if row.timing.tokens_per_s is not None:
                speed = f"{row.timing.tokens_per_s:.1f} tokens/s in this run"
                say(f"{prefix}{row.dataset} T={row.temperature:g}: {speed}")
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """`dspark calibrate`."""
    path = drafter_location(getattr(options, "drafter", None))
    if not hasattr(options, "out") and not Path(path).is_dir():
        raise ValueError(
            f"--drafter {path} is no folder here, so the calibration cannot lie beside it: name a file with --out"
        )
    out = Path(options.out) if hasattr(options, "out") else Path(path) / CALIBRATION_FILE
    runs, _ = load_runs([Path(folder) for folder in options.runs])
    checks = [load_run(Path(folder), Path(folder).name) for folder in getattr(options, "check", [])]
    calibration, effects = fit_calibration(runs, path, getattr(options, "temperature", None))
    effects += [effect for run in checks for effect in measure_scaling(run, calibration.scaling)]
    write_calibration(out, calibration)
    say(f"written: {out}")
    if options.json:
        report = {"command": "calibrate", **calibration.to_dict(), "effects": [effect.to_dict() for effect in effects]}
        print(json.dumps(report))
        return 0
    for name, values in calibration.scaling._asdict().items():
        print(f"{name}: " + " ".join(f"{value:.3f}" for value in values))
    print(_effects_table(effects))
    return 0


def _effects_table(effects: Sequence[Check]) -> str:
    header = ("requests not fitted on", "T", "requests", "ECE before", "ECE after", "change", "Brier before", "after")
    cells: list[tuple[str, ...]] = [header]
    for check in effects:
        ece, brier = check.effect.ece, check.effect.brier
        figures = (ece.before, ece.after, ece.change, brier.before, brier.after)
        temperature = "all" if check.temperature is None else f"{check.temperature:g}"
        counts = (check.name, temperature, str(check.effect.num_requests))
        cells.append((*counts, *(number(figure, 4, interval=True) for figure in figures)))
    return align(cells)
