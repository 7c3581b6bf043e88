"""`dspark eval`, `dspark report` and `dspark calibrate`: measure, compare, and fit the confidence head."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dspark.cli_paths import drafter_location, find_drafter, output_folder
from dspark.commands import Pair, drafter_labels, eval_settings, load_pair, say_extrapolation
from dspark.confidence import CALIBRATION_FILE, write_calibration
from dspark.default import locate_target
from dspark.drafter import check_num_draft_tokens
from dspark.evals import EvalSettings
from dspark.evals.backends import Backend, LoopBackend
from dspark.evals.compare import Comparison, Run, compare_runs, load_runs
from dspark.evals.datasets import check_datasets
from dspark.evals.document import REPORT_FILE, write_report
from dspark.evals.records import SETTINGS_FILE
from dspark.evals.report import format_comparison, number
from dspark.evals.run import OpenRun, open_run
from dspark.evals.sts_runs import Check, fit_calibration, measure_scaling
from dspark.loop import check_schedule
from dspark.outputs import check_output
from dspark.schedule import ThroughputSchedule, parse_schedule
from dspark.terminal import align, say
from dspark.vllm.backends import EngineBackend, ServerBackend, check_installed

VARIED = ("drafter", "num_draft_tokens")  # flags of eval that make cells, beside data sets and temperatures


def evaluate(options: argparse.Namespace) -> int:
    """`dspark eval`."""
    variants = list_variants(options)
    settings = [eval_settings(variant) for variant in variants.values()]  # a wrong value must not cost loading models
    out = output_folder(options)
    if out is not None:
        check_output("--out", out)
        _check_folder(out, several=len(variants) > 1)
    most_requests = check_datasets(settings[0].datasets, settings[0].limit)
    opened: list[OpenRun] = []  # all before the first runs, so that a folder says what is missing in it
    pairs = _load_all(list(variants.values()))
    _say_extrapolation(settings, pairs, most_requests)
    for (name, variant), chosen, pair in zip(variants.items(), settings, pairs, strict=True):
        backend, target_name, drafter_name = _open_backend(variant, chosen, pair)
        chosen = replace(chosen, target_name=target_name, drafter_name=drafter_name)
        folder = out if out is None or len(variants) == 1 else out / name
        opened.append(open_run(backend, chosen, folder, name))
    try:
        runs = [run.finish() for run in opened]
    except KeyboardInterrupt:
        if out is not None:
            kept, total = sum(len(run.store.records) for run in opened), sum(run.num_requests for run in opened)
            say(f"{kept} of {total} requests are kept in {out}; the same command continues there")
        raise
    varied = [name for name in VARIED if len(getattr(options, name, ())) > 1]
    if varied == ["drafter"]:
        varied.append("num_draft_tokens")  # each drafter's own maximum
    return _show(compare_runs(runs, varied), out, options)


def _check_folder(out: Path, several: bool) -> None:
    """Refuse to mix a single run with the runs of a comparison: which of them a report is of would be unclear."""
    if several and (out / SETTINGS_FILE).exists():
        raise ValueError(f"--out {out} holds a single run; several runs need a folder of their own")
    if not several and any(out.glob(f"*/{SETTINGS_FILE}")):
        raise ValueError(f"--out {out} holds the runs of a comparison; a single run needs a folder of its own")


def _say_extrapolation(settings: Sequence[EvalSettings], pairs: Sequence[Pair | None], most_requests: int) -> None:
    """The same for all runs, which share the table: the most drafts of any."""
    schedule = parse_schedule(settings[0].schedule)
    if isinstance(schedule, ThroughputSchedule):
        drafts = [
            chosen.num_draft_tokens or pair.drafter.config.max_draft_tokens
            for chosen, pair in zip(settings, pairs, strict=True)
            if pair is not None and pair.drafter is not None
        ]
        if drafts:
            requests = min(settings[0].batch_size, most_requests)
            say_extrapolation(settings[0].schedule, schedule, requests, max(drafts))


def list_variants(options: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """Every drafter with every K of the command line: options with one value of each, by a name for the run.

    Raises:
        ValueError: a value is given twice, or several of them where only one engine or server can run.
    """
    values = {name: getattr(options, name, None) or [None] for name in VARIED}
    for name, chosen in values.items():
        flag = f"--{name.replace('_', '-')}"
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{flag} names one value twice: its rows could not be told apart")
        if len(chosen) > 1 and _on_vllm(options):
            raise ValueError(
                f"{flag} given {len(chosen)} times does not go with vLLM, where one engine runs one of them: run them "
                "one by one, each with its own --out, and set them side by side with dspark report"
            )
        if len(chosen) > 1 and getattr(options, "plain", False):
            raise ValueError(f"{flag} given {len(chosen)} times does not go with --plain, which runs without a drafter")
    common = {name: value for name, value in vars(options).items() if name not in VARIED}
    variants = {}
    for drafter, label in zip(values["drafter"], drafter_labels(values["drafter"]), strict=True):
        for length in values["num_draft_tokens"]:
            words = [label] if len(values["drafter"]) > 1 else []
            words += [f"K={length}"] if len(values["num_draft_tokens"]) > 1 else []
            given = {name: value for name, value in zip(VARIED, (drafter, length), strict=True) if value is not None}
            variants["_".join(words) or "run"] = argparse.Namespace(**common, **given)
    return variants


def _on_vllm(options: argparse.Namespace) -> bool:
    return hasattr(options, "endpoint") or getattr(options, "backend", "dspark") == "vllm"


def _load_all(variants: Sequence[argparse.Namespace]) -> list[Pair | None]:
    """The models of every variant, None where vLLM has them; all have one target.

    What does not load, and a K or a schedule that a drafter cannot follow, must not cost the runs before it, nor leave
    the folder of a run that cannot be.
    """
    pairs: list[Pair | None] = []
    for options in variants:
        if _on_vllm(options):
            if not hasattr(options, "endpoint"):
                check_installed()
            return [None] * len(variants)
        pair = pairs[-1] if pairs else None
        if pair is None or pair.drafter_name != find_drafter(options):
            pair = load_pair(options, pair)
        check_schedule(parse_schedule(getattr(options, "schedule", None)), pair.drafter)
        if pair.drafter is not None and hasattr(options, "num_draft_tokens"):
            check_num_draft_tokens(pair.drafter.config, options.num_draft_tokens)
        pairs.append(pair)
    return pairs


def _open_backend(
    options: argparse.Namespace, settings: EvalSettings, pair: Pair | None
) -> tuple[Backend, str, str | None]:
    """What the flags say to run an evaluation on, and words for its report on target and drafter."""
    if pair is not None:
        return LoopBackend(pair.target, pair.drafter, settings), pair.target_name, pair.drafter_name
    if hasattr(options, "endpoint"):
        server = ServerBackend.connect(options.endpoint, getattr(options, "target", None), settings)
        return server, f"{server.model.name} at {options.endpoint}", "as the server was started with"
    drafter = find_drafter(options)
    location, source = locate_target(getattr(options, "target", None))
    if location is not None and location.gguf_file is not None:
        raise ValueError(
            f"--backend vllm cannot load {location.path}: it needs a Hugging Face folder with config.json and "
            "safetensors"
        )
    path = options.target if location is None else str(location.folder)
    dtype = getattr(options, "dtype", "bfloat16" if torch.cuda.is_available() else "float32")
    return EngineBackend.start(path, drafter, settings, dtype), source, drafter


def _load_runs(folders: Sequence[str]) -> tuple[list[Run], list[str]]:
    """`load_runs` of folders as a command line names them."""
    return load_runs([Path(folder).expanduser() for folder in folders])


def report(options: argparse.Namespace) -> int:
    """`dspark report`."""
    out = output_folder(options)
    if out is not None:
        check_output("--out", out)
    runs, varied = _load_runs(options.runs)
    comparison = compare_runs(runs, [*varied, *getattr(options, "allow_differences", [])])
    if out is not None and (out / SETTINGS_FILE).exists() and len(comparison.runs) > 1:
        raise ValueError(f"--out {out} is the folder of a single run, whose report would be lost; name another one")
    return _show(comparison, out, options)


def _show(comparison: Comparison, out: Path | None, options: argparse.Namespace) -> int:
    """The report into its folder; rows on stdout, as a table or as one line of JSON; speed on stderr."""
    runs = comparison.runs
    if out is not None:
        remark = write_report(out, comparison)
        say(f"report: {out / REPORT_FILE}" + (f"; plots were not drawn: {remark}" if remark else ""))
    if options.json:
        rows = [{"run": run.name, **row.to_dict(), "timing": row.timing.to_dict()} for run in runs for row in run.rows]
        macro_means = [{"run": run.name, **asdict(row)} for run in runs for row in run.macro_rows]
        compared = comparison.compared if len(runs) > 1 else None
        print(json.dumps({"command": options.command, "compared": compared, "rows": rows, "macro_means": macro_means}))
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
    check_output("--out", out, is_file=True)
    if out.exists() and not options.force:
        raise ValueError(f"{_describe_existing(out)}; --force replaces it, --out FILE writes another file")
    runs, _ = _load_runs(options.runs)
    checks, _ = _load_runs(getattr(options, "check", []))
    calibration, effects = fit_calibration(runs, path, getattr(options, "temperature", None))
    effects += measure_scaling(checks, calibration.scaling)
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


def _describe_existing(path: Path) -> str:
    """What would be lost with a file that stands where a calibration is to go."""
    try:
        num_requests = json.loads(path.read_text(encoding="utf-8"))["fitted_on"]["num_requests"]
    except (ValueError, KeyError, TypeError):
        return f"{path} exists, and is no calibration that dspark calibrate wrote"
    return f"{path} exists, with a calibration that was fitted on {num_requests} requests"


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
