"""The plots of a report, as PNG files; needs matplotlib, which the package does not depend on.

    acceptance*.png       by draft position: conditional and unconditional acceptance, and 1 - TV
    reliability*.png      confidence that a prefix survives against the share that did, with the number of positions
    accepted_length*.png  how many drafts a step accepted
    tokens_per_step.png   by data set, for every run and temperature
    runs.png              conditional acceptance by position, the runs of a comparison in one picture

Whiskers are 95% bootstrap intervals over requests, as everywhere in a report. Shares of fewer than `FEWEST` events are
left out of the lines: their resamples hardly differ, and a narrow interval would look like certainty.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
WHISKER = {"capsize": 2.5, "elinewidth": 1.1, "markersize": 4.5, "linewidth": 1.3}


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
        for kind, draw in (
            ("acceptance", _acceptance),
            ("accepted_length", _accepted_length),
            ("reliability", _reliability),
        ):
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


def _whiskers(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray]:
    """Values [n], and [2, n] how far their intervals reach down and up; NaN where undefined."""
    table = np.array([[e.value, e.low, e.high] for e in estimates], dtype=np.float64).reshape(-1, 3)
    value, low, high = table.T
    reach = np.stack([value - low, high - value])
    return value, np.maximum(np.nan_to_num(reach), 0.0)  # one request has no interval; an ECE's may miss its value


def _shown(estimates: Sequence[Estimate], enough: Sequence[bool]) -> list[Estimate]:
    return [estimate if ok else Estimate(None) for estimate, ok in zip(estimates, enough, strict=True)]


def _line(axes: Any, x: np.ndarray, estimates: Sequence[Estimate], colour: str, **options: Any) -> Any:
    value, reach = _whiskers(estimates)
    return axes.errorbar(x, value, reach, color=colour, **WHISKER, **options)


def _panels(count: int, num_groups: int = 1) -> tuple[Any, list[list[Any]]]:
    """A figure with `num_groups` groups of `count` panels, each group in rows of at most `MOST_COLUMNS`."""
    columns = min(count, MOST_COLUMNS)
    rows = math.ceil(count / columns)
    width, height = (2.9, 2.5) if count > 1 else (5.0, 2.7)
    figure, grid = _figure(rows * num_groups, columns, width, height, sharey=True)
    groups = [part.ravel().tolist() for part in np.split(grid, num_groups)]
    for group in groups:
        for unused in group[count:]:
            unused.set_axis_off()
    return figure, [group[:count] for group in groups]


def _legend(figure: Any, panels: Iterable[Any]) -> None:
    """One legend above all panels, in as many columns as fit."""
    handles: dict[str, Any] = {}
    for axes in panels:
        found = axes.get_legend_handles_labels()
        handles |= dict(zip(found[1], found[0], strict=True))
    if handles:
        inches = 0.5 + 0.07 * max(map(len, handles))
        columns = max(1, min(len(handles), int(figure.get_figwidth() / inches)))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)


def _grid_of_cells(runs: Sequence[Run], draw: Callable[[Any, str, float], None]) -> Any:
    """Panels by draft position: a group per temperature, a panel per data set; one legend above.

    A single data set has its temperatures side by side.
    """
    cells = list(dict.fromkeys(cell for run in runs for cell in run.cells))
    datasets, temperatures = list(dict.fromkeys(d for d, _ in cells)), sorted({t for _, t in cells})
    groups = [[(dataset, t) for dataset in datasets] for t in temperatures]
    if len(datasets) == 1:
        groups = [[cell for group in groups for cell in group]]
    figure, panels = _panels(len(groups[0]), len(groups))
    for row, group in zip(panels, groups, strict=True):
        for axes, (dataset, temperature) in zip(row, group, strict=True):
            axes.set_title(f"{dataset}, temperature {temperature:g}")
            draw(axes, dataset, temperature)
    for axes in panels[-1]:
        axes.set_xlabel("draft position")
    _legend(figure, (axes for row in panels for axes in row))
    return figure


def _row(run: Run, dataset: str, temperature: float) -> ResultRow | None:
    return next((row for row in run.rows if (row.dataset, row.temperature) == (dataset, temperature)), None)


def _position_axis(axes: Any, depth: int) -> np.ndarray:
    axes.set_xticks(np.arange(1, depth + 1))
    axes.set_xlim(0.5, depth + 0.5)
    axes.set_ylim(0, 1.02)
    return np.arange(1, depth + 1, dtype=np.float64)


def _acceptance(run: Run) -> Any:
    def draw(axes: Any, dataset: str, temperature: float) -> None:
        row = _row(run, dataset, temperature)
        if row is None or not row.acceptance.positions:
            return
        positions = row.acceptance.positions
        x = _position_axis(axes, len(positions))
        reached = [r.num_reached >= FEWEST for r in positions]
        conditional, expected = ([getattr(r, name) for r in positions] for name in ("conditional", "expected"))
        _line(axes, x, _shown(conditional, reached), COLOURS[0], fmt="o-", label="conditional")
        if any(estimate.value is not None for estimate in expected):  # a server does not report it
            shown = _shown(expected, reached)
            _line(axes, x + 0.16, shown, COLOURS[1], fmt="D", mfc="white", label="expected, 1 − TV")
        unconditional = [r.unconditional for r in positions]
        _line(axes, x, unconditional, COLOURS[2], fmt="s-", label="unconditional")

    figure = _grid_of_cells([run], draw)
    figure.supylabel("share accepted", fontsize=9)
    return figure


def _runs(runs: Sequence[Run]) -> Any:
    def draw(axes: Any, dataset: str, temperature: float) -> None:
        rows = [_row(run, dataset, temperature) for run in runs]
        depth = max((len(row.acceptance.positions) for row in rows if row is not None), default=0)
        x = _position_axis(axes, max(depth, 1))
        for i, (run, row) in enumerate(zip(runs, rows, strict=True)):
            if row is not None and row.acceptance.positions:
                reached = [r.num_reached >= FEWEST for r in row.acceptance.positions]
                estimates = _shown([r.conditional for r in row.acceptance.positions], reached)
                shift = (i - (len(runs) - 1) / 2) * 0.12
                colour = COLOURS[i % len(COLOURS)]
                _line(axes, x[: len(estimates)] + shift, estimates, colour, fmt="o-", label=run.name)

    figure = _grid_of_cells(runs, draw)
    figure.supylabel("share accepted of those reached", fontsize=9)
    return figure


def _accepted_length(run: Run) -> Any:
    datasets = list(dict.fromkeys(dataset for dataset, _ in run.cells))
    figure, (panels,) = _panels(len(datasets))
    for axes, dataset in zip(panels, datasets, strict=True):
        rows = [row for row in run.rows if row.dataset == dataset and row.acceptance.accepted_shares]
        depth = max((len(row.acceptance.positions) for row in rows), default=0)
        for i, (row, x, width) in enumerate(_bar_places(rows, np.arange(depth + 1))):
            value, reach = _whiskers(row.acceptance.accepted_shares)
            n = len(value)
            label = f"temperature {row.temperature:g}"
            _bars(axes, x[:n], value, reach, width, COLOURS[i % len(COLOURS)], label)
        axes.set_title(dataset)
        axes.set_xticks(np.arange(depth + 1))
        axes.set_xlabel("drafts accepted in a step")
        axes.grid(visible=False, axis="x")
    figure.supylabel("share of steps", fontsize=9)
    _legend(figure, panels)
    return figure


def _tokens_per_step(runs: Sequence[Run]) -> Any:
    """A panel per temperature with a bar per run; with one run a single panel with a bar per temperature."""
    temperatures = sorted({temperature for run in runs for _, temperature in run.cells})
    datasets = list(dict.fromkeys(dataset for run in runs for dataset, _ in run.cells))
    ticks = [*datasets, "mean of sets"] if len(datasets) > 1 else datasets
    if len(runs) == 1:
        panels = {"": [(f"temperature {t:g}", runs[0], t) for t in temperatures]}
    else:
        panels = {f"temperature {t:g}": [(run.name, run, t) for run in runs] for t in temperatures}
    num_bars = max(len(series) for series in panels.values()) * len(ticks)
    figure, axes_list = _figure(1, len(panels), min(max(3.2, 0.55 * num_bars), 9.0), 2.9, sharey=True)
    for axes, (title, series) in zip(axes_list[0], panels.items(), strict=True):
        for i, ((label, run, temperature), x, width) in enumerate(_bar_places(series, np.arange(len(ticks)))):
            value, reach = _whiskers([_tokens(run, dataset, temperature) for dataset in ticks])
            _bars(axes, x, value, reach, width, COLOURS[i % len(COLOURS)], label)
            for place, height, up in zip(x, value, reach[1], strict=True):
                if not np.isnan(height):
                    axes.annotate(
                        f"{height:.2f}", (place, height + up), (0, 2), textcoords="offset points", ha="center",
                        fontsize=7.5,
                    )  # fmt: skip
        axes.set_title(title)
        axes.set_xticks(np.arange(len(ticks)), ticks)
        if len(ticks) == 1:  # a single bar would fill the panel
            axes.set_xlim(-1, 1)
        axes.grid(visible=False, axis="x")
        axes.axhline(1.0, color=GREY, linewidth=1, linestyle=":")  # plain decoding
    axes_list[0][0].set_ylabel("tokens per step")
    _legend(figure, axes_list[0])
    return figure


def _tokens(run: Run, dataset: str, temperature: float) -> Estimate:
    row = _row(run, dataset, temperature)
    if row is not None:
        return row.acceptance.tokens_per_step
    macro = [mean for mean in run.macro_rows if mean.temperature == temperature] if dataset == "mean of sets" else []
    return macro[0].tokens_per_step if macro else Estimate(None)


def _bar_places(series: Sequence[Any], ticks: np.ndarray) -> Iterable[tuple[Any, np.ndarray, float]]:
    """Each of a group's series with the places of its bars beside each tick, and their width."""
    width = 0.8 / max(len(series), 1)
    for i, one in enumerate(series):
        yield one, ticks + (i - (len(series) - 1) / 2) * width, width


def _bars(
    axes: Any, x: np.ndarray, value: np.ndarray, reach: np.ndarray, width: float, colour: str, label: str
) -> None:
    axes.bar(x, value, width * 0.92, color=colour, label=label)
    axes.errorbar(x, value, reach, fmt="none", ecolor="#333333", elinewidth=1.0, capsize=2)


def _reliability(run: Run) -> Any:
    """A diagram per temperature, over a histogram of where the confidences are; a line per data set."""
    rows = [row for row in run.rows if row.acceptance.calibration is not None]
    if not rows:
        return None
    temperatures = sorted({row.temperature for row in rows})
    figure, panels = _figure(
        2, len(temperatures), 3.6, 2.3, sharex=True, sharey="row", gridspec_kw={"height_ratios": (3.2, 1)}
    )
    for (axes, counts), temperature in zip(panels.T, temperatures, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        here = [row for row in rows if row.temperature == temperature]
        for i, row in enumerate(here):
            calibration, colour = row.acceptance.calibration, COLOURS[i % len(COLOURS)]
            bins = [b for b in calibration.bins if b.num_positions >= FEWEST]
            x = np.array([b.mean_survival for b in bins])
            label = f"{row.dataset}, ECE {calibration.ece.value:.3f}"
            _line(axes, x, [b.accepted for b in bins], colour, fmt="o-", label=label)
            edges = np.array([b.low for b in calibration.bins])
            shares = np.array([b.num_positions for b in calibration.bins]) / calibration.num_positions
            width = 0.1 * 0.9 / len(here)
            counts.bar(edges + 0.05 + (i - (len(here) - 1) / 2) * width, shares, width, color=colour)
        axes.set_title(f"temperature {temperature:g}")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.legend(loc="upper left", fontsize=8)
        counts.set_xlabel("confidence that the prefix survives")
        counts.grid(visible=False, axis="x")
    panels[0][0].set_ylabel("share of prefixes accepted")
    panels[1][0].set_ylabel("share of positions")
    return figure
