"""The commands behind `dspark.cli`: load the pair, run, report. Options that were not given are absent."""

import argparse
import json
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoint import load_drafter
from dspark.cli_paths import drafter_location, find_drafter, named_target
from dspark.default import EMBEDDED, load_target, locate_target
from dspark.drafter import Drafter
from dspark.evals import EvalSettings, format_prompt, measure_acceptance
from dspark.evals.datasets import resolve_prompt_format
from dspark.evals.settings import library_versions
from dspark.inspect import inspect_checkpoint
from dspark.loop import generate as run_loop
from dspark.memory import RecurrentSizes, describe_memory
from dspark.records import Generation, StepRecord
from dspark.sampling import SamplingParams
from dspark.schedule import ThroughputSchedule, describe_schedule, parse_schedule
from dspark.target import HFTarget
from dspark.terminal import MarkedWriter, acceptance_lines, count, marks_for, say

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 12
SEED_BITS = 63


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, with words for the report on where each came from. No drafter means plain decoding."""

    target: HFTarget
    target_name: str
    drafter: Drafter | None
    drafter_name: str | None


@dataclass(frozen=True)
class TimedRun:
    """One generation and the seconds it took, prefill included, without the time spent on showing it."""

    generation: Generation
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return len(self.generation.token_ids) / self.seconds


def generate(options: argparse.Namespace) -> int:
    """`dspark generate`."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    given = given_options(options, SamplingParams)
    params = SamplingParams(**{"temperature": 0.0, "seed": secrets.randbits(SEED_BITS), **given})
    chosen = getattr(options, "schedule", None)
    schedule = parse_schedule(chosen)  # a wrong value must not cost the loading of two models
    pair = load_pair(options)
    assert pair.drafter is not None, "only eval has --plain"
    prompt_format = resolve_prompt_format(pair.target, "raw" if options.no_chat else "auto")
    prompt_ids = format_prompt(pair.target, prompt, prompt_format)
    loop_options = {
        "num_draft_tokens": getattr(options, "num_draft_tokens", pair.drafter.config.max_draft_tokens),
        "drafting": getattr(options, "drafting", EvalSettings.drafting),
        "schedule": schedule,
    }
    if isinstance(schedule, ThroughputSchedule):
        say_extrapolation(chosen, schedule, 1, loop_options["num_draft_tokens"])
    # The first passes pay for allocations and thread pools, which would be blamed on whichever run came first.
    short = replace(params, max_new_tokens=WARM_UP_TOKENS)
    run_loop(pair.target, pair.drafter, [prompt_ids], short, **loop_options | {"schedule": None})
    run_loop(pair.target, None, [prompt_ids], short)
    shown = None if options.json else MarkedWriter(pair.target.decode, sys.stdout)
    drafted = _timed_run(pair.target, pair.drafter, prompt_ids, params, loop_options, shown)
    plain = _timed_run(pair.target, None, prompt_ids, params, {}, None) if options.compare else None
    if options.json:
        settings = {"prompt_format": prompt_format.mode, **loop_options, "schedule": describe_schedule(chosen)}
        report = _generation_report(pair, drafted, plain, params)
        print(json.dumps({"command": "generate", **settings, **report}))
        return 0
    _say_generation_report(drafted, plain, params)
    return 0


def say_extrapolation(named: str | None, schedule: ThroughputSchedule, num_requests: int, num_drafts: int) -> None:
    """A line where a run goes beyond what the cost table of its schedule has measured."""
    gap = schedule.cost.describe_gap(num_requests, num_drafts)
    if gap is not None:
        say(f"--schedule {named}: {gap}")


def inspect(options: argparse.Namespace) -> int:
    """`dspark inspect`; status 1 if the checkpoint cannot be used."""
    path = drafter_location(getattr(options, "drafter", None))
    target, name = None, None
    if hasattr(options, "target"):
        target, name = load_named_target(options.target, torch.bfloat16, torch.device("cpu"))
    report = inspect_checkpoint(path, target=target, layout=getattr(options, "layout", None), target_name=name)
    num_draft_tokens = report.config.max_draft_tokens if report.config is not None else 0
    memory = []
    if target is not None and target.recurrent:
        memory = describe_memory(RecurrentSizes.from_config(target.config), num_draft_tokens)
    if options.json:
        print(json.dumps({"command": "inspect", **report.to_dict(), "recurrent_memory": memory}))
    else:
        print(report.to_text(), end="")
        if memory:
            print("\n".join(["", f"recurrent state of the target, {count(num_draft_tokens, 'draft')} a step", *memory]))
    return 0 if report.loadable else 1


def load_pair(options: argparse.Namespace, loaded: Pair | None = None) -> Pair:
    """Load target and drafter as the options name them; the target of `loaded`, if given, is kept.

    Raises:
        ValueError: a target without its drafter, files that do not load, or two that do not belong together.
    """
    target_name, drafter_path = named_target(options), find_drafter(options)
    device = _device(getattr(options, "device", None))
    dtype = _dtype(getattr(options, "dtype", None), device)
    if loaded is not None:
        target, source = loaded.target, loaded.target_name
    else:
        target, source = load_named_target(target_name, dtype, device)
    if drafter_path is None:
        for name in ("drafter", "layout", "num_draft_tokens", "drafting"):
            if hasattr(options, name):
                log.info("--%s has no effect with --plain, which runs without a drafter", name.replace("_", "-"))
        return Pair(target, source, None, None)
    if not hasattr(options, "target") and getattr(options, "drafter", EMBEDDED) != EMBEDDED:
        log.info("no target was named: %s has to fit the embedded pair's target", drafter_path)
    layout = getattr(options, "layout", None)
    drafter = load_drafter(drafter_path, target=target, device=device, dtype=dtype, layout=layout)
    return Pair(target, source, drafter, drafter_path)


def load_named_target(name: str | None, dtype: torch.dtype, device: torch.device) -> tuple[HFTarget, str]:
    """Load a target named by folder, GGUF file or Hub id, or the default one; and say which it is."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    location, source = locate_target(name)
    log.info("target: %s (%s, %s)", source, str(dtype).removeprefix("torch."), device)
    if location is not None:
        return load_target(location, dtype=dtype, device=device), source
    try:
        return HFTarget.from_pretrained(str(name), dtype=dtype, device=device), source
    except OSError as error:
        raise ValueError(
            f"target {name} is neither a folder or GGUF file here nor a model that the Hub gives out: {error}"
        ) from error


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r} is no device; expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"--device {name} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Reduced precision is slower on most CPUs and faster on GPUs."""
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def drafter_labels(drafters: Sequence[str | None]) -> list[str]:
    """Short names of drafters that tell them apart."""
    paths = [Path(str(drafter)) for drafter in drafters]
    names = [path.resolve().name if path.exists() else str(path).replace("/", "--") for path in paths]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def given_options(options: argparse.Namespace, dataclass_type: type) -> dict[str, Any]:
    """The options of the command line that are fields of a dataclass."""
    return {
        field.name: getattr(options, field.name) for field in fields(dataclass_type) if hasattr(options, field.name)
    }


def eval_settings(options: argparse.Namespace) -> EvalSettings:
    """Settings of an evaluation; flags that can be repeated have other names than the fields."""
    given = given_options(options, EvalSettings)
    renamed = {"datasets": "dataset", "temperatures": "temperature"}
    given |= {name: tuple(getattr(options, flag)) for name, flag in renamed.items() if hasattr(options, flag)}
    return EvalSettings(**given)


def _timed_run(
    target: HFTarget,
    drafter: Drafter | None,
    prompt_ids: list[int],
    params: SamplingParams,
    loop_options: dict[str, Any],
    shown: MarkedWriter | None,
) -> TimedRun:
    showing_s = 0.0

    def on_tokens(_: int, token_ids: list[int], step: StepRecord | None) -> None:
        nonlocal showing_s
        started = time.perf_counter()
        if shown is not None:
            shown.write(token_ids, 0 if step is None else step.num_accepted)
        showing_s += time.perf_counter() - started

    started = time.perf_counter()
    generation = run_loop(target, drafter, [prompt_ids], params, on_tokens=on_tokens, **loop_options)[0]
    seconds = time.perf_counter() - started - showing_s
    if shown is not None:
        shown.finish()
    return TimedRun(generation, seconds)


def _generation_report(pair: Pair, drafted: TimedRun, plain: TimedRun | None, params: SamplingParams) -> dict[str, Any]:
    """What `--json` prints: text, figures and all settings."""
    generation = drafted.generation
    report = {
        "text": pair.target.decode(generation.token_ids),
        "token_ids": generation.token_ids,
        "num_prompt_tokens": len(generation.prompt_ids),
        "num_tokens": len(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "seconds": drafted.seconds,
        "tokens_per_s": drafted.tokens_per_s,
        "acceptance": asdict(measure_acceptance([generation.steps])),
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": str(pair.target.device),
        "sampling": asdict(params),
        "versions": library_versions(),
    }
    if plain is not None:
        report["plain"] = {
            "seconds": plain.seconds,
            "tokens_per_s": plain.tokens_per_s,
            "speed_up": drafted.tokens_per_s / plain.tokens_per_s,
            "identical": plain.generation.token_ids == generation.token_ids,
            "num_identical_tokens": _common_prefix(plain.generation.token_ids, generation.token_ids),
        }
    return report


def _say_generation_report(drafted: TimedRun, plain: TimedRun | None, params: SamplingParams) -> None:
    generation = drafted.generation
    say("")
    if marks_for(sys.stdout):
        say(f"{marks_for(sys.stdout)}underlined\x1b[0m: drafted tokens that the target accepted")
    for line in acceptance_lines(measure_acceptance([generation.steps])):
        say(line)
    if params.temperature > 0:
        say(f"seed {params.seed}")
    if plain is None:
        say(f"{drafted.tokens_per_s:.1f} tokens/s; --compare adds the speed without the drafter")
        return
    say(
        f"speed: {drafted.tokens_per_s:.1f} tokens/s with the drafter, {plain.tokens_per_s:.1f} without: "
        f"{drafted.tokens_per_s / plain.tokens_per_s:.2f} times (one run of each, after a warm-up)"
    )
    say(_identity_line(generation.token_ids, plain.generation.token_ids, params.temperature))


def _identity_line(drafted: list[int], plain: list[int], temperature: float) -> str:
    if temperature > 0:
        return (
            "output: sampled, so the two texts are not expected to be the same; what rejection sampling keeps is the "
            "distribution that they are drawn from"
        )
    if drafted == plain:
        return f"output: identical to plain decoding, all {count(len(plain), 'token')}"
    return (
        f"output: differs from plain decoding after {count(_common_prefix(drafted, plain), 'token')}, where two tokens "
        "were about equally likely and a pass over several rows rounded otherwise than one over a single row; "
        "--dtype float64 is exact"
    )


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
