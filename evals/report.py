"""Result rows as tables, for a terminal and for a page, and the settings behind a row in words."""

import json
from collections.abc import Sequence
from typing import Any

from dspark.evals.acceptance import INCONCLUSIVE
from dspark.evals.compare import Comparison, Run, paired_differences
from dspark.evals.rows import PLAIN, MacroRow, ResultRow
from dspark.evals.stats import Estimate
from dspark.terminal import align

MISSING = "-"
HEADER = ("prompts", "temperature", "requests", "steps", "tokens per step", "macro mean", "acceptance rate")

NamedRow = tuple[str, ResultRow | MacroRow]  # with the name of its run


def format_table(rows: Sequence[ResultRow], macro_rows: Sequence[MacroRow] = ()) -> str:
    """Rows of one run as an aligned text table, means over data sets below, and the settings they share in words."""
    cells = summary([("", row) for row in (*rows, *macro_rows)], in_full=False)
    return "\n".join([align(cells), "", *dict.fromkeys(describe_settings(row) for row in rows)])


def format_comparison(comparison: Comparison) -> str:
    """The same for one run or several; of several also what differs between them, and by how much."""
    runs = comparison.runs
    if len(runs) == 1:
        return format_table(runs[0].rows, runs[0].macro_rows)
    lines = [align(summary(named_rows(runs), in_full=False)), "", f"compared: {comparison.compared}"]
    for name, values in comparison.fields.items():
        pairs = (f"{json.dumps(value)} ({run.name})" for run, value in zip(runs, values, strict=True))
        lines.append(f"  {name}: {', '.join(pairs)}")
    for d in paired_differences(runs):
        lines.append(
            f"{d.run} against {d.baseline}, {d.dataset} T={d.temperature:g}, same requests: tokens per step differ by "
            f"{number(d.tokens_per_step, interval=True, sign='+')}, ratio {number(d.ratio, interval=True)}"
        )
    notes = dict.fromkeys(f"{run.name}: {describe_settings(row)}" for run in runs for row in run.rows)
    return "\n".join([*lines, "", *notes])


def named_rows(runs: Sequence[Run]) -> list[NamedRow]:
    """Every row of every run, and behind them the run's means over data sets."""
    return [(run.name, row) for run in runs for row in (*run.rows, *run.macro_rows)]


def summary(rows: Sequence[NamedRow], in_full: bool) -> list[list[str]]:
    """Header and cells; the first column names the run if there are several.

    Args:
        rows: in the order to show.
        in_full: with the interval of every figure, for a page that gives the positions their own tables; else with the
            interval of tokens per step alone, and the rates of all positions in one cell.
    """
    positions = [] if in_full else ["conditional per position", "1 - TV per position"]
    lines = [["run", *HEADER, *positions, "ECE", "loops"]]
    lines += [[name, *_cells(row, in_full)] for name, row in rows]
    return without_single_run(lines)


def without_single_run(lines: list[list[str]]) -> list[list[str]]:
    """The first column, behind its header the name of a run in each line, goes where all are the same."""
    return lines if len({line[0] for line in lines[1:]}) > 1 else [line[1:] for line in lines]


def _cells(row: ResultRow | MacroRow, in_full: bool) -> list[str]:
    if isinstance(row, MacroRow):
        figures: Any = row
        name, counts, loops = f"mean of {len(row.datasets)} sets", ["", ""], ""
    else:
        figures, name = row.acceptance, row.dataset if row.domain is None else f"{row.dataset}: {row.domain}"
        counts = [str(figures.num_requests), str(figures.num_steps)]
        loops = MISSING if row.repetition.value is None else f"{row.repetition.value:.0%}"
    nothing_drafted = isinstance(row, ResultRow) and figures.label == INCONCLUSIVE
    by_position = [] if in_full else [figures.conditional, figures.expected]
    return [
        name,
        f"{row.temperature:g}",
        *counts,
        number(figures.tokens_per_step, interval=True),
        number(figures.tokens_per_step_macro, interval=in_full),
        _nothing_drafted(row) if nothing_drafted else number(figures.acceptance_rate, interval=in_full),
        *(" ".join(map(number, rates)) or MISSING for rates in by_position),
        number(figures.ece, 3, interval=in_full),
        loops,
    ]


def _nothing_drafted(row: ResultRow) -> str:
    return PLAIN if row.label == PLAIN else "no drafts were verified"


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


def number(estimate: Estimate, digits: int = 2, interval: bool = False, sign: str = "-") -> str:
    """A figure as text, with its interval if asked and known; `sign` "+" writes it before positive ones too."""
    if estimate.value is None:
        return MISSING
    text = f"{estimate.value:{sign}.{digits}f}"
    if interval and estimate.low is not None:
        text += f" [{estimate.low:{sign}.{digits}f}, {estimate.high:{sign}.{digits}f}]"
    return text
