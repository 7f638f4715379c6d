"""A matplotlib figure as SVG to stand inside a page: its colours are the page's, and what lies under the pointer is listed."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from tepo_megatron.report.drawing import BLUE, GREEN, GREY, GRID, INK, MUTED, ORANGE, PERCENT, PURPLE, RED

# the page's style sheet gives each a value for light and for dark
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GREY: "grey",
    GRID: "grid",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    PURPLE: "purple",
    RED: "red",
}
DIGITS = 4  # of the values that are listed


def css_color(color: Any) -> str:
    """A colour of `drawing` as the page's variable, any other as it is."""
    code = to_hex(color)
    return f"var(--{VARIABLES[code]})" if code in VARIABLES else code


def to_svg(figure: Figure, name: str) -> str:
    """One <svg> element of the width of what holds it. name: keeps its ids apart from those of the page's other figures."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style\b.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg\b[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 aria-hidden="true">', text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to a group
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the page's own
    text = re.sub(r"\n\s*", "\n", text)
    for code, variable in VARIABLES.items():
        text = text.replace(code, f"var(--{variable})")
    return text


def listed(figure: Figure) -> list[dict[str, Any]]:
    """For each axes of the figure: its box in it (left, top, right, bottom, as shares), the steps at its ends, whether it is in
    percent, and its series: label, colour, steps (x) and values (y; several where a band has edges), null for a gap.
    """
    return [_listed(axis) for axis in figure.axes]


def _listed(axis: Any) -> dict[str, Any]:
    box = axis.get_position()
    series: dict[str, dict[str, Any]] = {}
    for line in axis.lines:
        label = line.get_gid() or line.get_label()
        if not label.startswith("_") and line.get_transform() == axis.transData:
            row = series.setdefault(label, {"label": label, "color": css_color(line.get_color()), "y": []})
            row["x"] = np.asarray(line.get_xdata()).tolist()
            row["y"].append(_plain(line.get_ydata()))
    for patch in axis.patches:
        if isinstance(patch, StepPatch):
            top, edges, bottom = patch.get_data()
            row = {"label": patch.get_label(), "color": css_color(patch.get_facecolor()), "y": [_plain(top - bottom)]}
            series[row["label"]] = row | {"x": ((edges[:-1] + edges[1:]) / 2).tolist()}
    return {
        "box": [round(float(share), 4) for share in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)],
        "limits": [float(limit) for limit in axis.get_xlim()],
        "percent": axis.yaxis.get_major_formatter() is PERCENT,
        "series": list(series.values()),
    }


def _plain(values: Any) -> list[float | None]:
    """For JSON, rounded to DIGITS digits."""
    numbers = np.asarray(values, dtype=float).tolist()
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in numbers]
