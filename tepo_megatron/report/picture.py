"""Draw `report.png`, the curves of a run as one picture."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from tepo_megatron.report import panels
from tepo_megatron.report.drawing import BLUE, MUTED, STYLE, steps_along
from tepo_megatron.report.run import RunRecord, facts
from tepo_megatron.utils.atomic import replacing

_INCHES = (15, 13.9)


def write_picture(run: RunRecord) -> Path:
    """Draw the run into its folder; return the picture's path. An older picture is replaced atomically."""
    with matplotlib.rc_context(STYLE):
        return save_picture(draw(run), run.folder / "report.png")


def save_picture(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG, replacing an older file atomically; return `path`. Call it under STYLE."""
    with replacing(path, durable=False) as unfinished:
        figure.savefig(unfinished, format="png", dpi=130)
    return path


def draw(run: RunRecord) -> Figure:
    """Return the whole figure of a run: nine panels and a strip with the seconds per step; three panels of fine-tuning."""
    cfg, curves, summary = run.cfg, run.curves, run.summary
    if run.fine_tuned:
        return _fine_tuning(run)
    figure = Figure(figsize=_INCHES)
    grid = figure.add_gridspec(
        4, 3, height_ratios=(1, 1, 1, 0.42), left=0.05, right=0.985, top=0.89, bottom=0.042, hspace=0.4, wspace=0.18
    )  # fmt: skip
    panels.learning(figure, grid[0, 0], curves, [] if summary is None else summary.evaluations)
    panels.entropy(figure, grid[0, 1], curves)
    panels.ratio(figure, grid[0, 2], curves)
    panels.entropy_change(figure, grid[1, 0], curves)
    panels.token_shares(figure, grid[1, 1], curves)
    panels.constraints(figure, grid[1, 2], curves)
    panels.updates(figure, grid[2, 0], curves)
    panels.sampling(figure, grid[2, 1], curves)
    panels.mismatch(figure, grid[2, 2], curves, gated=panels.has_limits(cfg.platform, cfg.model.precision))
    panels.seconds(figure, grid[3, :], curves, cfg.rollout.max_staleness > 0)
    for axis in figure.axes:
        steps_along(axis, run.last_step)
    _heading(figure, run)
    return figure


def _fine_tuning(run: RunRecord) -> Figure:
    figure = Figure(figsize=(15, 4.6))
    grid = figure.add_gridspec(1, 3, left=0.05, right=0.985, top=0.74, bottom=0.11, wspace=0.18)
    for place, panel in enumerate((panels.cross_entropy, panels.gradients, panels.throughput)):
        panel(figure, grid[0, place], run.curves)
    for axis in figure.axes:
        steps_along(axis, run.last_step)
    _heading(figure, run)
    return figure


def _heading(figure: Figure, run: RunRecord) -> None:
    """Write name and circumstances on the left; the result, once there is one, on the right."""
    summary, height = run.summary, figure.get_size_inches()[1]
    upper, lower = 1 - 0.49 / height, 1 - 0.78 / height
    if summary is not None and summary.evaluations:
        result = "  →  ".join(f"{accuracy:.1%} ± {100 * error:.1f}" for _, accuracy, error in summary.evaluations)
        figure.text(0.985, upper, result, fontsize=19, fontweight="bold", ha="right", color=BLUE)
        when = "before and after" if len(summary.evaluations) > 1 else "after"
        figure.text(0.985, lower, f"evaluation accuracy {when}, ± standard error", fontsize=11, ha="right", color=MUTED)
    figure.text(0.05, upper, run.cfg.name, fontsize=19, fontweight="bold")
    figure.text(0.05, lower, "  ·  ".join(facts(run)), fontsize=11, color=MUTED)
