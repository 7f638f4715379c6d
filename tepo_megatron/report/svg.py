"""Convert matplotlib figures to SVG for a page: in its colours, with the values that it lists at the pointer."""

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

# the page's style sheet gives each variable a value for light and for dark mode
VARIABLES = {
    INK: "ink", MUTED: "muted", GREY: "grey", GRID: "grid", BLUE: "blue", ORANGE: "orange", GREEN: "green", PURPLE: "purple",
    RED: "red",
}  # fmt: skip
DIGITS = 4  # significant digits of listed values


def css_color(color: Any) -> str:
    """Return a colour of `drawing` as the page's CSS variable, and any other colour as its hex code."""
    code = to_hex(color)
    return f"var(--{VARIABLES[code]})" if code in VARIABLES else code


def to_svg(figure: Figure, name: str) -> str:
    """Return one <svg> element that fills the width of its container."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style\b.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg\b[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 aria-hidden="true">', text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # no reference to a group needs its id
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # so that the page's font applies
    text = re.sub(r"\n\s*", "\n", text)
    for code, variable in VARIABLES.items():
        text = text.replace(code, f"var(--{variable})")
    return text


def listed(figure: Figure) -> list[dict[str, Any]]:
    """Return, for each axes of the figure, what the page needs to list values at the pointer.

    `box` is its place in the figure (left, top, right, bottom, as shares), `limits` the steps at its ends, `percent` whether
    values are shares. `series` lists its curves: label, colour, steps (x) and values (y; several rows for the edges of a band),
    null for a gap.
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
            row["y"].append(rounded(line.get_ydata()))
    for patch in axis.patches:
        if isinstance(patch, StepPatch):
            top, edges, bottom = patch.get_data()
            row = {"label": patch.get_label(), "color": css_color(patch.get_facecolor()), "y": [rounded(top - bottom)]}
            series[row["label"]] = row | {"x": ((edges[:-1] + edges[1:]) / 2).tolist()}
    return {
        "box": [round(float(share), 4) for share in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)],
        "limits": [float(limit) for limit in axis.get_xlim()],
        "percent": axis.yaxis.get_major_formatter() is PERCENT,
        "series": list(series.values()),
    }


def rounded(values: Any) -> list[float | None]:
    """Return the values for JSON, rounded to DIGITS significant digits; null for NaN."""
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in np.asarray(values, dtype=float).tolist()]
