"""Draw `ablation.png`: learning curves of all runs on the left, final accuracies with their noise on the right."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tepo_megatron.ablation.plan import AblationPlan
from tepo_megatron.ablation.results import MethodRow, RunOutcome
from tepo_megatron.ablation.table import verdict
from tepo_megatron.evaluation.statistics import Estimate
from tepo_megatron.report import save_picture
from tepo_megatron.report.comparison import COLORS, DASHES
from tepo_megatron.report.drawing import GREY, INK, MUTED, PERCENT, STYLE, from_zero

# title, keys in metrics.jsonl (summed), whether the quantity is a share
ALWAYS = (("Accuracy of the rollouts", ("accuracy/mean",), True), ("Entropy, nats per token", ("actor/entropy",), False))
WHERE_THERE_IS_ONE = (
    ("Tokens under the KL mask", ("tepo/kl_mask_share",), True),
    ("Tokens clipped", ("loss/clip_fraction_low", "loss/clip_fraction_high"), True),
)
LEGEND_COLUMNS = 8
POINTS = FuncFormatter(lambda share, _: f"{100 * share:+.3g}" if share else "0")
KEY = "Faint lines and small dots: single seeds. Full lines, ever thinner so that equal ones show, and large dots: their means."
BARS = "Bars: 95 % intervals over problems; what other seeds would change is not in them."


@dataclass(frozen=True)
class LineStyle:
    """Colour and dash pattern of a run in all panels."""

    color: str
    dash: str


def write_picture(plan: AblationPlan, table: Sequence[MethodRow], outcomes: Mapping[str, Mapping[int, RunOutcome]]) -> Path:
    """Draw the runs that ended without error into the ablation's folder; return the picture's path."""
    with matplotlib.rc_context(STYLE):
        return save_picture(draw(plan, table, outcomes), plan.folder / "ablation.png")


def draw(plan: AblationPlan, table: Sequence[MethodRow], outcomes: Mapping[str, Mapping[int, RunOutcome]]) -> Figure:
    """Return the whole figure. Runs of which every seed failed are left out; at least one run must be left."""
    shown = [row for row in table if row.after is not None]
    looks = _looks(plan, shown)
    extra = [panel for panel in WHERE_THERE_IS_ONE if any(_has(panel[1], outcomes[row.name]) for row in shown)]
    heading = 1.45 + 0.27 * math.ceil(len(shown) / LEGEND_COLUMNS)  # inches
    height = max(9.8, heading + 1.7 + 1.15 * len(shown))
    figure = Figure(figsize=(15.0, height))
    groups = [ALWAYS, extra] if extra else [ALWAYS]
    grid = figure.add_gridspec(
        1, len(groups) + 1, width_ratios=(1, 1, 1.1)[-len(groups) - 1 :], left=0.05, right=0.985,
        top=1 - heading / height, bottom=1.05 / height, wspace=0.16,
    )  # fmt: skip
    for column, panels in enumerate(groups):
        cells = grid[0, column].subgridspec(len(panels), 1, hspace=0.26)
        for place, (title, keys, share) in enumerate(panels):
            axis = figure.add_subplot(cells[place])
            by_run = {row.name: outcomes[row.name] for row in shown if panels is ALWAYS or _has(keys, outcomes[row.name])}
            _curves(axis, keys, by_run, looks)
            axis.set_title(title, pad=8)
            if share:
                axis.yaxis.set_major_formatter(PERCENT)
            from_zero(axis)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
        axis.set_xlabel("step")
    cells = grid[0, len(groups)].subgridspec(2, 1, hspace=0.26)
    accuracy, difference = figure.add_subplot(cells[0]), figure.add_subplot(cells[1])
    _dots(accuracy, [(row, row.after, _formatted(row.after)) for row in shown if row.after], looks)
    accuracy.set_title("Accuracy after the last step, held-out problems", pad=8)
    accuracy.xaxis.set_major_formatter(PERCENT)
    difference.axvline(0, color=MUTED, lw=1, ls=":")
    _dots(difference, [(row, row.difference, _formatted_difference(plan, row)) for row in shown], looks)
    difference.set_title(f"Percentage points over {plan.baseline}, paired by problem", pad=8)
    difference.xaxis.set_major_formatter(POINTS)
    _heading(figure, plan, shown, looks)
    return figure


def _looks(plan: AblationPlan, shown: Sequence[MethodRow]) -> dict[str, LineStyle]:
    """Give the baseline the colour of the text, and the others the palette's colours."""
    others = [row.name for row in shown if row.name != plan.baseline]
    looks = {name: LineStyle(COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i, name in enumerate(others)}
    return looks | {plan.baseline: LineStyle(INK, "-")}


def _has(keys: Sequence[str], outcomes: Mapping[int, RunOutcome]) -> bool:
    """Return whether the quantity occurs in a run: some step has a value other than 0."""
    return any(bool(np.nansum(_total(outcome, keys))) for outcome in outcomes.values())


def _total(outcome: RunOutcome, keys: Sequence[str]) -> np.ndarray:
    return np.sum([outcome.curves[key] for key in keys], axis=0)


def _curves(
    axis: Any, keys: Sequence[str], outcomes: Mapping[str, Mapping[int, RunOutcome]], looks: Mapping[str, LineStyle]
) -> None:
    """Draw a line per seed and, with several seeds, their mean. Each run is drawn thinner, so that equal curves all show."""
    widths = np.linspace(1.4 + 0.7 * min(4, len(outcomes) - 1), 1.4, len(outcomes))
    for width, (name, by_seed) in zip(widths, outcomes.items(), strict=True):
        look = looks[name]
        steps = next(iter(by_seed.values())).curves.steps
        values = np.stack([_total(outcome, keys) for outcome in by_seed.values()])
        if len(by_seed) > 1:
            axis.plot(steps, values.T, color=look.color, ls=look.dash, lw=0.8, alpha=0.35)
        axis.plot(steps, values.mean(0), color=look.color, ls=look.dash, lw=width)


def _dots(axis: Any, lines: Sequence[tuple[MethodRow, Estimate | None, str]], looks: Mapping[str, LineStyle]) -> None:
    """Draw a row per run, the first on top: name and remark above its mean with the interval, the means of its seeds below."""
    for place, (row, estimate, remark) in enumerate(lines):
        color = looks[row.name].color
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        over = {"xycoords": axis.get_yaxis_transform(), "va": "center", "bbox": box}
        axis.annotate(row.name, (0.0, place - 0.36), color=color, fontsize=10.5, ha="left", **over)
        axis.annotate(remark, (1.0, place - 0.36), color=MUTED, fontsize=9.5, ha="right", **over)
        if estimate is None:
            continue
        if estimate.interval is not None:
            axis.plot(estimate.interval, (place, place), color=color, lw=2.2)
        axis.plot(estimate.mean, place, "o", color=color, ms=9, mec="white", mew=1.2, zorder=3)
        if len(estimate.by_seed) > 1:
            seeds = list(estimate.by_seed.values())
            axis.plot(seeds, [place + 0.2] * len(seeds), "o", color=color, ms=4.5, alpha=0.55, mew=0, zorder=3)
    axis.set_ylim(len(lines) - 0.55, -0.65)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.08)


def _formatted(estimate: Estimate) -> str:
    error = "" if estimate.standard_error is None else f", SE {100 * estimate.standard_error:.1f}"
    return f"{100 * estimate.mean:.1f} %{error}"


def _formatted_difference(plan: AblationPlan, row: MethodRow) -> str:
    value = "" if row.difference is None else f"{100 * row.difference.mean:+z.1f}, "
    return value + verdict(plan, row)


def _heading(figure: Figure, plan: AblationPlan, shown: Sequence[MethodRow], looks: Mapping[str, LineStyle]) -> None:
    """Write name, circumstances and the key of colours at the top, and how to read the figure at the bottom."""
    height = figure.get_figheight()
    cfg = plan.any_config
    seeds = f"{len(plan.seeds)} seed" + ("s" if len(plan.seeds) > 1 else "")
    facts = (Path(cfg.model.path).name, f"{cfg.platform} {cfg.model.precision}", f"{cfg.training.steps} steps", seeds)
    figure.text(0.05, 1 - 0.48 / height, plan.name, fontsize=19, fontweight="bold")
    figure.text(0.05, 1 - 0.76 / height, "  ·  ".join(facts), fontsize=11, color=MUTED)
    lines = [Line2D([], [], color=looks[r.name].color, ls=looks[r.name].dash, lw=2.2) for r in shown]
    figure.legend(
        lines, [row.name for row in shown], loc="upper left", bbox_to_anchor=(0.045, 1 - 0.9 / height), ncols=LEGEND_COLUMNS,
        fontsize=10.5, handlelength=1.6, columnspacing=1.8, borderpad=0.2,
    )  # fmt: skip
    figure.text(0.05, 0.2 / height, f"{KEY}  {BARS}", fontsize=9.5, color=MUTED)
    figure.add_artist(Line2D((0.05, 0.985), [0.42 / height] * 2, color=GREY, lw=0.8))
