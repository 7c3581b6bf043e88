"""The folder of a report: results.json, report.md, which reads without the program, and plots where matplotlib is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dspark.evals.acceptance import Acceptance
from dspark.evals.compare import Comparison, Difference, Run, paired_differences
from dspark.evals.plots import FEWEST, HOW_TO_GET, draw_plots, plots_available
from dspark.evals.records import RESULTS_FILE, write_json
from dspark.evals.report import (
    MISSING,
    NamedRow,
    describe_settings,
    named_rows,
    number,
    summary,
    without_single_run,
)
from dspark.evals.rows import ResultRow
from dspark.evals.stats import LEVEL

REPORT_FILE = "report.md"
DEFINITIONS = """\
* *tokens per step*: committed tokens / verification steps, pooled over all steps; the token sampled by prefill belongs
  to no step. *Per request*: the same ratio for each request, then its mean.
* *acceptance rate*: accepted / offered drafts. It falls as more drafts are offered, even for the same drafter.
* *conditional*: steps that accepted a position / steps that reached it, all drafts before it accepted.
  *Unconditional*: / steps that offered it.
* *1 − TV*: what the conditional rate should be, from the two distributions. *Realised − expected* is the difference
  over the same steps: its interval should contain 0.
* *confidence*: the drafter's own estimate of the conditional rate. *ECE*, *AUROC* and *Brier* score the product of the
  confidences up to a position against whether the prefix was accepted; drafts that were not verified are left out.
* *loops*: outputs that end in one span of tokens over and over. They are easy to draft, so acceptance is flattered.
* Drafts behind the end of a request were never needed, and are in no figure.
"""


def render_report(comparison: Comparison, plots: Mapping[str, Sequence[str]], remark: str | None) -> str:
    """The page as Markdown.

    Args:
        comparison: the runs.
        plots: file names by kind, as `draw_plots` gives them; empty without plots.
        remark: why there are no plots, None if there are.
    """
    runs, differences = comparison.runs, paired_differences(comparison.runs)
    parts = ["# Acceptance" + (": " + " against ".join(run.name for run in runs) if len(runs) > 1 else "")]
    parts.append(
        f"Figures with their {LEVEL:.0%} bootstrap intervals over requests in brackets; definitions at the end. "
        "All of it, with the settings in full, is in results.json."
    )
    if remark is not None:
        parts.append(f"Plots were not drawn: {remark}.")
    if len(runs) > 1:
        parts += ["## Compared", _compared(comparison)]
    parts += ["## Tokens per step", _images(plots, "tokens_per_step"), table(summary(named_rows(runs), in_full=True))]
    if differences:
        parts += [f"Against {runs[0].name}, on the same requests:", _differences(differences)]
    domains: list[NamedRow] = [(run.name, row) for run in runs for row in run.domain_rows]
    if domains:
        parts += ["By domain of the prompts:", table(summary(domains, in_full=True))]
    drafted = [(run, row) for run in runs for row in run.rows if row.acceptance.positions]
    if drafted:
        parts += ["## Acceptance by draft position", _images(plots, "runs"), _images(plots, "acceptance")]
        parts.append(_agreement(row for _, row in drafted))
        if any(plots.values()):
            parts.append(f"The plots leave out conditional rates of positions that fewer than {FEWEST} steps reached.")
        for run, row in drafted:
            name = f"{run.name}: " if len(runs) > 1 else ""
            parts += [f"**{name}{_cell(row)}**", _positions(row.acceptance)]
        parts += ["## Accepted length", _images(plots, "accepted_length"), _lengths(drafted)]
        parts += ["## Calibration of the confidence", _images(plots, "reliability"), _calibration(drafted)]
    parts += ["## What was run", _settings(runs), "## Definitions", DEFINITIONS]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


_interval = partial(number, interval=True)


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its header."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled)


def _images(plots: Mapping[str, Sequence[str]], kind: str) -> str:
    return "\n".join(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots.get(kind, ()))


def _compared(comparison: Comparison) -> str:
    lines = [["setting", *(run.name for run in comparison.runs)]]
    lines += [[name, *(_value(value) for value in values)] for name, values in comparison.fields.items()]
    return f"The runs differ in {comparison.compared}." + (f"\n\n{table(lines)}" if comparison.fields else "")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(_value(v) for v in value) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _cell(row: ResultRow) -> str:
    return f"{row.dataset}, temperature {row.temperature:g}"


def _differences(differences: Sequence[Difference]) -> str:
    lines = [["run", "prompts", "temperature", "difference in tokens per step", "ratio"]]
    for d in differences:
        lines.append([d.run, d.dataset, f"{d.temperature:g}", *map(_interval, (d.tokens_per_step, d.ratio))])
    return table(lines)


def _agreement(rows: Iterable[ResultRow]) -> str:
    """How often the realised rate and 1 - TV agree: a statement on verification, not on the drafter.

    At temperature 0 both are the same by definition, so only sampled rows count.
    """
    rates = [r for row in rows if row.temperature > 0 for r in row.acceptance.positions]
    gaps = [r.gap for r in rates if r.gap.low is not None and r.gap.high is not None and r.num_reached >= FEWEST]
    if not gaps:
        return ""
    inside = sum(gap.low <= 0 <= gap.high for gap in gaps)
    return (
        f"Realised acceptance against 1 − TV in sampled requests: {inside} of {len(gaps)} intervals of the difference "
        f"contain 0 (of positions that at least {FEWEST} steps reached). If verification is right, about {LEVEL:.0%} "
        "do, fewer where a position has few events."
    )


def _positions(figures: Acceptance) -> str:
    lines = [["draft", "offered", "reached", "accepted", "unconditional", "conditional", "1 − TV",
              "realised − expected", "confidence"]]  # fmt: skip
    for r in figures.positions:
        counts = (r.position + 1, r.num_offered, r.num_reached, r.num_accepted)
        rates = (r.unconditional, r.conditional, r.expected)
        lines.append([*map(str, counts), *map(_interval, rates), _interval(r.gap, 3), _interval(r.confidence)])
    return table(lines)


def _lengths(drafted: Sequence[tuple[Run, ResultRow]]) -> str:
    longest = max(len(row.acceptance.accepted_shares) for _, row in drafted)
    lines = [["run", "prompts", *map(str, range(longest))]]
    for run, row in drafted:
        shares = [_interval(share) for share in row.acceptance.accepted_shares]
        lines.append([run.name, _cell(row), *shares, *[MISSING] * (longest - len(shares))])
    return "Share of steps by the number of drafts that they accepted:\n\n" + table(without_single_run(lines))


def _calibration(drafted: Sequence[tuple[Run, ResultRow]]) -> str:
    lines, applied = [["run", "prompts", "positions", "ECE", "AUROC", "Brier"]], {}
    for run, row in drafted:
        figures = row.acceptance.calibration
        if figures is not None:
            scores = (_interval(score, 3) for score in (figures.ece, figures.auroc, figures.brier))
            lines.append([run.name, _cell(row), str(figures.num_positions), *scores])
            scaling = run.description["drafter"].get("confidence_scaling") or {}
            parts = (f"{kind} {' '.join(f'{v:.3g}' for v in values)}" for kind, values in scaling.items())
            applied[run.name] = "scaled by " + ", ".join(parts) if scaling else "the head's own confidences"
    if not applied:
        return "No confidences were reported."
    named = [f"{name}: {words}" if len(applied) > 1 else words for name, words in applied.items()]
    return table(without_single_run(lines)) + "\n\n" + "; ".join(named) + "."


def _settings(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        settings, versions = run.description["settings"], run.description["versions"]
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        listed = ", ".join(f"{name} {value}" for name, value in versions.items())
        lines.append(
            f"* {prefix}target {settings['target_name'] or '(from Python)'}; drafter "
            f"{settings['drafter_name'] or 'none named'}; {listed}; commit {run.description['commit'] or 'unknown'}."
        )
        lines += [f"* {prefix}{line}." for line in dict.fromkeys(describe_settings(row) for row in run.rows)]
    return "\n".join(lines)


def write_results(folder: Path, comparison: Comparison) -> None:
    """Write results.json: all figures of the runs, the settings that they hold for, and the versions of the code.

    `rows` and `macro_means` name their run; `comparison` holds what differs between the runs and what was allowed to;
    `timing` is that of the requests which this process ran, and is not part of the rows.
    """
    runs = comparison.runs
    results: dict[str, Any] = {
        "runs": [{"name": run.name, "description": run.description} for run in runs],
        "comparison": {
            "compared": comparison.compared if len(runs) > 1 else None,
            "allowed": list(comparison.allowed),
            "fields": {name: list(values) for name, values in comparison.fields.items()},
            "differences": paired_differences(runs),
        },
        "rows": [{"run": run.name, **row.to_dict()} for run in runs for row in run.rows],
        "domain_rows": [{"run": run.name, **row.to_dict()} for run in runs for row in run.domain_rows],
        "macro_means": [{"run": run.name, **asdict(row)} for run in runs for row in run.macro_rows],
        "timing": [
            {"run": run.name, "dataset": dataset, "temperature": temperature, **timing.to_dict()}
            for run in runs
            for (dataset, temperature), timing in run.timings.items()
        ],
    }
    write_json(folder / RESULTS_FILE, results)


def write_report(folder: Path, comparison: Comparison) -> str | None:
    """Write results.json, report.md and the plots into a folder, which is made if needed.

    Returns:
        None, or why there are no plots; the page says it too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, comparison)
    remark = None if plots_available() else HOW_TO_GET
    plots = draw_plots(folder, comparison) if remark is None else {}
    (folder / REPORT_FILE).write_text(render_report(comparison, plots, remark), encoding="utf-8")
    return remark
