"""Fit the calibration of a drafter's confidences from finished runs, and measure it on requests that were not fitted.

Prompts with an even index are fitted, those with an odd one measured; what is stored is the very scaling that was
measured. The scaling fitted on the other half is given beside it: how far the two differ is how well the data determine
it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dspark.checkpoint import load_drafter, stored_head_digest
from dspark.confidence import ConfidenceCalibration, Scaling
from dspark.evals.compare import Run, compare_runs
from dspark.evals.records import RequestRecord
from dspark.evals.settings import weights_sha256
from dspark.evals.sts import ScalingEffect, fit_sts, scaling_effect, undo_scaling
from dspark.families import Findings, resolve_container
from dspark.families.container import open_container
from dspark.records import StepRecord

# Settings in which runs that are fitted together may differ: none changes what a confidence at a position means.
HARMLESS = ("batch_size", "code", "commit", "datasets", "ignore_eos", "limit", "max_new_tokens", "seed", "versions")


@dataclass(frozen=True)
class Check:
    """What the scaling does on some requests; `temperature` None means those of all fitted cells together."""

    name: str
    temperature: float | None
    effect: ScalingEffect

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def fit_calibration(
    runs: Sequence[Run], drafter_path: str, sampling_temperatures: Sequence[float] | None = None
) -> tuple[ConfidenceCalibration, list[Check]]:
    """Fit a temperature and an offset per draft position.

    Args:
        runs: finished runs of the drafter with all of its draft positions.
        drafter_path: folder or Hub id of the drafter.
        sampling_temperatures: fit the requests at these; None takes all that were sampled, at temperatures above 0.

    Returns:
        The calibration with its settings and figures, and the effect on the half that was not fitted: of all fitted
        cells together, then of every cell.

    Raises:
        ValueError: runs of different settings or of another drafter, fewer drafts than it has positions, no requests
            at one of the temperatures, no confidences, or too few events.
    """
    runs = compare_runs(runs, HARMLESS, "Fit to runs of the same settings").runs
    description = runs[0].description
    _check_drafter(description, drafter_path)
    cells = {(run.name, *cell): records for run in runs for cell, records in run.cells.items()}
    sampled = {temperature for *_, temperature in cells if temperature > 0}
    chosen = {key: records for key, records in cells.items() if key[2] in (sampling_temperatures or sampled)}
    absent = [t for t in sampling_temperatures or () if not any(temperature == t for *_, temperature in chosen)]
    if absent or not chosen:
        wanted = " or ".join(f"{t:g}" for t in absent) or "above 0"
        raise ValueError(f"the runs have no requests at a temperature {wanted}: there is nothing to fit")
    halves = [[r for records in chosen.values() for r in records if r.index % 2 == half] for half in (0, 1)]
    depth = description["settings"]["num_draft_tokens"]
    fitted, held_out = (_raw_steps(half, description) for half in halves)
    scaling, others = fit_sts(fitted, depth), fit_sts(held_out, depth)
    effect = scaling_effect(held_out, scaling)
    calibration = ConfidenceCalibration(
        scaling,
        head_sha256=_head_digest(drafter_path),
        fitted_on=_describe_fit(runs, chosen, halves[0]),
        held_out={
            "requests": "prompts with an odd index",
            "num_requests": effect.num_requests,
            "num_positions": effect.num_positions,
            "ece": asdict(effect.ece),
            "brier": asdict(effect.brier),
            "scaling_of_this_half": others._asdict(),
        },
    )
    checks = [Check("all that were fitted, other half", None, effect)]
    return calibration, checks + measure_scaling(runs, scaling, half=1)


def measure_scaling(runs: Sequence[Run], scaling: Scaling, half: int | None = None) -> list[Check]:
    """The effect of a scaling on every cell of each run, and on all its data sets of a temperature together.

    Args:
        runs: finished runs with confidences; where there are several, names of checks begin with the run's.
        scaling: of every draft position.
        half: 0 or 1 takes the prompts with an even or odd index; None takes all.
    """
    return [
        replace(check, name=f"{run.name}: {check.name}") if len(runs) > 1 else check
        for run in runs
        for check in _measure_run(run, scaling, half)
    ]


def _measure_run(run: Run, scaling: Scaling, half: int | None) -> list[Check]:
    sets: dict[float, dict[str, list[list[StepRecord]]]] = defaultdict(dict)
    for (dataset, temperature), records in run.cells.items():
        part = [record for record in records if half is None or record.index % 2 == half]
        steps = _raw_steps(part, run.description)
        if any(step.confidence for request in steps for step in request):
            sets[temperature][dataset if half is None else f"{dataset}, other half"] = steps
    for parts in sets.values():
        if len(parts) > 1:
            parts[f"all {len(parts)} sets together"] = [steps for part in parts.values() for steps in part]
    return [
        Check(name, temperature, scaling_effect(steps, scaling))
        for temperature, parts in sets.items()
        for name, steps in parts.items()
    ]


def _raw_steps(records: Sequence[RequestRecord], description: dict[str, Any]) -> list[list[StepRecord]]:
    """Steps with the head's own confidences, whatever calibration was applied in the run."""
    steps = [list(record.steps) for record in records]
    applied = (description["drafter"] or {}).get("confidence_scaling")
    return steps if applied is None else undo_scaling(steps, Scaling(**applied))


def _check_drafter(description: dict[str, Any], drafter_path: str) -> None:
    """Refuse a drafter that is not the one of the runs, or runs that did not use all of its positions."""
    ran = description["drafter"]
    if ran is None or "confidence" in description["backend"]["not_reported"]:
        raise ValueError(
            f"the runs were made by {description['backend']['name']}, "
            f"{'without a drafter' if ran is None else 'without confidences'}: only those of this package's own loop "
            "with a drafter can be fitted"
        )
    drafter = load_drafter(drafter_path, dtype=getattr(torch, ran["dtype"]), calibrated=False)
    digest = weights_sha256(drafter)
    if digest != ran["weights_sha256"]:
        raise ValueError(
            f"the runs used a drafter with weights {ran['weights_sha256'][:12]}, {drafter_path} has {digest[:12]}: the "
            "scaling would be that of another confidence head. Name the drafter of the runs with --drafter"
        )
    drafts, positions = description["settings"]["num_draft_tokens"], drafter.config.max_draft_tokens
    if drafts != positions:
        raise ValueError(
            f"the runs drafted {drafts} tokens a step, the drafter has {positions} positions: the others would have no "
            f"temperature. Run dspark eval with --num-draft-tokens {positions}"
        )


def _head_digest(drafter_path: str) -> str:
    """Digest of the head as the files hold it, in whatever type the runs had it."""
    findings = Findings()
    resolved = resolve_container(open_container(drafter_path), None, None, findings)
    findings.raise_problems(drafter_path)
    assert resolved is not None
    assert resolved.tensors is not None
    return stored_head_digest(resolved.tensors)


def _describe_fit(
    runs: Sequence[Run], chosen: dict[tuple[str, str, float], list[RequestRecord]], fitted: Sequence[RequestRecord]
) -> dict[str, Any]:
    """What the scaling holds for; without names, which may be paths of the machine that fitted them."""
    description = runs[0].description
    names = {dataset for _, dataset, _ in chosen}
    datasets = {d["name"]: d for run in runs for d in run.description["datasets"] if d["name"] in names}
    dropped = ("temperatures", "target_name", "drafter_name", "batch_size", "limit")
    settings = {key: value for key, value in description["settings"].items() if key not in dropped}
    kept = ("prompt_format", "verification", "target", "versions", "commit", "code")
    return {
        "requests": "prompts with an even index",
        "num_requests": len(fitted),
        "num_steps": sum(len(record.steps) for record in fitted),
        "datasets": list(datasets.values()),
        "temperatures": sorted({temperature for *_, temperature in chosen}),
        **settings,
        **{key: description[key] for key in kept},
        "drafter_weights_sha256": description["drafter"]["weights_sha256"],
        "drafter_dtype": description["drafter"]["dtype"],
    }
