"""A figure that records what a panel draws, as JSON that `watch.js` draws in a browser.

The panels of the report draw into it instead of into a figure of matplotlib, which would take a hundred times as long. It has
the part of matplotlib's interface that panels use, with matplotlib's names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tepo_megatron.report.charts import PanelChart
from tepo_megatron.report.drawing import PERCENT, SMALL
from tepo_megatron.report.svg import css_color, rounded

Values = Sequence[float] | np.ndarray


class Abscissas:
    """The horizontal values of a page's curves, each list once."""

    def __init__(self) -> None:
        self._known: list[np.ndarray] = []

    def index(self, x: np.ndarray) -> int:
        """Return the index of a list, which is added if it is new."""
        for place, known in enumerate(self._known):
            if known is x or np.array_equal(known, x):
                return place
        self._known.append(x)
        return len(self._known) - 1

    def plain(self) -> list[list[float | None]]:
        """Return the lists as JSON."""
        return [x.tolist() for x in self._known]


def plot_of(chart: PanelChart, xs: Abscissas) -> dict[str, Any]:
    """Return a chart for `watch.js`: title, caption, and for each axes its scale, rules and series.

    A series is `line`, `band` (two rows of values), `bar` (two rows, its ends) or `points` (three rows: value, and the
    ends of its error bar).
    """
    figure = PlotFigure(xs)
    chart.panel(figure, PlotCell(figure))  # type: ignore[arg-type]
    return {
        "title": figure.axes[0].title,
        "caption": chart.caption,
        "axes": [axis.plain() for axis in figure.axes],
    }


class PlotFigure:
    """The figure: axes from top to bottom."""

    def __init__(self, xs: Abscissas) -> None:
        self.axes: list[PlotAxes] = []
        self._xs = xs

    def add_subplot(self, cell: int) -> "PlotAxes":
        """Add axes below the others, and return them. `cell` is an item of `PlotCell.subgridspec`."""
        self.axes.append(PlotAxes(self._xs))
        return self.axes[-1]


@dataclass(frozen=True)
class PlotCell:
    """The only cell of a figure."""

    figure: PlotFigure

    def subgridspec(self, rows: int, columns: int, hspace: float) -> range:
        """Return the cells of a grid within this one."""
        return range(rows)


class PlotAxis:
    """One axis of axes: how its values are written."""

    def __init__(self) -> None:
        self.format = ""

    def set_major_formatter(self, formatter: Any) -> None:
        """Note how values are written: in percent, as small numbers, or plainly."""
        self.format = "percent" if formatter is PERCENT else "small" if formatter is SMALL else ""

    def set_major_locator(self, locator: Any) -> None:
        """Do nothing: the page chooses its own ticks."""

    set_minor_locator = set_major_locator


class PlotAxes:
    """Axes with their series."""

    def __init__(self, xs: Abscissas) -> None:
        self.title, self._xs = "", xs
        self.yaxis, self.xaxis = PlotAxis(), PlotAxis()
        self._series: list[dict[str, Any]] = []
        self._rules: list[dict[str, Any]] = []
        self._scale: dict[str, Any] = {"scale": "linear"}
        self._limits: Sequence[float] | None = None
        self._top = -math.inf

    @property
    def dataLim(self) -> SimpleNamespace:
        """Return the largest value drawn."""
        return SimpleNamespace(ymax=self._top)

    def set_title(self, title: str) -> None:
        """Set the title."""
        self.title = title

    def plot(self, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
        """Draw a line. The edges of a band, which alone have an alpha, are drawn with the band."""
        self._see(y)
        if "alpha" not in style:
            self._add("line", style.get("gid") or style["label"], style["color"], x, [y], dash=style.get("ls", "-"))

    def fill_between(self, x: np.ndarray, low: Any, high: Any, **style: Any) -> None:
        """Draw a band between two edges."""
        edges = [np.broadcast_to(np.asarray(edge, dtype=float), x.shape) for edge in (low, high)]
        self._see(*edges)
        self._add("band", style["label"], style["color"], x, edges, under=style.get("zorder") is not None)

    def stairs(self, values: np.ndarray, edges: np.ndarray, baseline: np.ndarray, **style: Any) -> None:
        """Draw bars that stand on others."""
        self._see(values)
        self._add("bar", style["label"], style["color"], (edges[:-1] + edges[1:]) / 2, [baseline, values])

    def errorbar(self, x: Values, y: Values, errors: Values, **style: Any) -> None:
        """Draw points with error bars."""
        middle, half = np.asarray(y, dtype=float), np.asarray(errors, dtype=float)
        self._see(middle - half, middle + half)
        self._add("points", style["label"], style["color"], np.asarray(x), [middle, middle - half, middle + half])

    def axhline(self, y: float, **style: Any) -> None:
        """Draw a horizontal rule."""
        rule = {"y": float(y), "color": css_color(style["color"]), "label": style.get("label", "")}
        self._rules.append(rule)

    def set_yscale(self, scale: str, linthresh: float = 0.0, linscale: float = 1.0) -> None:
        """Set the scale of the vertical axis."""
        self._scale = {"scale": scale, "linear": linthresh}

    def set_ylim(self, low: float, high: float) -> None:
        """Set the ends of the vertical axis."""
        self._limits = [float(low), float(high)]

    def legend(self, **style: Any) -> None:
        """Do nothing: the page draws its own legend, grid, ticks and labels."""

    tick_params = grid = legend

    def set_xlabel(self, label: str) -> None:
        """Do nothing: every horizontal axis of the page is in steps."""

    def plain(self) -> dict[str, Any]:
        """Return the axes as JSON."""
        return {
            **self._scale, "format": self.yaxis.format, "limits": self._limits, "rules": self._rules, "series": self._series,
        }  # fmt: skip

    def _see(self, *values: Values) -> None:
        known = np.concatenate([np.asarray(one, dtype=float) for one in values])
        self._top = max(self._top, float(known[np.isfinite(known)].max(initial=-math.inf)))

    def _add(self, kind: str, label: str, color: Any, x: np.ndarray, rows: Sequence[np.ndarray], **more: Any) -> None:
        row: Mapping[str, Any] = {"kind": kind, "label": label, "color": css_color(color), "y": [rounded(y) for y in rows]}
        self._series.append({**row, **more, "x": self._xs.index(x)})
