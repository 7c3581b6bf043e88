"""Calibration of the confidence head: a temperature and an offset per draft position, kept beside the drafter.

The head's logit z_i says how likely draft i is accepted given that all before it were. Sequential temperature scaling
replaces sigmoid(z_i) by sigmoid(z_i / T_i + b_i), fitted left to right on the product of the confidences up to a
position, the chance that the whole prefix survives (`dspark.evals.sts`). `confidence_calibration.json` in the drafter's
folder holds both, the digest of the head that they belong to, what they were fitted on, and the figures on requests
that the fit has not seen. Loading applies them to every confidence that leaves the drafter, so step records, schedules
and serving engines see the same numbers.

Source: the DSpark paper (sequential temperature scaling, without offsets); Guo et al. 2017, arXiv:1706.04599, section
4.2 (temperature and Platt scaling).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dspark.families.container import read_json
from dspark.families.findings import refusal

CALIBRATION_FILE = "confidence_calibration.json"
METHOD = "sequential temperature scaling with offsets"
FIELDS = {"method", "temperatures", "offsets", "confidence_head_sha256", "fitted_on", "held_out"}
HEAD_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")


class Scaling(NamedTuple):
    """What a logit of draft position i becomes: z / temperatures[i] + offsets[i]."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]


@dataclass(frozen=True)
class ConfidenceCalibration:
    """The scaling of the draft positions, first to last, and where it comes from.

    `head_sha256` is `head_digest` of the head it was fitted for. `fitted_on` and `held_out` are the settings and the
    figures of the fit, for reports.
    """

    scaling: Scaling
    head_sha256: str
    fitted_on: Mapping[str, Any] = field(default_factory=dict, hash=False)
    held_out: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse a scaling that no fit gives.

        Raises:
            CheckpointError: a temperature is not a positive number, an offset is no finite one, or there are not as
                many of both.
        """
        remedy = "Fit the calibration again with dspark calibrate, or delete the file."
        for name, values, above in zip(Scaling._fields, self.scaling, (0.0, -math.inf), strict=True):
            for position, value in enumerate(values, start=1):
                if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
                    raise refusal(
                        f"{name}[{position - 1}] (draft {position}) is {value!r}",
                        "a finite number above 0" if above == 0 else "a finite number",
                        "The confidence of that draft, and of all behind it, would be turned round or be no number.",
                        remedy,
                    )
        if len(self.scaling.temperatures) != len(self.scaling.offsets):
            raise refusal(
                f"there are {len(self.scaling.temperatures)} temperatures and {len(self.scaling.offsets)} offsets",
                "one of each for every draft position",
                "Which position has which would be a guess.",
                remedy,
            )
        object.__setattr__(self, "scaling", Scaling(*(tuple(map(float, values)) for values in self.scaling)))

    def to_dict(self) -> dict[str, Any]:
        """What the file holds."""
        return {
            "method": METHOD,
            "temperatures": list(self.scaling.temperatures),
            "offsets": list(self.scaling.offsets),
            "confidence_head_sha256": self.head_sha256,
            "fitted_on": dict(self.fitted_on),
            "held_out": dict(self.held_out),
        }

    def summary(self) -> str:
        """One line for `dspark inspect`."""
        temperatures, offsets = (" ".join(f"{value:.3g}" for value in values) for values in self.scaling)
        requests = self.fitted_on.get("num_requests")
        source = f", fitted on {requests} requests" if requests else ""
        ece = self.held_out.get("ece")
        if ece is not None:
            source += f"; ECE {ece['before']['value']:.3f} before, {ece['after']['value']:.3f} after, on others"
        return f"{METHOD}, temperatures {temperatures}, offsets {offsets}{source}"


def scale_logits(logits: torch.Tensor, scaling: torch.Tensor) -> torch.Tensor:
    """Scale the logits of each draft position.

    Args:
        logits: [..., K].
        scaling: [2, N] temperatures and offsets on the same device, N >= K.

    Returns:
        [..., K] in the type of the logits.
    """
    temperatures, offsets = scaling[:, : logits.shape[-1]].to(logits.dtype)
    return logits / temperatures + offsets


def head_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of a confidence head's weights as they are stored; it changes when the drafter is trained again.

    Args:
        tensors: (canonical name, value) of the head's tensors, in the order of `HEAD_TENSORS`.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().to("cpu", torch.float64)  # exact, so that the stored type does not matter
        digest.update(f"{name} {tuple(values.shape)}\n".encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_calibration(folder: Path, num_positions: int, head_sha256: str | None) -> ConfidenceCalibration | None:
    """The calibration that lies in a drafter's folder.

    Args:
        folder: the drafter's.
        num_positions: draft positions of the drafter; there is one temperature for each.
        head_sha256: `head_digest` of its confidence head; None if it has no head.

    Returns:
        None where there is no such file.

    Raises:
        CheckpointError: the file is damaged, does not fit the drafter, or was fitted for another head.
    """
    path = folder / CALIBRATION_FILE
    if not path.exists():
        return None
    remedy = "Fit the calibration again with dspark calibrate, or delete the file."
    if head_sha256 is None:
        raise refusal(
            f"{CALIBRATION_FILE} beside a drafter without a confidence head",
            "no such file",
            "There is no confidence that it could calibrate.",
            "Delete the file, or use the drafter that it was fitted for.",
        )
    raw = read_json(path)
    if not (
        raw.keys() == FIELDS
        and raw["method"] == METHOD
        and isinstance(raw["temperatures"], list)
        and isinstance(raw["offsets"], list)
        and isinstance(raw["fitted_on"], dict)
        and _has_known_scores(raw["held_out"])
    ):
        raise refusal(
            f"{CALIBRATION_FILE} has the fields {', '.join(sorted(raw))}, method {raw.get('method')!r}",
            f"{', '.join(sorted(FIELDS))} with method {METHOD!r}, "
            "lists of temperatures and offsets, and figures as dspark writes them",
            "What its numbers mean would be a guess.",
            remedy,
        )
    scaling = Scaling(tuple(raw["temperatures"]), tuple(raw["offsets"]))
    calibration = ConfidenceCalibration(scaling, str(raw["confidence_head_sha256"]), raw["fitted_on"], raw["held_out"])
    if len(scaling.temperatures) != num_positions:
        raise refusal(
            f"{CALIBRATION_FILE} has {len(scaling.temperatures)} temperatures",
            f"{num_positions}, one for each draft position of this drafter",
            "Positions without a temperature would be uncalibrated, and it may belong to another drafter.",
            remedy,
        )
    if calibration.head_sha256 != head_sha256:
        raise refusal(
            f"{CALIBRATION_FILE} was fitted for the confidence head {calibration.head_sha256[:12]}",
            f"{head_sha256[:12]}, the head of this checkpoint",
            "Temperatures of another training run would make this one's confidences worse, not better.",
            remedy,
        )
    return calibration


def _has_known_scores(held_out: Any) -> bool:
    """Whether an ECE that is there has the form that `ConfidenceCalibration.summary` reads."""
    if not isinstance(held_out, dict):
        return False
    ece = held_out.get("ece")
    if ece is None:
        return True
    parts = [ece.get(name) if isinstance(ece, dict) else None for name in ("before", "after")]
    return all(isinstance(part, dict) and isinstance(part.get("value"), int | float) for part in parts)


def write_calibration(path: Path, calibration: ConfidenceCalibration) -> None:
    """Write the file, so that a reader sees the old one or the new one, never a part."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(calibration.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    scratch.replace(path)
