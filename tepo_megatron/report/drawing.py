"""Shared by all panels: the records as arrays, colours and style, and ways to draw a curve."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tepo_megatron.observability.sinks import Value

INK, MUTED, GREY, GRID = "#1f2933", "#6b7785", "#c3cad3", "#e6e9ee"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2f6fde", "#e8833a", "#2a9d78", "#8a63d2", "#d64550"
STYLE = {
    "font.size": 10, "text.color": INK, "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 22, "axes.edgecolor": GREY, "axes.labelcolor": MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "axes.formatter.useoffset": False, "grid.color": GRID, "xtick.color": MUTED,
    "ytick.color": MUTED, "lines.linewidth": 1.8, "lines.solid_capstyle": "round", "legend.frameon": False,
    "legend.fontsize": 9, "savefig.facecolor": "white",
}  # fmt: skip
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
SMALL = FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0")


class Curves:
    """The records of a run as float64 arrays by key, one value per step; NaN (a gap in the line) at a step without a value."""

    def __init__(self, records: Sequence[dict[str, Value]]) -> None:
        """Store the records, one per step, ascending."""
        self._records = records
        self.steps = self["step"]

    def __getitem__(self, key: str) -> np.ndarray:
        values = [record.get(key) for record in self._records]
        return np.array([math.nan if v is None else float(v) for v in values])

    def __contains__(self, key: str) -> bool:
        """Return whether some step has a value."""
        return any(record.get(key) is not None for record in self._records)

    def named(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix` and have a value at some step."""
        keys = dict.fromkeys(key for record in self._records for key in record if key.startswith(prefix))
        return [key for key in keys if key in self]

    def between(self, key: str) -> np.ndarray:
        """Return a quantity that only some steps measure, interpolated linearly between them; all NaN if no step has it."""
        values = self[key]
        known = np.isfinite(values)
        return np.interp(self.steps, self.steps[known], values[known]) if known.any() else values


def stacked(figure: Figure, cell: SubplotSpec, title: str, rows: int) -> list[Any]:
    """Return axes stacked vertically in one cell of a grid, under one title."""
    grid = cell.subgridspec(rows, 1, hspace=0.38)
    axes = [figure.add_subplot(grid[row]) for row in range(rows)]
    axes[0].set_title(title)
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False)
    return axes


def line(axis: Any, curves: Curves, values: np.ndarray, color: str, label: str) -> None:
    """Draw a curve, and mark its points if there are at most 60."""
    axis.plot(curves.steps, values, color=color, marker="o" if len(values) <= 60 else "", ms=3, label=label)


def band(axis: Any, curves: Curves, low: np.ndarray, high: np.ndarray, color: str, label: str) -> None:
    """Draw the area between two curves, and its edges, whose gid is the label."""
    axis.fill_between(curves.steps, low, high, color=color, alpha=0.2, lw=0, label=label)
    for edge in (low, high):
        axis.plot(curves.steps, edge, color=color, alpha=0.35, lw=0.7, gid=label)


def stack(axis: Any, curves: Curves, layers: Sequence[tuple[str, np.ndarray, str]]) -> None:
    """Draw stacked bars, one per step."""
    middles = (curves.steps[:-1] + curves.steps[1:]) / 2
    edges = np.concatenate(([curves.steps[0] - 0.5], middles, [curves.steps[-1] + 0.5]))
    bottom = np.zeros_like(curves.steps)
    for label, height, color in layers:
        axis.stairs(bottom + height, edges, baseline=bottom, fill=True, color=color, label=label)
        bottom = bottom + height


def steps_along(axis: Any, last: float) -> None:
    """Set the horizontal axis to whole steps from 0 to `last`."""
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
    axis.set_xlim(-0.015 * last, 0.5 + 1.015 * last)


def from_zero(axis: Any, at_least: float = 0.0) -> None:
    """Let the vertical axis range from 0 to a little above the data."""
    top = axis.dataLim.ymax
    top = 1.1 * top if math.isfinite(top) and top > 0 else 0.0
    axis.set_ylim(0, max(top, at_least) or 1)


def symmetric_log(axes: Sequence[Any], linear: float, extreme: float) -> None:
    """Give all `axes` one scale: linear within +-`linear`, logarithmic beyond, with at most two ticks per side."""
    least, most = math.ceil(math.log10(linear) - 1e-9), math.floor(math.log10(extreme) + 1e-9)
    powers = [10.0**power for power in range(most, least - 1, -max(1, math.ceil((most - least + 1) / 2)))]
    for axis in axes:
        axis.set_yscale("symlog", linthresh=linear, linscale=0.5)
        axis.set_ylim(-1.3 * extreme, 1.3 * extreme)
        axis.yaxis.set_major_locator(FixedLocator([-p for p in powers] + [0.0] + powers[::-1]))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))


def legend(*axes: Any) -> None:
    """Place the legend in one row between title and axes, where it never hides data."""
    for axis in axes:
        axis.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=6, borderpad=0, borderaxespad=0.3, handlelength=1.4,
            columnspacing=1.3,
        )  # fmt: skip


def _power_of_ten(value: float, _: int) -> str:
    return "0" if value == 0 else f"${'-' if value < 0 else ''}10^{{{round(math.log10(abs(value)))}}}$"
