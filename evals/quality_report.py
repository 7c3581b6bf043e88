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
from dspark.evals.stats import Estimate

HEADER = (
    "drafter",
    "data set",
    "T",
    "K",
    "requests",
    "steps",
    "tokens/step [95%]",
    "macro",
    "accepted",
    "teacher-forced",
    "ECE [95%]",
    "AUROC",
    "Brier",
)
POSITION_LINES: tuple[tuple[str, Callable[[PositionQuality], Estimate]], ...] = (
    ("accepted, unconditional", lambda figures: figures.unconditional),
    ("accepted where reached", lambda figures: figures.conditional),
    ("1 - TV", lambda figures: figures.one_minus_tv),
    ("cross-entropy, nats", lambda figures: figures.cross_entropy),
    ("top-1 agreement", lambda figures: figures.top1),
    ("confidence", lambda figures: figures.confidence),
    ("teacher-forced: survival", lambda figures: figures.teacher_forced.survival),
    ("  1 - TV", lambda figures: figures.teacher_forced.one_minus_tv),
    ("  cross-entropy, nats", lambda figures: figures.teacher_forced.cross_entropy),
    ("  top-1 agreement", lambda figures: figures.teacher_forced.top1),
)


def format_quality(rows: Sequence[QualityRow]) -> str:
    """Both tables, and a line on what they rest on."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    longest: dict[str, QualityRow] = {}
    for row in rows:
        key = f"{_label(row)}, {row.dataset} T={row.temperature:g}"
        if key not in longest or row.num_draft_tokens > longest[key].num_draft_tokens:
            longest[key] = row
    for key, row in longest.items():
        lines += ["", key, *_position_table(row.quality.positions)]
    return "\n".join([*lines, "", *dict.fromkeys(_basis(row) for row in rows), *dict.fromkeys(_rounding(rows))])


def _label(row: QualityRow) -> str:
    """Drafter and kind of its Markov head, or what was switched off."""
    kind = row.settings["drafter"]["markov_kind"]
    return f"{row.drafter} {row.variant}" if row.variant else f"{row.drafter} ({kind} head)"


def _cells(row: QualityRow) -> tuple[str, ...]:
    figures, calibration = row.quality, row.quality.calibration
    return (
        _label(row),
        row.dataset,
        f"{row.temperature:g}",
        str(row.num_draft_tokens),
        str(figures.num_requests),
        f"{figures.num_steps:.0f}",
        number(figures.tokens_per_step, interval=True),
        number(figures.tokens_per_step_macro),
        number(figures.acceptance_rate),
        number(figures.teacher_forced_tokens_per_step),
        number(calibration.ece, 3, interval=True) if calibration else MISSING,
        number(calibration.auroc) if calibration else MISSING,
        number(calibration.brier, 3) if calibration else MISSING,
    )


def _position_table(positions: Sequence[PositionQuality]) -> list[str]:
    width = max(len(label) for label, _ in POSITION_LINES)
    lines = [f"  {'draft':<{width}}" + "".join(f"{figures.position + 1:>7}" for figures in positions)]
    for label, figure in POSITION_LINES:
        values = [number(figure(figures)) for figures in positions]
        if any(value != MISSING for value in values):
            lines.append(f"  {label:<{width}}" + "".join(f"{value:>7}" for value in values))
    return lines


def _basis(row: QualityRow) -> str:
    states = row.settings["states"]
    sampling = states["sampling"]
    text = f"{row.dataset}: sha256 {states['dataset']['sha256'][:8]}, {states['prompt_format']['mode']} prompts, "
    if states["continuation"] == "data set":
        return text + "on the data set's completions, which the target did not sample"
    return (
        f"{text}continued by the target at top_k={sampling['top_k']} top_p={sampling['top_p']} "
        f"min_p={sampling['min_p']}, at most {sampling['max_new_tokens']} tokens, seed {sampling['seed']}; "
        f"{row.settings['drafting']} drafting; {states['target']['dtype']}; intervals over requests"
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
