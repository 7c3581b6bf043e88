"""The table of result rows that commands print, and the settings behind a row in words."""

from collections.abc import Sequence
from typing import Any

from dspark.evals.acceptance import INCONCLUSIVE
from dspark.evals.rows import PLAIN, ResultRow
from dspark.evals.stats import Estimate

MISSING = "-"

HEADER = (
    "data set",
    "T",
    "requests",
    "steps",
    "tokens/step [95%]",
    "macro",
    "accepted",
    "conditional per position",
    "1 - TV per position",
    "ECE",
    "loops",
)


def format_table(rows: Sequence[ResultRow], markdown: bool = False) -> str:
    """Rows as an aligned text table, or a Markdown one, followed by the settings they share in words.

    Args:
        rows: result rows, in the order to show.
        markdown: whether to write a Markdown table.
    """
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        lines.insert(1, "|" + " --- |" * len(HEADER))
    notes = list(dict.fromkeys(describe_settings(row) for row in rows))
    return "\n".join([*lines, "", *notes])


def describe_settings(row: ResultRow) -> str:
    """One line: what a reader needs in order to compare the row with a figure from elsewhere."""
    settings, prompt_format, drafter = row.settings, row.settings["prompt_format"], row.settings["drafter"]
    template = prompt_format["mode"]
    if prompt_format["template_sha256"]:
        template += f" template {prompt_format['template_sha256'][:8]}"
    thinking = {None: "no thinking switch", False: "thinking off", True: "thinking on"}[prompt_format["thinking"]]
    drafting = PLAIN
    if drafter is not None and settings["num_draft_tokens"] is None:
        drafting = "drafter, K and drafting as the server was started with"
    elif drafter is not None:
        drafting = (
            f"K={settings['num_draft_tokens']}, block {drafter['block_size']} {drafter['layout']}, "
            f"{settings['drafting']} drafting, {settings['verification']}"
        )
    sampling = f"top_k={settings['top_k']} top_p={settings['top_p']} min_p={settings['min_p']}"
    return (
        f"{row.dataset}: sha256 {settings['dataset']['sha256'][:8]}, {settings['turns']} turn, {template}, {thinking}; "
        f"{drafting}; {sampling}, at most {settings['max_new_tokens']} tokens, seed {settings['seed']}; "
        f"target {settings['target']['dtype'] or 'as served'} on {settings['target']['device']}{_backend(settings)}"
    )


def _backend(settings: dict[str, Any]) -> str:
    """What ran it, and what it cannot know; empty for the library's own loop, which knows everything."""
    backend = settings["backend"]
    if not backend["not_reported"]:
        return ""
    return f"; by {backend['name']}, which does not report {' and '.join(backend['not_reported'])}"


def _cells(row: ResultRow) -> tuple[str, ...]:
    figures = row.acceptance
    drafted = figures.label != INCONCLUSIVE
    return (
        row.dataset,
        f"{row.temperature:g}",
        str(figures.num_requests),
        str(figures.num_steps),
        _number(figures.tokens_per_step, interval=True),
        _number(figures.tokens_per_step_macro),
        _number(figures.acceptance_rate) if drafted else row.label,
        " ".join(_number(rates.conditional) for rates in figures.positions) or MISSING,
        " ".join(_number(rates.expected) for rates in figures.positions) or MISSING,
        _number(figures.calibration.ece, digits=3) if figures.calibration else MISSING,
        f"{row.repetition.value:.0%}" if row.repetition.value is not None else MISSING,
    )


def _number(estimate: Estimate, digits: int = 2, interval: bool = False) -> str:
    if estimate.value is None:
        return MISSING
    text = f"{estimate.value:.{digits}f}"
    if interval and estimate.low is not None:
        text += f" [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    return text
