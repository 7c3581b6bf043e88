"""The table of result rows that commands print, and the settings behind a row in words."""

import json
from collections.abc import Sequence
from typing import Any

from dspark.evals.acceptance import INCONCLUSIVE
from dspark.evals.compare import Comparison, paired_differences
from dspark.evals.rows import PLAIN, MacroRow, ResultRow
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


def format_table(rows: Sequence[ResultRow], macro_rows: Sequence[MacroRow] = (), markdown: bool = False) -> str:
    """Rows as an aligned text table, or a Markdown one, followed by the settings they share in words.

    Args:
        rows: result rows, in the order to show.
        macro_rows: means over data sets, shown below them.
        markdown: whether to write a Markdown table.
    """
    cells = [HEADER, *(_cells(row) for row in rows), *(_macro_cells(row) for row in macro_rows)]
    return "\n".join([*_aligned(cells, markdown), "", *dict.fromkeys(describe_settings(row) for row in rows)])


def format_comparison(comparison: Comparison) -> str:
    """The rows of several runs as one aligned text table, what differs between the runs, and by how much."""
    cells = [("run", *HEADER)]
    for run in comparison.runs:
        cells += [(run.name, *_cells(row)) for row in run.rows]
        cells += [(run.name, *_macro_cells(row)) for row in run.macro_rows]
    lines = [*_aligned(cells, markdown=False), "", f"compared: {comparison.compared}"]
    for name, values in comparison.fields.items():
        pairs = (f"{json.dumps(value)} ({run.name})" for run, value in zip(comparison.runs, values, strict=True))
        lines.append(f"  {name}: {', '.join(pairs)}")
    for d in paired_differences(comparison.runs):
        lines.append(
            f"{d.run} against {d.baseline}, {d.dataset} T={d.temperature:g}, same requests: "
            f"{number(d.tokens_per_step, interval=True)} tokens/step more, ratio {number(d.ratio, interval=True)}"
        )
    notes = dict.fromkeys(f"{run.name}: {describe_settings(row)}" for run in comparison.runs for row in run.rows)
    return "\n".join([*lines, "", *notes])


def _aligned(cells: Sequence[tuple[str, ...]], markdown: bool) -> list[str]:
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        return [lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


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
        if settings.get("schedule") is not None:
            drafting += f", schedule {settings['schedule']}"
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
        number(figures.tokens_per_step, interval=True),
        number(figures.tokens_per_step_macro),
        number(figures.acceptance_rate) if drafted else row.label,
        " ".join(number(rates.conditional) for rates in figures.positions) or MISSING,
        " ".join(number(rates.expected) for rates in figures.positions) or MISSING,
        number(figures.calibration.ece, digits=3) if figures.calibration else MISSING,
        f"{row.repetition.value:.0%}" if row.repetition.value is not None else MISSING,
    )


def _macro_cells(row: MacroRow) -> tuple[str, ...]:
    return (
        f"mean of {len(row.datasets)}",
        f"{row.temperature:g}",
        "",
        "",
        number(row.tokens_per_step, interval=True),
        number(row.tokens_per_step_macro),
        number(row.acceptance_rate),
        " ".join(map(number, row.conditional)) or MISSING,
        " ".join(map(number, row.expected)) or MISSING,
        number(row.ece, digits=3),
        "",
    )


def number(estimate: Estimate, digits: int = 2, interval: bool = False) -> str:
    """A figure as text, with its interval if asked and known."""
    if estimate.value is None:
        return MISSING
    text = f"{estimate.value:.{digits}f}"
    if interval and estimate.low is not None:
        text += f" [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    return text
