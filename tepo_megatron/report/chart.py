"""Charts as data. `templates/plots.js` draws them on every page, `write.py` in report.png.

Letters in shapes: P points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tepo_megatron.report.run import Curves

# variables of style.css, which has a value of each for light and for dark mode
INK, MUTED, GREY = "ink", "muted", "grey"
BLUE, ORANGE, GREEN, PURPLE, RED = "blue", "orange", "green", "purple", "red"
DIGITS = 4  # significant digits of a value on a page


@dataclass(frozen=True)
class Series:
    """One curve of an axis."""

    # `line`; `band` (two rows: its edges); `bar` (two rows: its ends); `points` (three rows: value, and the ends of its error
    # bar)
    kind: str
    label: str  # name in the legend; "": in none
    color: str
    x: np.ndarray  # horizontal values, ascending, float64 _P
    rows: Sequence[np.ndarray]  # vertical values, each float64 _P; NaN for a gap
    dash: str = "-"  # as matplotlib writes it
    width: float = 1.6
    opacity: float = 1.0


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line across an axis: a limit if it has a label, otherwise a value to compare with."""

    y: float
    color: str = MUTED
    label: str = ""


@dataclass(frozen=True)
class ChartAxis:
    """A vertical axis with its curves."""

    series: Sequence[Series]
    rules: Sequence[ReferenceLine] = ()
    format: str = ""  # how values are written: `percent`, `small`, or "" for plainly
    scale: str = "linear"  # `linear`, `log`, or `symlog`, which is linear within +-`linear` and reaches +-`extreme`
    linear: float = 0.0
    extreme: float = 0.0
    # The axis starts at 0, ends a little above the data, and reaches at least this. None: it fits the data.
    least: float | None = None
    across: bool = False  # values lie on a horizontal axis, each series in a row with its label. Only pages draw this.

    @property
    def limits(self) -> list[float] | None:
        """Ends of the axis; None if it fits the data."""
        if self.scale == "symlog":
            return [-1.3 * self.extreme, 1.3 * self.extreme]
        if self.least is None:
            return None
        values = np.concatenate([row for series in self.series for row in series.rows])
        top = float(values[np.isfinite(values)].max(initial=0.0))
        return [0.0, max(1.1 * top, self.least) or 1.0]


@dataclass(frozen=True)
class Chart:
    """Axes below each other, under one title, with a sentence on how to read them."""

    title: str
    caption: str
    axes: Sequence[ChartAxis]

    def plain(self, xs: list[np.ndarray]) -> dict[str, Any]:
        """Return the chart as JSON. Its series name their horizontal values by index in `xs`, to which new ones are added."""
        return {"title": self.title, "caption": self.caption, "axes": [_axis(axis, xs) for axis in self.axes]}


def line(curves: Curves, values: str | np.ndarray, color: str, label: str) -> Series:
    """Return a curve of one value per step, or of the key that holds them."""
    return Series("line", label, color, curves.steps, [curves[values] if isinstance(values, str) else values])


def band(curves: Curves, low: np.ndarray, high: np.ndarray, color: str, label: str) -> Series:
    """Return the area between two curves."""
    return Series("band", label, color, curves.steps, [low, high], opacity=0.6 if color == GREY else 0.22)


def points(results: Sequence[tuple[float, float, float]], color: str, label: str, dash: str = "-") -> list[Series]:
    """Return points with error bars, (step, mean, standard error) of each, and the line through them, which has the label."""
    x, mean, error = np.array(results, dtype=float).reshape(-1, 3).T
    bars = Series("points", "", color, x, [mean, mean - error, mean + error])
    return [bars, Series("line", label, color, x, [mean], dash)]


def on_page(chart: Chart, last_step: float) -> dict[str, Any]:
    """Return a chart as JSON with its own horizontal values, which reach from 0 to `last_step`."""
    xs: list[np.ndarray] = []
    return {**chart.plain(xs), "x": [x.tolist() for x in xs], "end": last_step}


def css_color(color: str) -> str:
    """Return a colour as the page's CSS variable."""
    return f"var(--{color})"


def rounded(values: np.ndarray) -> list[float | None]:
    """Return the values for JSON, rounded to DIGITS significant digits; null for NaN."""
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in np.asarray(values, dtype=float).tolist()]


def _axis(axis: ChartAxis, xs: list[np.ndarray]) -> dict[str, Any]:
    return {
        "scale": axis.scale,
        "linear": axis.linear,
        "format": axis.format,
        "limits": axis.limits,
        "across": axis.across,
        "rules": [{"y": rule.y, "color": css_color(rule.color), "label": rule.label} for rule in axis.rules],
        "series": [_series(series, xs) for series in axis.series],
    }


def _series(series: Series, xs: list[np.ndarray]) -> dict[str, Any]:
    place = next((i for i, x in enumerate(xs) if x is series.x or np.array_equal(x, series.x)), len(xs))
    xs += [series.x] if place == len(xs) else []
    return {
        "kind": series.kind,
        "label": series.label,
        "color": css_color(series.color),
        "dash": series.dash,
        "width": round(series.width, 3),
        "opacity": series.opacity,
        "x": place,
        "y": [rounded(row) for row in series.rows],
    }
