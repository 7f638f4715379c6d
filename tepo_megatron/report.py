"""`tepo report`: the curves of a run as one picture, `report.png`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tepo_megatron.config import Config
from tepo_megatron.config_io import load_config
from tepo_megatron.errors import DataError
from tepo_megatron.sinks import Value, read_metrics

# rollout/train log-prob difference that fp32 on the CPU platform stays under when the engine serves the actor's weights
FP32_MEAN_GATE = 1e-5
FP32_MAX_GATE = 1e-3

INK, MUTED, GREY, GRID = "#1f2933", "#6b7785", "#c3cad3", "#e6e9ee"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2f6fde", "#e8833a", "#2a9d78", "#8a63d2", "#d64550"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 22,
    "axes.edgecolor": GREY,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.facecolor": "white",
}
PHASES = (
    ("rollout", BLUE),
    ("reward", ORANGE),
    ("old_stats", PURPLE),
    ("update", GREEN),
    ("sync", RED),
)
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")


class Curves:
    """The records of a run as arrays by name; NaN (a gap in the line) where a step has no value."""

    def __init__(self, records: Sequence[dict[str, Value]]) -> None:
        self._records = records
        self.steps = self["step"]

    def __getitem__(self, key: str) -> np.ndarray:
        values = [record.get(key) for record in self._records]
        return np.array([math.nan if v is None else float(v) for v in values])


@dataclass(frozen=True)
class Summary:
    """summary.json of a finished run. evaluations: (accuracy, standard error) before and after; empty without eval data."""

    steps: int
    seconds: float
    evaluations: list[tuple[float, float]]


def write_report(run_dir: Path) -> Path:
    """Draw the run in `run_dir` (config.yaml, metrics.jsonl, summary.json once it has ended); returns the picture's path.

    The picture replaces an older one in one step. Raises DataError when no step has been recorded or a file is
    malformed, ConfigError when config.yaml is.
    """
    curves = Curves(read_metrics(run_dir))
    cfg = load_config(run_dir / "config.yaml")
    summary = _read_summary(run_dir / "summary.json")
    path = run_dir / "report.png"
    unfinished = path.with_suffix(".png.tmp")
    with matplotlib.rc_context(STYLE):
        figure = draw(curves, cfg, summary)
        figure.savefig(unfinished, format="png", dpi=130)
    os.replace(unfinished, path)
    return path


def draw(curves: Curves, cfg: Config, summary: Summary | None) -> Figure:
    """The whole figure: six panels and a strip of seconds. `summary` is None while the run is under way."""
    figure = Figure(figsize=(15, 10.6))
    grid = figure.add_gridspec(
        3, 3, height_ratios=(1, 1, 0.45), left=0.05, right=0.985, top=0.855, bottom=0.055, hspace=0.42, wspace=0.18
    )  # fmt: skip
    _learning(figure.add_subplot(grid[0, 0]), curves, summary)
    _entropy(figure.add_subplot(grid[0, 1]), curves)
    _ratio(figure.add_subplot(grid[0, 2]), curves)
    left, middle = (grid[1, column].subgridspec(2, 1, hspace=0.38) for column in (0, 1))
    _constraints(figure.add_subplot(left[0]), figure.add_subplot(left[1]), curves)
    _updates(figure.add_subplot(middle[0]), figure.add_subplot(middle[1]), curves)
    _mismatch(figure.add_subplot(grid[1, 2]), curves, cfg.platform == "cpu" and cfg.model.precision == "fp32")
    _seconds(figure.add_subplot(grid[2, :]), curves)
    last = max(cfg.training.steps, curves.steps[-1])
    for axis in figure.axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
        axis.set_xlim(-0.015 * last, 0.5 + 1.015 * last)
    _heading(figure, curves, cfg, summary)
    return figure


def _heading(figure: Figure, curves: Curves, cfg: Config, summary: Summary | None) -> None:
    """Name and circumstances on the left; the result, once there is one, on the right."""
    sizes = {name: getattr(cfg.parallel, name) for name in ("dp", "tp", "pp", "vpp", "cp", "ep")}
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"
    progress = f"step {curves.steps[-1]:.0f} of {cfg.training.steps}"
    if summary is not None:
        progress = f"{summary.steps} steps in {_duration(summary.seconds)}"
    if summary is not None and summary.evaluations:
        result = "  →  ".join(f"{accuracy:.1%} ± {100 * error:.1f}" for accuracy, error in summary.evaluations)
        figure.text(0.985, 0.954, result, fontsize=19, fontweight="bold", ha="right", color=BLUE)
        caption = "evaluation accuracy before and after, ± standard error"
        figure.text(0.985, 0.927, caption, fontsize=11, ha="right", color=MUTED)
    facts = (
        cfg.objective.name,
        Path(cfg.model.path).name,
        layout,
        f"{cfg.platform} {cfg.model.precision}",
        progress,
    )
    figure.text(0.05, 0.954, cfg.name, fontsize=19, fontweight="bold")
    figure.text(0.05, 0.927, "  ·  ".join(facts), fontsize=11, color=MUTED)


def _learning(axis: Any, curves: Curves, summary: Summary | None) -> None:
    axis.set_title("Reward and accuracy")
    reward, accuracy = curves["reward/mean"], curves["accuracy/mean"]
    if np.array_equal(reward, accuracy, equal_nan=True):
        _line(axis, curves, accuracy, BLUE, "rollouts: reward = accuracy")
    else:
        _line(axis, curves, reward, ORANGE, "rollouts: reward")
        _line(axis, curves, accuracy, BLUE, "accuracy")
    if summary is not None and summary.evaluations:
        means, errors = zip(*summary.evaluations, strict=True)
        axis.errorbar(
            (0, summary.steps), means, errors, fmt="D", color=INK, ms=6, capsize=4, lw=1.5, zorder=5, label="evaluation"
        )  # fmt: skip
    axis.yaxis.set_major_formatter(PERCENT)
    _legend(axis)


def _entropy(axis: Any, curves: Curves) -> None:
    axis.set_title("Entropy")
    _line(axis, curves, curves["actor/entropy"], PURPLE, "mean over response tokens, nats")
    _from_zero(axis)
    _legend(axis)


def _ratio(axis: Any, curves: Curves) -> None:
    axis.set_title("Ratio w to the old policy")
    low, middle, high = (curves[f"tepo/ratio_p{q}"] for q in ("01", "50", "99"))
    _line(axis, curves, middle, GREEN, "median")
    axis.fill_between(curves.steps, low, high, color=GREEN, alpha=0.2, lw=0, label="1st to 99th percentile")
    axis.axhline(1, color=MUTED, lw=1, ls=":")
    _legend(axis)


def _constraints(top: Any, bottom: Any, curves: Curves) -> None:
    top.set_title("Clipping and KL")
    _line(top, curves, curves["tepo/kl_mask_share"], GREEN, "tokens under the KL mask")
    _line(top, curves, curves["loss/clip_fraction"], RED, "tokens clipped")
    top.yaxis.set_major_formatter(PERCENT)
    _from_zero(top)
    _line(bottom, curves, curves["loss/kl"], BLUE, "KL term, nats per token")
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))
    top.tick_params(labelbottom=False)
    _legend(top)
    _legend(bottom)


def _updates(top: Any, bottom: Any, curves: Curves) -> None:
    top.set_title("Gradient norm and response length")
    _line(top, curves, curves["actor/grad_norm"], ORANGE, "gradient norm before clipping")
    _from_zero(top)
    _line(bottom, curves, curves["rollout/response_tokens_mean"], BLUE, "mean response, tokens")
    top.tick_params(labelbottom=False)
    _legend(top)
    _legend(bottom)


def _mismatch(axis: Any, curves: Curves, gated: bool) -> None:
    axis.set_title("Rollout/train log-prob difference, nats")
    for name, color, gate in (("max", ORANGE, FP32_MAX_GATE), ("mean", BLUE, FP32_MEAN_GATE)):
        values = curves[f"rollout/logprob_diff_{name}"]
        _line(axis, curves, np.where(values > 0, values, math.nan), color, name)  # 0 has no place on a log scale
        if gated:
            axis.axhline(gate, color=color, lw=1.2, ls="--", label=f"limit {gate:g}")
    axis.set_yscale("log")
    _legend(axis)


def _seconds(axis: Any, curves: Curves) -> None:
    axis.set_title("Seconds per step")
    width = 0.85 if len(curves.steps) <= 150 else 1.0  # gaps between many bars only flicker
    bottom = np.zeros_like(curves.steps)
    for phase, color in PHASES:
        seconds = np.nan_to_num(curves[f"seconds/{phase}"])
        axis.bar(curves.steps, seconds, width, bottom, color=color, label=phase.replace("_", " "))
        bottom = bottom + seconds
    rest = np.clip(np.nan_to_num(curves["seconds/total"]) - bottom, 0, None)
    axis.bar(curves.steps, rest, width, bottom, color=GREY, label="other")
    axis.grid(axis="x", visible=False)
    axis.set_xlabel("step")
    _legend(axis)


def _line(axis: Any, curves: Curves, values: np.ndarray, color: str, label: str) -> None:
    """A line, with its points marked while they are few."""
    axis.plot(curves.steps, values, color=color, marker="o" if len(values) <= 60 else "", ms=3, label=label)


def _from_zero(axis: Any) -> None:
    top = axis.dataLim.ymax
    axis.set_ylim(0, 1.1 * top if math.isfinite(top) and top > 0 else 1)


def _legend(axis: Any) -> None:
    """One row between title and axes, where it never hides data."""
    axis.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=6, borderpad=0, borderaxespad=0.3, handlelength=1.4, columnspacing=1.3
    )  # fmt: skip


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _read_summary(path: Path) -> Summary | None:
    """None while the run is under way."""
    if not path.exists():
        return None
    try:
        row = json.loads(path.read_text())
        measured = [when for when in ("before", "after") if row[f"accuracy_{when}"] is not None]
        evaluations = [(row[f"accuracy_{when}"], row["standard_error"][when] or 0.0) for when in measured]
        return Summary(row["steps"], row["seconds"], evaluations)
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise DataError(f"{path}: not the summary of a run ({e!r}); remove it to draw the curves alone") from None
