"""The tables and the picture of `benchmarks.mechanisms`, made from the JSON that it writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tepo_megatron.evaluation.statistics import standard_error, student_95
from tepo_megatron.evaluation.tables import NOTHING
from tepo_megatron.report import save_picture
from tepo_megatron.report.comparison import COLORS, DASHES
from tepo_megatron.report.drawing import INK, MUTED, PERCENT, STYLE, from_zero

_BASELINE = "grpo"
_EXPLANATION = """\
Written by `python -m benchmarks.mechanisms` (docs/mechanisms.md). Means over {count} seeds, with 95 % intervals over seeds by
Student's t. Accuracy, entropy (nats, mean over states) and KL (nats per token, to the policy that sampled, mean over updates)
are closed forms. Points: percentage points of accuracy over grpo, paired by seed."""


def markdown(found: Mapping[str, Any]) -> str:
    """Return the predictions with their verdicts, and a table for each regime."""
    parts = ["# Mechanisms of the methods on a small task", _EXPLANATION.format(count=len(found["seeds"]))]
    rows = [["prediction", "regime", "origin", "larger", "smaller", "effect [95 %]", "verdict"]]
    rows += [_prediction(x) for x in found["predictions"]]
    parts += ["## Predictions", _table(rows)]
    for regime, arms in found["runs"].items():
        settings = ", ".join(f"{name} {value:g}" for name, value in found["settings"][regime].items())
        rows = [["method", "accuracy, %", f"points over {_BASELINE}", "entropy", "length", "clipped, %", "masked, %", "KL"]]
        rows += [_arm(name, x["measures"], arms.get(_BASELINE, {}).get("measures")) for name, x in arms.items()]
        start = statistics.fmean(next(iter(arms.values()))["measures"]["start accuracy"])
        parts += [f"## Regime {regime}", f"Start accuracy {100 * start:.1f} %; {settings}.", _table(rows)]
    at = f"Commit {found['commit']}, torch {found['versions']['torch']}."
    return "\n\n".join([*parts, at]) + "\n"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half of the 95 % interval over seeds, by Student's t; the half is 0 for one value."""
    return statistics.fmean(values), student_95(max(1, len(values) - 1)) * (standard_error(values) or 0.0)


def _prediction(x: Mapping[str, Any]) -> list[str]:
    factor = "" if x["factor"] == 1 else f"{x['factor']:g} x "
    (first, measure), (second, other) = x["larger"], x["smaller"]
    sides = f"{first}, {measure}: {x['larger_mean']:.4g}", f"{factor}{second}, {other}: {x['smaller_mean']:.4g}"
    low, high = x["interval"]
    return [x["claim"], x["regime"], x["origin"], *sides, f"{x['effect']:+.4g} [{low:+.4g}, {high:+.4g}]", x["verdict"]]


def _arm(name: str, measures: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]] | None) -> list[str]:
    accuracy, half = interval(measures["accuracy"])
    points = NOTHING
    if baseline is not None and name != _BASELINE:
        paired = [a - b for a, b in zip(measures["accuracy"], baseline["accuracy"], strict=True)]
        points = "{:+.1f} ± {:.1f}".format(*(100 * x for x in interval(paired)))
    means = {key: statistics.fmean(values) for key, values in measures.items()}
    return [
        name, f"{100 * accuracy:.1f} ± {100 * half:.1f}", points, f"{means['entropy']:.3f}", f"{means['length']:.2f}",
        f"{100 * means['clipped']:.2f}", f"{100 * means['masked']:.1f}", f"{means['KL to the old policy']:.4f}",
    ]  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def write_picture(found: Mapping[str, Any], path: Path) -> Path:
    """Draw curves and final accuracies of every regime; return the path."""
    with matplotlib.rc_context(STYLE):
        return save_picture(_figure(found), path)


def _figure(found: Mapping[str, Any]) -> Figure:
    regimes = found["runs"]
    figure = Figure(figsize=(15.0, 0.9 + 5.6 * len(regimes)))
    top = 1 - 0.85 / figure.get_figheight()
    place = {"top": top, "bottom": 0.05, "hspace": 0.24}
    grid = figure.add_gridspec(len(regimes), 2, left=0.05, right=0.6, wspace=0.16, **place)
    right = figure.add_gridspec(len(regimes), 1, left=0.75, right=0.985, **place)
    figure.text(0.05, 1 - 0.4 / figure.get_figheight(), "Mechanisms on a small task", fontsize=19, fontweight="bold")
    for row, (regime, arms) in enumerate(regimes.items()):
        others = [name for name in arms if name != _BASELINE]
        looks = {name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i, name in enumerate(others)}
        looks |= {_BASELINE: (INK, "-")}
        for column, (curve, title) in enumerate({"accuracy": "accuracy", "entropy": "entropy, nats"}.items()):
            axis = figure.add_subplot(grid[row, column])
            axis.set_title(f"{regime}: {title}", pad=8)
            for name, x in arms.items():
                color, dash = looks[name]
                axis.plot(x["curves"][curve], color=color, ls=dash)
            axis.set_xlabel("rollout batches")
            from_zero(axis)
            if curve == "accuracy":
                axis.yaxis.set_major_formatter(PERCENT)
        _accuracies(figure.add_subplot(right[row, 0]), arms, looks)
    return figure


def _accuracies(axis: Any, arms: Mapping[str, Any], looks: Mapping[str, tuple[str, str]]) -> None:
    """Draw the final accuracy of each arm with its interval, and those of single seeds; the names are the legend."""
    for place, (name, x) in enumerate(arms.items()):
        color, dash = looks[name]
        values = x["measures"]["accuracy"]
        mean, half = interval(values)
        axis.plot((mean - half, mean + half), (place, place), color=color, ls=dash, lw=2.4)
        axis.plot(values, np.full(len(values), place + 0.28), "o", color=color, ms=3.5, alpha=0.5, mew=0)
        axis.plot(mean, place, "o", color=color, ms=8, mec="white", mew=1.2, zorder=3)
    axis.axvline(
        statistics.fmean(arms[_BASELINE]["measures"]["accuracy"]) if _BASELINE in arms else 0, color=MUTED, lw=1, ls=":"
    )
    axis.set_yticks(range(len(arms)), arms)
    for label, name in zip(axis.get_yticklabels(), arms, strict=True):
        label.set_color(looks[name][0])
    axis.set_ylim(len(arms) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.xaxis.set_major_formatter(PERCENT)
    axis.set_title("accuracy at the end [95 %]", pad=8)
