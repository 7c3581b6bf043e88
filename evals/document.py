"""report.md: every figure of one run or of several, with its interval, as a page that reads without the program."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.evals.acceptance import Acceptance
from dspark.evals.compare import Comparison, Difference, Run
from dspark.evals.plots import FEWEST
from dspark.evals.report import MISSING, describe_settings, number
from dspark.evals.rows import MacroRow, ResultRow
from dspark.evals.stats import LEVEL, Estimate

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


def render_report(
    comparison: Comparison, differences: Sequence[Difference], plots: Mapping[str, Sequence[str]], remark: str | None
) -> str:
    """The page as Markdown.

    Args:
        comparison: the runs.
        differences: what `paired_differences` gives for them.
        plots: file names by kind, as `draw_plots` gives them; empty without plots.
        remark: why there are no plots, None if there are.
    """
    runs = comparison.runs
    several = len(runs) > 1
    parts = ["# Acceptance" + (": " + " against ".join(run.name for run in runs) if several else "")]
    parts.append(
        f"Figures with their {LEVEL:.0%} bootstrap intervals over requests in brackets; definitions at the end. "
        "All of it, with the settings in full, is in results.json."
    )
    if remark is not None:
        parts.append(f"Plots were not drawn: {remark}.")
    if several:
        parts += ["## Compared", _compared(comparison)]
    parts += ["## Tokens per step", _images(plots, "tokens_per_step"), _summary(runs)]
    if differences:
        parts += [f"Against {runs[0].name}, on the same requests:", _differences(differences)]
    if any(run.domain_rows for run in runs):
        parts += ["By domain of the prompts:", _domains(runs)]
    drafted = [(run, row) for run in runs for row in run.rows if row.acceptance.positions]
    if drafted:
        parts += ["## Acceptance by draft position", _images(plots, "runs"), _images(plots, "acceptance")]
        parts.append(_agreement(row for _, row in drafted))
        if any(plots.values()):
            parts.append(f"The plots leave out conditional rates of positions that fewer than {FEWEST} steps reached.")
        for run, row in drafted:
            parts += [f"**{_cell(run, row, several)}**", _positions(row.acceptance)]
        parts += ["## Accepted length", _images(plots, "accepted_length"), _lengths(drafted, several)]
    scored = [(run, row) for run, row in drafted if row.acceptance.calibration is not None]
    if scored:
        parts += ["## Calibration of the confidence", _images(plots, "reliability"), _calibration(scored, several)]
    elif drafted:
        parts += ["## Calibration of the confidence", "No confidences were reported."]
    parts += ["## What was run", _settings(runs), "## Definitions", DEFINITIONS]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _interval(estimate: Estimate, digits: int = 2) -> str:
    return number(estimate, digits, interval=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _images(plots: Mapping[str, Sequence[str]], kind: str) -> str:
    return "\n".join(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots.get(kind, ()))


def _compared(comparison: Comparison) -> str:
    names = [run.name for run in comparison.runs]
    rows = [(name, *(_value(value) for value in values)) for name, values in comparison.fields.items()]
    lines = [f"The runs differ in {comparison.compared}."]
    if rows:
        lines.append(table(["setting", *names], rows))
    return "\n\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(_value(v) for v in value) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _cell(run: Run, row: ResultRow, several: bool) -> str:
    return (f"{run.name}: " if several else "") + f"{row.dataset}, temperature {row.temperature:g}"


def _summary(runs: Sequence[Run]) -> str:
    header = ["run", "prompts", "temperature", "requests", "steps", "tokens per step", "per request", "acceptance rate",
              "ECE", "loops"]  # fmt: skip
    lines = []
    for run in runs:
        for row in run.rows:
            lines.append([run.name, row.dataset, f"{row.temperature:g}", *_figures(row)])
        for macro in run.macro_rows:
            lines.append([run.name, f"*mean of {len(macro.datasets)} sets*", f"{macro.temperature:g}", *_means(macro)])
    first = 0 if len(runs) > 1 else 1
    return table(header[first:], [line[first:] for line in lines])


def _figures(row: ResultRow) -> list[str]:
    figures = row.acceptance
    return [
        str(figures.num_requests),
        str(figures.num_steps),
        _interval(figures.tokens_per_step),
        _interval(figures.tokens_per_step_macro),
        _interval(figures.acceptance_rate) if figures.num_offered else row.label,
        _interval(figures.calibration.ece, 3) if figures.calibration else MISSING,
        f"{row.repetition.value:.0%}" if row.repetition.value is not None else MISSING,
    ]


def _means(macro: MacroRow) -> list[str]:
    estimates = (macro.tokens_per_step, macro.tokens_per_step_macro, macro.acceptance_rate)
    return ["", "", *(_interval(estimate) for estimate in estimates), _interval(macro.ece, 3), ""]


def _differences(differences: Sequence[Difference]) -> str:
    rows = [
        (d.run, d.dataset, f"{d.temperature:g}", _interval(d.tokens_per_step), _interval(d.ratio)) for d in differences
    ]
    return table(["run", "prompts", "temperature", "difference in tokens per step", "ratio"], rows)


def _domains(runs: Sequence[Run]) -> str:
    header = ["run", "prompts", "domain", "temperature", "requests", "steps", "tokens per step", "per request",
              "acceptance rate", "ECE", "loops"]  # fmt: skip
    first = 0 if len(runs) > 1 else 1
    lines = [
        [run.name, row.dataset, str(row.domain), f"{row.temperature:g}", *_figures(row)][first:]
        for run in runs
        for row in run.domain_rows
    ]
    return table(header[first:], lines)


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
        f"contain 0. If verification is right, about {LEVEL:.0%} do, fewer where a position has few events."
    )


def _positions(figures: Acceptance) -> str:
    header = ["draft", "offered", "reached", "accepted", "unconditional", "conditional", "1 − TV",
              "realised − expected", "confidence"]  # fmt: skip
    rows = [
        (
            str(r.position + 1), str(r.num_offered), str(r.num_reached), str(r.num_accepted),
            _interval(r.unconditional), _interval(r.conditional), _interval(r.expected), _interval(r.gap, 3),
            _interval(r.confidence),
        )
        for r in figures.positions
    ]  # fmt: skip
    return table(header, rows)


def _lengths(drafted: Sequence[tuple[Run, ResultRow]], several: bool) -> str:
    longest = max(len(row.acceptance.accepted_shares) for _, row in drafted)
    rows = []
    for run, row in drafted:
        shares = [_interval(share) for share in row.acceptance.accepted_shares]
        rows.append([_cell(run, row, several), *shares, *[MISSING] * (longest - len(shares))])
    return "Share of steps by the number of drafts that they accepted:\n\n" + table(
        ["run" if several else "prompts", *map(str, range(longest))], rows
    )


def _calibration(scored: Sequence[tuple[Run, ResultRow]], several: bool) -> str:
    rows = []
    for run, row in scored:
        figures = row.acceptance.calibration
        assert figures is not None
        scores = _interval(figures.ece, 3), _interval(figures.auroc, 3), _interval(figures.brier, 3)
        rows.append((_cell(run, row, several), str(figures.num_positions), *scores))
    temperatures = {
        run.name: run.description["drafter"].get("confidence_temperatures")
        for run, _ in scored
        if run.description["drafter"]
    }
    applied = [
        f"{name + ': ' if several else ''}"
        + (
            "the head's own confidences"
            if values is None
            else "scaled by temperatures " + " ".join(f"{v:.3g}" for v in values)
        )
        for name, values in temperatures.items()
    ]
    header = ["run" if several else "prompts", "positions", "ECE", "AUROC", "Brier"]
    return table(header, rows) + "\n\n" + "; ".join(applied) + "."


def _settings(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        settings, versions = run.description["settings"], run.description["versions"]
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        names = (
            f"target {settings['target_name'] or '(from Python)'}; drafter {settings['drafter_name'] or 'none named'}"
        )
        listed = ", ".join(f"{name} {value}" for name, value in versions.items())
        lines.append(f"* {prefix}{names}; {listed}; commit {run.description['commit'] or 'unknown'}.")
        lines += [f"* {prefix}{line}." for line in dict.fromkeys(describe_settings(row) for row in run.rows)]
    return "\n".join(lines)
