"""`dspark profile`, `dspark convert` and `dspark doctor`: tools around a drafter. Options not given are absent."""

import argparse
import json
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from dspark.cli_paths import drafter_location
from dspark.commands import Pair, given_options, load_named_target, load_pair
from dspark.convert import check_destination
from dspark.convert import convert as run_convert
from dspark.cost import CostTable
from dspark.evals import format_prompt, load_dataset
from dspark.evals.doctor import Diagnosis, DoctorSettings, diagnose, format_diagnosis
from dspark.evals.settings import describe_drafter, describe_target, library_versions, source_commit
from dspark.families import CheckpointError
from dspark.families.container import local_folder, read_config
from dspark.inspect import inspect_checkpoint
from dspark.outputs import check_output
from dspark.profile import ProfileSettings
from dspark.profile import profile as run_profile
from dspark.terminal import align, say

GPU_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def profile(options: argparse.Namespace) -> int:
    """`dspark profile`."""
    given = given_options(options, ProfileSettings)
    if hasattr(options, "batch_size"):
        given["batch_sizes"] = tuple(options.batch_size)
    settings = ProfileSettings(**given)  # a wrong value must not cost the loading of two models
    check_output("--out", Path(options.out), is_file=True)
    pair = load_pair(options)
    assert pair.drafter is not None, "only eval has --plain"
    if "batch_sizes" not in given and pair.target.device.type == "cuda":
        settings = replace(settings, batch_sizes=GPU_BATCH_SIZES)
    table = run_profile(pair.target, pair.drafter, settings, report=say)
    described = {
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "target_config": describe_target(pair.target),
        "drafter_config": describe_drafter(pair.drafter),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": device_name(pair.target.device),
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
        "commit": source_commit(),
    }
    table = CostTable(table.points, {**table.settings, **described})
    table.save(options.out)
    if options.json:
        print(json.dumps({"command": "profile", **json.loads(Path(options.out).read_text(encoding="utf-8"))}))
        return 0
    print(format_cost(table))
    print(f"{options.out}: use it with --schedule {options.out} on this machine and this pair")
    return 0


def convert(options: argparse.Namespace) -> int:
    """`dspark convert`."""
    source, target = drafter_location(options.source), None
    check_destination(source, options.destination, options.force)  # before a target is loaded
    if hasattr(options, "target"):
        target, _ = load_named_target(options.target, torch.float32, torch.device("cpu"))
    result = run_convert(
        source,
        options.destination,
        options.to,
        layout=getattr(options, "layout", None),
        target=target,
        verifier=getattr(options, "verifier", None),
        force=options.force,
    )
    if options.json:
        print(json.dumps({"command": "convert", "written": options.destination, **asdict(result)}))
        return 0
    print(
        f"{options.destination}: {result.source} -> {result.destination}, {result.num_tensors} tensors; read back: the "
        "same bits and the same drafter"
    )
    for note in result.notes:
        say(note)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """`dspark doctor`; status 1 if something is wrong with the drafter."""
    settings = DoctorSettings(**given_options(options, DoctorSettings))  # before two models are loaded
    path = drafter_location(options.drafter)
    inspection = inspect_checkpoint(path, layout=getattr(options, "layout", None))
    target_name = None
    if inspection.loadable:
        try:
            pair = load_pair(options)
        except CheckpointError as error:
            diagnosis = Diagnosis((f"it cannot be loaded for this target: {error}",))
        else:
            target_name = pair.target_name
            diagnosis = _examine(pair, path, settings)
    else:
        diagnosis = Diagnosis(tuple(f"loading refuses it: {problem}" for problem in inspection.refusals))
    if options.json:
        described = {"target": target_name, "drafter": path, "settings": asdict(settings)}
        print(json.dumps({"command": "doctor", **described, **diagnosis.to_dict()}))
    else:
        print(f"{path}\n{format_diagnosis(diagnosis)}")
    return 0 if diagnosis.healthy else 1


def _examine(pair: Pair, path: str, settings: DoctorSettings) -> Diagnosis:
    assert pair.drafter is not None, "only eval has --plain"
    texts = [prompt.text for prompt in load_dataset("default").prompts]
    prompts = [format_prompt(pair.target, text) for text in islice(cycle(texts), settings.prompts)]
    raw = read_config(local_folder(path))
    return diagnose(pair.drafter, pair.target, raw, prompts, settings, report=say)


def format_cost(table: CostTable) -> str:
    """Two rows per number of requests: milliseconds of a plain step and of those that choose how many drafts to verify,
    and of those settled beforehand, with the half width of the middle half of the measurements in per cent.
    """
    longest = max(point.num_rows for point in table.points) - 1
    rows = [["requests", "drafts", "plain", *(str(k) for k in range(longest + 1))]]
    for size in table.num_requests:
        here: dict[Any, str] = {}
        for point in table.points:
            if point.num_requests == size:
                spread = 50 * (point.high - point.low) / point.seconds
                place = (point.chosen, point.num_rows - 1) if point.drafted else "plain"
                here[place] = f"{point.seconds * 1e3:.1f} ±{spread:.0f}%"
        for chosen, name in ((True, "chosen"), (False, "settled")):
            times = [here.get((chosen, k), "") for k in range(longest + 1)]
            if any(times):
                rows.append([str(size), name, here["plain"] if chosen else "", *times])
    return "\n".join(["milliseconds a step, by drafts verified of each request", align(rows, right=True)])


def device_name(device: torch.device) -> str:
    """The processor behind a device, by its maker's name where that can be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"
