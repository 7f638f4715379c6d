"""Draw `report.png`, the curves of a run as one picture."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tepo_megatron.base.storage import replacing
from tepo_megatron.report import panels
from tepo_megatron.report.chart import Chart, ChartAxis, Series
from tepo_megatron.report.run import RunRecord, facts

# the light colours of style.css; text of a picture is not scaled with a page, so some are lighter here
_COLORS = {
    "ink": "#1f2933", "muted": "#6b7785", "grey": "#c3cad3", "blue": "#2f6fde", "orange": "#e8833a", "green": "#2a9d78",
    "purple": "#8a63d2", "red": "#d64550",
}  # fmt: skip
_STYLE = {
    "font.size": 10, "text.color": _COLORS["ink"], "axes.titlesize": 11.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 22, "axes.edgecolor": _COLORS["grey"], "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "axes.formatter.useoffset": False,
    "grid.color": "#e6e9ee", "xtick.color": _COLORS["muted"], "ytick.color": _COLORS["muted"],
    "lines.solid_capstyle": "round", "legend.frameon": False, "legend.fontsize": 9, "savefig.facecolor": "white",
}  # fmt: skip
_FORMATS = {
    "percent": FuncFormatter(lambda share, _: f"{100 * share:.3g}%"),
    "small": FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"),
}
_PANELS = (
    panels.learning, panels.entropy, panels.ratio, panels.entropy_change, panels.token_shares, panels.constraints,
    panels.updates, panels.sampling, panels.mismatch,
)  # fmt: skip


def write_picture(run: RunRecord) -> Path:
    """Draw the run into its folder; return the picture's path. An older picture is replaced atomically."""
    path = run.folder / "report.png"
    with matplotlib.rc_context(_STYLE), replacing(path, durable=False) as unfinished:
        draw(run).savefig(unfinished, format="png", dpi=130)
    return path


def draw(run: RunRecord) -> Figure:
    """Return the whole figure of a run: nine panels and a strip with the seconds per step; three panels of fine-tuning."""
    if run.fine_tuned:
        figure = Figure(figsize=(15, 4.6))
        grid = figure.add_gridspec(1, 3, left=0.05, right=0.985, top=0.74, bottom=0.11, wspace=0.18)
        cells = [(panel(run), grid[0, place]) for place, panel in enumerate(panels.FINE_TUNING)]
    else:
        figure = Figure(figsize=(15, 13.9))
        grid = figure.add_gridspec(
            4, 3, height_ratios=(1, 1, 1, 0.42), left=0.05, right=0.985, top=0.89, bottom=0.042, hspace=0.4, wspace=0.18
        )
        cells = [(panel(run), grid[place // 3, place % 3]) for place, panel in enumerate(_PANELS)]
        cells.append((panels.seconds(run), grid[3, :]))
    for chart, cell in cells:
        _draw(figure, cell, chart, run.last_step)
    figure.axes[-1].set_xlabel("step")
    _heading(figure, run)
    return figure


def _draw(figure: Figure, cell: SubplotSpec, chart: Chart, last_step: float) -> None:
    grid = cell.subgridspec(len(chart.axes), 1, hspace=0.38)
    for row, axis in enumerate(chart.axes):
        plot = figure.add_subplot(grid[row])
        plot.set_title(chart.title if row == 0 else "")
        plot.tick_params(labelbottom=row == len(chart.axes) - 1)
        _draw_axis(plot, axis)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
        plot.set_xlim(-0.015 * last_step, 0.5 + 1.015 * last_step)
        # one row between title and axes, where it never hides data
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 6}
        plot.legend(**place, borderpad=0, borderaxespad=0.3, handlelength=1.4, columnspacing=1.3)


def _draw_axis(plot: Any, axis: ChartAxis) -> None:
    for series in axis.series:
        _draw_series(plot, series)
    for rule in axis.rules:
        style = {"lw": 1.2, "ls": "--", "label": rule.label} if rule.label else {"lw": 1, "ls": ":"}
        plot.axhline(rule.y, color=_COLORS[rule.color], **style)
    if axis.scale == "log":
        plot.set_yscale("log")
    elif axis.scale == "symlog":
        plot.set_yscale("symlog", linthresh=axis.linear, linscale=0.5)
        least, most = math.ceil(math.log10(axis.linear) - 1e-9), math.floor(math.log10(axis.extreme) + 1e-9)
        powers = [10.0**power for power in range(most, least - 1, -max(1, math.ceil((most - least + 1) / 2)))]
        plot.yaxis.set_major_locator(FixedLocator([-p for p in powers] + [0.0] + powers[::-1]))
        plot.yaxis.set_minor_locator(NullLocator())
        plot.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
    if axis.format:
        plot.yaxis.set_major_formatter(_FORMATS[axis.format])
    if axis.limits is not None:
        plot.set_ylim(axis.limits)


def _draw_series(plot: Any, series: Series) -> None:
    color, x, rows = _COLORS[series.color], series.x, series.rows
    if series.kind == "line":
        plot.plot(x, rows[0], color=color, lw=1.8, marker="o" if len(x) <= 60 else "", ms=3, label=series.label)
    elif series.kind == "band":
        plot.fill_between(x, *rows, color=color, alpha=series.opacity, lw=0, label=series.label)
    elif series.kind == "bar":
        edges = np.concatenate(([x[0] - 0.5], (x[:-1] + x[1:]) / 2, [x[-1] + 0.5]))
        plot.stairs(rows[1], edges, baseline=rows[0], fill=True, color=color, label=series.label)
    else:
        errors = [rows[0] - rows[1], rows[2] - rows[0]]
        plot.errorbar(x, rows[0], errors, fmt="D", color=color, ms=6, capsize=4, lw=1.5, zorder=5, label=series.label)


def _power_of_ten(value: float, _: int) -> str:
    return "0" if value == 0 else f"${'-' if value < 0 else ''}10^{{{round(math.log10(abs(value)))}}}$"


def _heading(figure: Figure, run: RunRecord) -> None:
    """Write name and circumstances on the left; the result, once there is one, on the right."""
    summary, height = run.summary, figure.get_size_inches()[1]
    upper, lower = 1 - 0.49 / height, 1 - 0.78 / height
    muted, blue = _COLORS["muted"], _COLORS["blue"]
    if summary is not None and summary.evaluations:
        result = "  →  ".join(f"{accuracy:.1%} ± {100 * error:.1f}" for _, accuracy, error in summary.evaluations)
        figure.text(0.985, upper, result, fontsize=19, fontweight="bold", ha="right", color=blue)
        when = "before and after" if len(summary.evaluations) > 1 else "after"
        figure.text(0.985, lower, f"evaluation accuracy {when}, ± standard error", fontsize=11, ha="right", color=muted)
    figure.text(0.05, upper, run.cfg.name, fontsize=19, fontweight="bold")
    figure.text(0.05, lower, "  ·  ".join(facts(run)), fontsize=11, color=muted)
