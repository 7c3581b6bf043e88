"""The plots of a report, as PNG files; needs matplotlib, which the package does not depend on.

    acceptance*.png       by draft position: conditional and unconditional acceptance, and 1 - TV
    reliability*.png      confidence that a prefix survives against the share that did, with the number of positions
    accepted_length*.png  how many drafts a step accepted
    tokens_per_step.png   by data set, for every run and temperature
    runs.png              conditional acceptance by position, the runs of a comparison in one picture

Whiskers are 95% bootstrap intervals over requests, as everywhere in a report. Shares of fewer than `FEWEST` events are
left out of the lines: their resamples hardly differ, and a narrow interval would look like certainty.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dspark.evals.compare import Comparison, Run
from dspark.evals.rows import ResultRow
from dspark.evals.stats import Estimate

HOW_TO_GET = "matplotlib is not installed; pip install 'dspark[plots]' brings it, and dspark report DIR draws them"
# Okabe and Ito's palette: told apart by colour-blind readers, and in grey by its order of lightness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#888888"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}
FEWEST = 10
MOST_COLUMNS = 4
MARKERS = ("o-", "D--", "s-")
WHISKER = {"capsize": 2.5, "elinewidth": 1.1, "markersize": 4.5, "linewidth": 1.3}
MEAN = "mean of sets"

Series = Mapping[str, Sequence[Estimate]]  # estimates along the x axis, by the label of their line or bars
Panel = tuple[str, Series]  # with its title


def plots_available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_plots(folder: Path, comparison: Comparison) -> dict[str, list[str]]:
    """Draw every plot that the runs have figures for.

    Args:
        folder: where the PNG files go.
        comparison: one run or several.

    Returns:
        File names by kind: tokens_per_step, runs, acceptance, accepted_length, reliability. Empty where nothing was
        drafted, or no confidence was reported.
    """
    import matplotlib

    runs = comparison.runs
    files: dict[str, list[str]] = {}
    with matplotlib.rc_context(STYLE):
        files["tokens_per_step"] = [_save(_tokens_per_step(runs), folder / "tokens_per_step.png")]
        drafted = [run for run in runs if any(row.acceptance.positions for row in run.rows)]
        files["runs"] = [_save(_runs(drafted), folder / "runs.png")] if len(drafted) > 1 else []
        each = {"acceptance": _acceptance, "accepted_length": _accepted_length, "reliability": _reliability}
        for kind, draw in each.items():
            names = [f"{kind}.png" if len(runs) == 1 else f"{kind}-{_slug(run.name)}.png" for run in runs]
            drawn = [(name, draw(run)) for name, run in zip(names, runs, strict=True) if run in drafted]
            files[kind] = [_save(figure, folder / name) for name, figure in drawn if figure is not None]
    return files


def _save(figure: Any, path: Path) -> str:
    figure.savefig(path)
    return path.name


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)


def _figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, np.ndarray]:
    """A figure of panels; made without pyplot, so that nothing opens a window or stays in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns + 0.4, height * rows + 0.6))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _draw(
    rows: Sequence[Sequence[Panel]], draw: Callable[[Any, Series], None], x_label: str, y_label: str, width: float
) -> Any:
    """A figure with a row of panels for each of `rows`, or several where one is long; one legend above all."""
    rows = [row[i : i + MOST_COLUMNS] for row in rows for i in range(0, len(row), MOST_COLUMNS)]
    figure, grid = _figure(len(rows), max(map(len, rows)), width, 2.7, sharey=True)
    handles: dict[str, Any] = {}
    for panels, row in zip(grid, rows, strict=True):
        for axes in panels[len(row) :]:
            axes.set_axis_off()
        for axes, (title, series) in zip(panels, row, strict=False):
            axes.set_title(title)
            draw(axes, series)
            found = axes.get_legend_handles_labels()
            handles |= dict(zip(found[1], found[0], strict=True))
    for axes in grid[-1]:
        axes.set_xlabel(x_label)
    figure.supylabel(y_label, fontsize=9)
    handles = {name: handles[name] for row in rows for _, series in row for name in series if name in handles}
    if handles:
        columns = int(figure.get_figwidth() / (0.5 + 0.07 * max(map(len, handles))))  # as many as fit
        columns = max(1, min(len(handles), columns))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)
    return figure


def _whiskers(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray]:
    """Values [n], and [2, n] how far their intervals reach down and up; NaN where undefined."""
    table = np.array([[e.value, e.low, e.high] for e in estimates], dtype=np.float64).reshape(-1, 3)
    value, low, high = table.T
    reach = np.stack([value - low, high - value])
    return value, np.maximum(np.nan_to_num(reach), 0.0)  # one request has no interval; an ECE's may miss its value


def _lines(axes: Any, series: Series) -> None:
    """A line for each series over draft positions from 1, beside each other so that whiskers do not hide. A series has
    its place, colour and marker in every panel, also where another is empty.
    """
    depth = max(map(len, series.values()), default=1)
    for i, (label, estimates) in enumerate(series.items()):
        if not estimates:
            continue
        x = np.arange(1, len(estimates) + 1) + 0.1 * (i - (len(series) - 1) / 2)
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        axes.errorbar(x, *_whiskers(estimates), color=colour, fmt=marker, label=label, **WHISKER)
    axes.set_xticks(np.arange(1, depth + 1))
    axes.set_xlim(0.5, depth + 0.5)
    axes.set_ylim(0, 1.02)


def _bars(axes: Any, series: Series, written: str = "") -> None:
    """A bar for each series at every tick, from 0; `written` is the form of a number above each, if any. Empty series
    keep their place and colour, as in `_lines`.
    """
    width = 0.8 / max(len(series), 1)
    for i, (label, estimates) in enumerate(series.items()):
        if not estimates:
            continue
        value, reach = _whiskers(estimates)
        x = np.arange(len(value)) + (i - (len(series) - 1) / 2) * width
        axes.bar(x, value, width * 0.92, color=COLOURS[i % len(COLOURS)], label=label)
        axes.errorbar(x, value, reach, fmt="none", ecolor="#333333", elinewidth=1.0, capsize=2)
        for place, height, up in zip(x, value, reach[1], strict=True):
            if written and not np.isnan(height):
                top, text = (place, height + up), written.format(height)
                axes.annotate(text, top, (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(np.arange(max(map(len, series.values()), default=0)))
    axes.grid(visible=False, axis="x")


def _by_position(runs: Sequence[Run], series: Callable[[str, float], Series], y_label: str) -> Any:
    """Panels by draft position: a row per temperature, a panel per data set; of a single data set all in one row."""
    cells = list(dict.fromkeys(cell for run in runs for cell in run.cells))
    datasets, temperatures = list(dict.fromkeys(d for d, _ in cells)), sorted({t for _, t in cells})
    groups = [[(dataset, t) for dataset in datasets] for t in temperatures]
    if len(datasets) == 1:
        groups = [[cell for group in groups for cell in group]]
    rows = [[(f"{dataset}, temperature {t:g}", series(dataset, t)) for dataset, t in group] for group in groups]
    return _draw(rows, _lines, "draft position", y_label, 2.9 if len(cells) > 1 else 5.0)


def _row(run: Run, dataset: str, temperature: float) -> ResultRow | None:
    return next((row for row in run.rows if (row.dataset, row.temperature) == (dataset, temperature)), None)


def _where_reached(row: ResultRow, name: str) -> list[Estimate]:
    """A figure of each position, undefined where few steps reached it."""
    positions = row.acceptance.positions
    return [getattr(rates, name) if rates.num_reached >= FEWEST else Estimate(None) for rates in positions]


def _acceptance(run: Run) -> Any:
    def series(dataset: str, temperature: float) -> Series:
        row = _row(run, dataset, temperature)
        if row is None:
            return {}
        found = {
            "conditional": _where_reached(row, "conditional"),
            "expected, 1 − TV": _where_reached(row, "expected"),
            "unconditional": [rates.unconditional for rates in row.acceptance.positions],
        }
        # A server does not report what it expects.
        return {name: e if any(each.value is not None for each in e) else [] for name, e in found.items()}

    return _by_position([run], series, "share accepted")


def _runs(runs: Sequence[Run]) -> Any:
    def series(dataset: str, temperature: float) -> Series:
        rows = {run.name: _row(run, dataset, temperature) for run in runs}
        return {name: [] if row is None else _where_reached(row, "conditional") for name, row in rows.items()}

    return _by_position(runs, series, "share accepted of those reached")


def _accepted_length(run: Run) -> Any:
    panels: list[Panel] = []
    temperatures = sorted({temperature for _, temperature in run.cells})
    for dataset in dict.fromkeys(dataset for dataset, _ in run.cells):
        rows = {temperature: _row(run, dataset, temperature) for temperature in temperatures}
        shares = {
            f"temperature {t:g}": [] if row is None else row.acceptance.accepted_shares for t, row in rows.items()
        }
        panels.append((dataset, shares))
    width = 2.9 if len(panels) > 1 else 5.0
    return _draw([panels], _bars, "drafts accepted in a step", "share of steps", width)


def _tokens_per_step(runs: Sequence[Run]) -> Any:
    """A panel per temperature with a bar per run; with one run a single panel with a bar per temperature."""
    temperatures = sorted({temperature for run in runs for _, temperature in run.cells})
    datasets = list(dict.fromkeys(dataset for run in runs for dataset, _ in run.cells))
    ticks = [*datasets, MEAN] if len(datasets) > 1 else datasets

    def tokens(run: Run, temperature: float) -> list[Estimate]:
        found = {(MEAN, mean.temperature): mean.tokens_per_step for mean in run.macro_rows}
        found |= {(row.dataset, row.temperature): row.acceptance.tokens_per_step for row in run.rows}
        return [found.get((dataset, temperature), Estimate(None)) for dataset in ticks]

    def draw(axes: Any, series: Series) -> None:
        _bars(axes, series, "{:.2f}")
        axes.set_xticks(np.arange(len(ticks)), ticks)
        if len(ticks) == 1:  # a single bar would fill the panel
            axes.set_xlim(-1, 1)
        axes.axhline(1.0, color=GREY, linewidth=1, linestyle=":")  # plain decoding

    if len(runs) == 1:
        panels: list[Panel] = [("", {f"temperature {t:g}": tokens(runs[0], t) for t in temperatures})]
    else:
        panels = [(f"temperature {t:g}", {run.name: tokens(run, t) for run in runs}) for t in temperatures]
    num_bars = max(len(series) for _, series in panels) * len(ticks)
    return _draw([panels], draw, "", "tokens per step", min(max(3.2, 0.55 * num_bars), 9.0))


def _reliability(run: Run) -> Any:
    """A diagram per temperature, over a histogram of where the confidences are; a line per data set."""
    rows = [row for row in run.rows if row.acceptance.calibration is not None]
    if not rows:
        return None
    temperatures = sorted({row.temperature for row in rows})
    datasets = list(dict.fromkeys(row.dataset for row in rows))  # each has its place and colour in every panel
    figure, panels = _figure(
        2, len(temperatures), 3.6, 2.3, sharex=True, sharey="row", gridspec_kw={"height_ratios": (3.2, 1)}
    )
    for (axes, counts), temperature in zip(panels.T, temperatures, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        for row in (row for row in rows if row.temperature == temperature):
            i = datasets.index(row.dataset)
            calibration, colour = row.acceptance.calibration, COLOURS[i % len(COLOURS)]
            bins = [b for b in calibration.bins if b.num_positions >= FEWEST]
            x = np.array([b.mean_survival for b in bins])
            label = f"{row.dataset}, ECE {calibration.ece.value:.3f}"
            axes.errorbar(x, *_whiskers([b.accepted for b in bins]), color=colour, fmt="o-", label=label, **WHISKER)
            edges = np.array([b.low for b in calibration.bins])
            shares = np.array([b.num_positions for b in calibration.bins]) / calibration.num_positions
            width = 0.1 * 0.9 / len(datasets)
            counts.bar(edges + 0.05 + (i - (len(datasets) - 1) / 2) * width, shares, width, color=colour)
        axes.set_title(f"temperature {temperature:g}")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.legend(loc="upper left", fontsize=8)
        counts.set_xlabel("confidence that the prefix survives")
        counts.grid(visible=False, axis="x")
    panels[0][0].set_ylabel("share of prefixes accepted")
    panels[1][0].set_ylabel("share of positions")
    return figure
