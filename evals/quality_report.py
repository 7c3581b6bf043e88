"""Draft quality as tables for a terminal: a line per row, then the figures of each draft position.

The number of drafts does not change what a drafter says of each, only how often it comes to it, so positions are shown
once per drafter, data set and temperature, for the largest K.
Two commands that print it:

    dspark quality --dataset default
    dspark quality --dataset default --num-draft-tokens 2 4 8 --ablate markov
"""

from collections.abc import Callable, Iterator, Sequence

from dspark.evals.quality import QualityRow
from dspark.evals.quality_figures import PositionQuality
from dspark.evals.report import MISSING, number
from dspark.terminal import align

POSITION_LINES = {
    "accepted, unconditional": "unconditional",
    "accepted where reached": "conditional",
    "1 - TV": "one_minus_tv",
    "cross-entropy, nats": "cross_entropy",
    "top-1 agreement": "top1",
    "confidence": "confidence",
    "teacher-forced: survival": "teacher_forced_survival",
    "  1 - TV": "teacher_forced_one_minus_tv",
    "  cross-entropy, nats": "teacher_forced_cross_entropy",
    "  top-1 agreement": "teacher_forced_top1",
}


def format_quality(rows: Sequence[QualityRow]) -> str:
    """Both tables, and a line on what they rest on."""
    lines = [align([list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in rows)])]
    longest: dict[str, QualityRow] = {}
    for row in rows:
        key = f"{_label(row)}, {row.dataset} T={row.temperature:g}"
        if key not in longest or row.num_draft_tokens > longest[key].num_draft_tokens:
            longest[key] = row
    for key, row in longest.items():
        lines += ["", key, _position_table(row.quality.positions)]
    return "\n".join([*lines, "", *dict.fromkeys(_basis(row) for row in rows), *dict.fromkeys(_rounding(rows))])


def _label(row: QualityRow) -> str:
    """Drafter and kind of its Markov head, or what was switched off."""
    kind = row.settings["drafter"]["markov_kind"]
    return f"{row.drafter} {row.variant}" if row.variant else f"{row.drafter} ({kind} head)"


def _score(row: QualityRow, name: str, digits: int = 2, interval: bool = False) -> str:
    """A figure of the calibration."""
    calibration = row.quality.calibration
    return MISSING if calibration is None else number(getattr(calibration, name), digits, interval)


COLUMNS: dict[str, Callable[[QualityRow], str]] = {
    "drafter": _label,
    "data set": lambda row: row.dataset,
    "T": lambda row: f"{row.temperature:g}",
    "K": lambda row: str(row.num_draft_tokens),
    "requests": lambda row: str(row.quality.num_requests),
    "steps": lambda row: f"{row.quality.num_steps:.0f}",
    "tokens/step [95%]": lambda row: number(row.quality.tokens_per_step, interval=True),
    "macro mean": lambda row: number(row.quality.tokens_per_step_macro),
    "acceptance rate": lambda row: number(row.quality.acceptance_rate),
    "teacher-forced": lambda row: number(row.quality.teacher_forced_tokens_per_step),
    "ECE [95%]": lambda row: _score(row, "ece", 3, interval=True),
    "AUROC": lambda row: _score(row, "auroc"),
    "Brier": lambda row: _score(row, "brier", 3),
}


def _position_table(positions: Sequence[PositionQuality]) -> str:
    lines = [["draft", *(str(figures.position + 1) for figures in positions)]]
    for label, name in POSITION_LINES.items():
        values = [number(getattr(figures, name)) for figures in positions]
        if any(value != MISSING for value in values):
            lines.append([label, *values])
    return align(lines, indent="  ")


def _basis(row: QualityRow) -> str:
    states = row.settings["states"]
    sampling = states["sampling"]
    return (
        f"{row.dataset}: sha256 {states['dataset']['sha256'][:8]}, {states['prompt_format']['mode']} prompts, "
        f"continued by the target at top_k={sampling['top_k']} top_p={sampling['top_p']} min_p={sampling['min_p']}, "
        f"at most {sampling['max_new_tokens']} tokens, seed {sampling['seed']}; {row.settings['drafting']} drafting; "
        f"{states['target']['dtype']}; intervals over requests"
    )


def _rounding(rows: Sequence[QualityRow]) -> Iterator[str]:
    """Where the pass that computed the states and the steps that wrote the text disagree."""
    for row in rows:
        if row.quality.num_rescored:
            yield (
                f"{row.dataset} T={row.temperature:g}: {row.quality.num_rescored} of {row.quality.num_committed} "
                "tokens are not what their states call possible (at temperature 0: likeliest), by rounding; they count "
                "as the target's all the same"
            )
