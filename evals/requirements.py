"""Thresholds on draft quality, so that a drafter can be tested like code: `tokens_per_step>=2.5`.

    NAME[POSITION].BOUND OP NUMBER      POSITION counts drafts from 1, for figures of a draft position
                                        BOUND is low or high: the end of the 95% interval instead of the figure
                                        OP is >=, <=, > or <

Every row of an intact drafter has to meet every requirement; rows of ablations are there for comparison only.
Two commands that use it:

    dspark quality --dataset default --require "tokens_per_step>=2" "one_minus_tv[1]>=0.5"
    dspark quality TARGET DRAFTER --dataset FILE.jsonl --require "tokens_per_step.low>=2.3" "ece<=0.05"
"""

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dspark.evals.quality import QualityRow
from dspark.evals.quality_figures import PositionQuality, Quality
from dspark.evals.stats import Estimate


def _estimates(figures: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass that are figures with intervals."""
    return tuple(field.name for field in fields(figures) if field.type is Estimate)


CALIBRATION_FIGURES = ("ece", "auroc", "brier")
FIGURES = (*_estimates(Quality), *CALIBRATION_FIGURES)
POSITION_FIGURES = _estimates(PositionQuality)
OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
PATTERN = re.compile(
    r"\s*(?P<name>\w+)(?:\[(?P<position>\w+)\])?(?:\.(?P<bound>\w+))?\s*(?P<operator>>=|<=|>|<)\s*(?P<number>\S+)\s*"
)
FORM = "expected NAME>=NUMBER, such as tokens_per_step>=2.5, one_minus_tv[1]>=0.6 or ece.high<=0.05"


@dataclass(frozen=True)
class Requirement:
    """One parsed expression. `position` counts from 1; None for a figure of the whole row."""

    text: str
    name: str
    position: int | None
    bound: str
    operator: str
    threshold: float

    def figure(self, quality: Quality) -> float | None:
        """What the requirement is about, or None where it is not defined."""
        figures: Any = quality if self.position is None else quality.positions[self.position - 1]
        if self.name in CALIBRATION_FIGURES:
            figures = quality.calibration
        return None if figures is None else getattr(getattr(figures, self.name), self.bound)


@dataclass(frozen=True)
class Outcome:
    """What came of one requirement, with one line that says so; `worst` is the figure that decided."""

    requirement: str
    met: bool
    worst: float | None
    line: str


def parse_requirement(text: str) -> Requirement:
    """Read one expression.

    Raises:
        ValueError: it has another form, an unknown name (all names are listed), or a position where none belongs or
            none where one does.
    """
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"--require {text!r} is no requirement; {FORM}")
    name, position, bound = match["name"], match["position"], match["bound"] or "value"
    if name not in FIGURES and name not in POSITION_FIGURES:
        raise ValueError(
            f"--require {text!r}: there is no figure {name!r}; there are {', '.join(FIGURES)}, and with a draft "
            f"position in brackets {', '.join(POSITION_FIGURES)}"
        )
    if bound not in ("value", "low", "high"):
        raise ValueError(f"--require {text!r}: {bound!r} is no end of an interval; expected .low, .high or neither")
    if name in FIGURES and position is not None:
        raise ValueError(f"--require {text!r}: {name} is a figure of all drafts; leave [{position}] out")
    if name in POSITION_FIGURES and (position is None or not position.isdecimal() or int(position) < 1):
        raise ValueError(f"--require {text!r}: {name} needs a draft position, counted from 1, such as {name}[1]")
    try:
        threshold = float(match["number"])
    except ValueError:
        threshold = math.nan
    if not math.isfinite(threshold):
        raise ValueError(f"--require {text!r}: {match['number']!r} is no number; {FORM}")
    return Requirement(text.strip(), name, int(position) if position else None, bound, match["operator"], threshold)


def check_positions(requirements: Sequence[Requirement], num_draft_tokens: int) -> None:
    """Refuse positions that no row will have (ValueError)."""
    for requirement in requirements:
        if requirement.position is not None and requirement.position > num_draft_tokens:
            raise ValueError(
                f"--require {requirement.text!r}: there is no draft {requirement.position}; "
                f"positions are 1..{num_draft_tokens}"
            )


def check_requirements(requirements: Sequence[Requirement], rows: Sequence[QualityRow]) -> list[Outcome]:
    """Judge every requirement over all rows of intact drafters that have its position; one without any is not met."""
    return [_judge(requirement, [row for row in rows if not row.variant]) for requirement in requirements]


def _judge(requirement: Requirement, rows: Sequence[QualityRow]) -> Outcome:
    concerned = [row for row in rows if (requirement.position or 1) <= row.num_draft_tokens]
    figures = [(requirement.figure(row.quality), row) for row in concerned]
    missing = [row for value, row in figures if value is None]
    if missing or not figures:
        where = missing[0].name if missing else "any row"
        line = f"FAILED {requirement.text}: not defined for {where} (no confidence head, or too few requests)"
        return Outcome(requirement.text, False, None, line)
    upward = requirement.operator in (">=", ">")
    value, row = (min if upward else max)(figures, key=lambda pair: pair[0])
    failed = sum(not OPERATORS[requirement.operator](value, requirement.threshold) for value, _ in figures)
    rest = f"{failed} of {len(figures)} rows fail" if failed else f"of {len(figures)} rows"
    verdict = "FAILED" if failed else "ok"
    line = f"{verdict} {requirement.text}: {'lowest' if upward else 'highest'} {value:.4g}, {row.name} ({rest})"
    return Outcome(requirement.text, not failed, value, line)
