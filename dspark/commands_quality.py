"""`dspark quality`: score drafters on a target's states, and say whether they meet what is required of them.

The exit status is 0, 1 where a requirement is not met, 2 for a mistake in the command.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dspark.checkpoint import load_drafter
from dspark.cli_paths import drafter_location, output_folder
from dspark.commands import drafter_labels, eval_settings, load_pair
from dspark.default import cache_folder
from dspark.drafter import Drafter
from dspark.evals.datasets import check_datasets
from dspark.evals.quality import QualityOptions, QualityRow, check_results_folder, score_drafters, write_results
from dspark.evals.quality_report import format_quality
from dspark.evals.requirements import check_positions, check_requirements, parse_requirement
from dspark.evals.settings import EvalSettings
from dspark.outputs import check_output
from dspark.target import HFTarget
from dspark.terminal import say

log = logging.getLogger(__name__)

STATES_FOLDER = "target-states"
BATCH_SIZE = {"cpu": 8, "cuda": 128}  # continuations decoded together, where none is given


def quality(options: argparse.Namespace) -> int:
    """`dspark quality`."""
    requirements = [parse_requirement(text) for text in getattr(options, "require", [])]
    lengths = tuple(getattr(options, "num_draft_tokens", ()))
    options = argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "num_draft_tokens"})
    settings = eval_settings(options)  # a wrong value must not cost the loading of models
    states = output_folder(options, "states") or cache_folder() / STATES_FOLDER
    scoring = QualityOptions(
        num_draft_tokens=lengths,
        ablate=tuple(getattr(options, "ablate", ())),
        states=states,
    )
    out = output_folder(options)
    if out is not None:
        check_output("--out", out)
        check_results_folder(out)
    if not states.is_dir():  # complete ones may lie where nothing can be written
        check_output("--states", states)
    check_datasets(settings.datasets, settings.limit)
    target, target_name, drafters = _load(options)
    longest = max(lengths, default=max(d.config.max_draft_tokens for d in drafters.values()))
    check_positions(requirements, longest)
    if not hasattr(options, "batch_size"):
        settings = replace(settings, batch_size=BATCH_SIZE.get(target.device.type, EvalSettings.batch_size))
    settings = replace(settings, target_name=target_name)
    for name, drafter in drafters.items():
        if "markov" in scoring.ablate and drafter.markov_head is None:
            log.info("%s has no Markov head: there is nothing to switch off, and no row without it", name)
    rows = score_drafters(target, drafters, settings, scoring)
    outcomes = check_requirements(requirements, rows)
    if out is not None:
        write_results(out, rows, outcomes)
    if options.json:
        results = [row.to_dict() | {"seconds": row.seconds} for row in rows]
        report = {"command": "quality", "rows": results, "requirements": outcomes}
        print(json.dumps(report, allow_nan=False, default=asdict))
    else:
        print(format_quality(rows))
        print(f"target: {target_name}")
    for outcome in outcomes:
        (say if options.json else print)(outcome.line)
    _say_states(scoring.states, rows)
    return 0 if all(outcome.met for outcome in outcomes) else 1


def _say_states(folder: Path | None, rows: Sequence[QualityRow]) -> None:
    passes = {(row.drafter, row.variant, row.dataset, row.temperature): row.seconds for row in rows}  # all K at once
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) if folder is not None else 0
    say(f"scored in {sum(passes.values()):.1f} s; target states are kept in {folder} ({size / 2**20:.0f} MiB)")


def _load(options: argparse.Namespace) -> tuple[HFTarget, str, dict[str, Drafter]]:
    """The target, words on it, and the drafters by name.

    Raises:
        ValueError: one does not load, they do not fit together, or a drafter is named twice.
    """
    names = options.drafter
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"drafter {name} is named twice: its rows could not be told apart")
    pair = load_pair(argparse.Namespace(**{**vars(options), "drafter": names[0]}))
    assert pair.drafter is not None, "only eval has --plain"
    others: dict[str, Any] = {"target": pair.target, "device": pair.target.device, "dtype": pair.target.dtype}
    others["layout"] = getattr(options, "layout", None)
    loaded = [pair.drafter, *(load_drafter(drafter_location(name), **others) for name in names[1:])]
    return pair.target, pair.target_name, dict(zip(drafter_labels(names), loaded, strict=True))
