"""`tepo report`: the curves of a run as one picture, `report.png`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tepo_megatron.config import Config
from tepo_megatron.config_io import load_config
from tepo_megatron.errors import DataError
from tepo_megatron.report import panels
from tepo_megatron.report.drawing import BLUE, MUTED, STYLE, Curves
from tepo_megatron.sinks import read_metrics

__all__ = ["STYLE", "Curves", "Summary", "draw", "save_picture", "write_report"]

_INCHES = (15, 13.9)


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
    with matplotlib.rc_context(STYLE):
        return save_picture(draw(curves, cfg, summary), run_dir / "report.png")


def save_picture(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, replacing an older one in one step; returns `path`. To be called under STYLE."""
    unfinished = path.with_suffix(".png.tmp")
    figure.savefig(unfinished, format="png", dpi=130)
    os.replace(unfinished, path)
    return path


def draw(curves: Curves, cfg: Config, summary: Summary | None) -> Figure:
    """The whole figure: nine panels and a strip of seconds. `summary` is None while the run is under way."""
    figure = Figure(figsize=_INCHES)
    grid = figure.add_gridspec(
        4, 3, height_ratios=(1, 1, 1, 0.42), left=0.05, right=0.985, top=0.89, bottom=0.042, hspace=0.4, wspace=0.18
    )  # fmt: skip
    evaluations = [] if summary is None else [
        (step, *measured) for step, measured in zip((0, summary.steps), summary.evaluations, strict=False)
    ]  # fmt: skip
    panels.learning(figure, grid[0, 0], curves, evaluations)
    panels.entropy(figure, grid[0, 1], curves)
    panels.ratio(figure, grid[0, 2], curves)
    panels.entropy_change(figure, grid[1, 0], curves)
    panels.token_shares(figure, grid[1, 1], curves)
    panels.constraints(figure, grid[1, 2], curves)
    panels.updates(figure, grid[2, 0], curves)
    panels.sampling(figure, grid[2, 1], curves)
    panels.mismatch(figure, grid[2, 2], curves, gated=cfg.platform == "cpu" and cfg.model.precision == "fp32")
    panels.seconds(figure, grid[3, :], curves)
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
        figure.text(0.985, 0.965, result, fontsize=19, fontweight="bold", ha="right", color=BLUE)
        caption = "evaluation accuracy before and after, ± standard error"
        figure.text(0.985, 0.944, caption, fontsize=11, ha="right", color=MUTED)
    facts = (
        cfg.objective.name,
        Path(cfg.model.path).name,
        layout,
        f"{cfg.platform} {cfg.model.precision}",
        progress,
    )
    figure.text(0.05, 0.965, cfg.name, fontsize=19, fontweight="bold")
    figure.text(0.05, 0.944, "  ·  ".join(facts), fontsize=11, color=MUTED)


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
