"""Result rows: the figures of one data set at one temperature, and their means over data sets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dspark.evals.acceptance import Acceptance, acceptance_statistics, measure_acceptance, tail_repeats
from dspark.evals.records import RequestRecord
from dspark.evals.stats import Bootstrap, Estimate, macro_mean

PLAIN = "plain decoding"


@dataclass(frozen=True)
class Timing:
    """Speed of the requests that this process ran; requests taken over from an interrupted run are not in it."""

    num_requests: int
    num_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens, those of prefill included, per second of wall time, prefill included."""
        return self.num_tokens / self.wall_s if self.num_tokens else None

    def to_dict(self) -> dict[str, Any]:
        """The fields and `tokens_per_s`."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


NOT_TIMED = Timing(0, 0, 0.0)


@dataclass(frozen=True)
class ResultRow:
    """Figures of one data set at one temperature, with the settings that they hold for.

    `repetition` is the share of requests whose output ends in a loop. `num_tokens` counts all generated tokens, those
    of prefill included. `domain` is None, or the only domain whose prompts are in the row. `timing` is not part of
    `to_dict`: the same run gives the same row, but not the same time.
    """

    dataset: str
    temperature: float
    settings: dict[str, Any]
    acceptance: Acceptance
    num_tokens: int
    finish_reasons: dict[str, int]
    repetition: Estimate
    domain: str | None = None
    timing: Timing = field(default=NOT_TIMED, compare=False)

    @property
    def label(self) -> str:
        """`measured`, INCONCLUSIVE where a drafter was given and nothing was drafted, or plain decoding."""
        return PLAIN if self.settings["drafter"] is None else self.acceptance.label

    def to_dict(self) -> dict[str, Any]:
        """All but the timing, ready for JSON."""
        row = asdict(self)
        del row["timing"]
        return {"label": self.label, **row}


@dataclass(frozen=True)
class MacroRow:
    """Plain means over data sets of one run at one temperature, whatever the sizes of the sets.

    A figure that a set does not have (nothing drafted, no confidences, a position never reached) has no mean.
    """

    temperature: float
    datasets: tuple[str, ...]
    tokens_per_step: Estimate
    tokens_per_step_macro: Estimate
    acceptance_rate: Estimate
    ece: Estimate
    unconditional: tuple[Estimate, ...]
    conditional: tuple[Estimate, ...]
    expected: tuple[Estimate, ...]


def make_row(
    records: Sequence[RequestRecord], settings: dict[str, Any], domain: str | None = None, timing: Timing = NOT_TIMED
) -> ResultRow:
    """Compute the figures of one data set at one temperature.

    Args:
        records: its requests, at least one, in prompt order.
        settings: what `row_settings` gives for them.
        domain: the only one of their prompts.
        timing: speed of the requests that were run.
    """
    bootstrap = Bootstrap(len(records))
    loops = np.array([tail_repeats(record.token_ids) for record in records], dtype=np.float64)
    return ResultRow(
        dataset=records[0].dataset,
        temperature=records[0].temperature,
        settings=settings,
        acceptance=measure_acceptance([record.steps for record in records], bootstrap),
        num_tokens=sum(record.num_tokens for record in records),
        finish_reasons=dict(Counter(record.finish_reason for record in records)),
        repetition=bootstrap.mean(loops),
        domain=domain,
        timing=timing,
    )


def make_macro_row(sets: Sequence[Sequence[RequestRecord]]) -> MacroRow:
    """Means over data sets.

    Args:
        sets: the requests of each data set, all of one run and temperature; at least one set.
    """
    statistics = [acceptance_statistics([record.steps for record in records]) for records in sets]

    def mean(name: str) -> tuple[Estimate, ...]:
        return tuple(macro_mean([(len(records), part[name]) for part, records in zip(statistics, sets, strict=True)]))

    return MacroRow(
        temperature=sets[0][0].temperature,
        datasets=tuple(records[0].dataset for records in sets),
        **{name: mean(name)[0] for name in ("tokens_per_step", "tokens_per_step_macro", "acceptance_rate", "ece")},
        **{name: mean(name) for name in ("unconditional", "conditional", "expected")},
    )
