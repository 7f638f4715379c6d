"""`tepo report`: show a run as a page, `report.html`, and as a picture, `report.png`; compare several runs on one page.

A page is one self-contained HTML file. Every value is escaped, and only the page's own script may run.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tepo_megatron import __version__
from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.base.run_lock import RunLock
from tepo_megatron.base.storage import replace_file, replacing
from tepo_megatron.config.io import to_yaml
from tepo_megatron.config.safety import safety_checks
from tepo_megatron.report import comparison, evaluations, panels, samples, tokens
from tepo_megatron.report.chart import BLUE, MUTED, Chart, ChartAxis, Series, css_color, on_page
from tepo_megatron.report.run import WINDOW, RunRecord, facts, read_run, table

# the light colours of style.css; text of a picture is not scaled with a page, so some are lighter here
_COLORS = {
    "ink": "#1f2933", "muted": "#6b7785", "grey": "#c3cad3", "blue": "#2f6fde", "orange": "#e8833a", "green": "#2a9d78",
    "purple": "#8a63d2", "red": "#d64550",
}  # fmt: skip
STYLE = {
    "font.size": 10, "text.color": _COLORS["ink"], "axes.titlesize": 11.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 22, "axes.edgecolor": _COLORS["grey"], "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "axes.formatter.useoffset": False,
    "grid.color": "#e6e9ee", "xtick.color": _COLORS["muted"], "ytick.color": _COLORS["muted"],
    "lines.solid_capstyle": "round", "legend.frameon": False, "legend.fontsize": 9, "savefig.facecolor": "white",
}  # fmt: skip
_FORMATS = {
    "percent": FuncFormatter(lambda share, _: f"{100 * share:.3g}%"),
    "small": FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"),
}
_PANELS = (
    panels.learning, panels.entropy, panels.ratio, panels.entropy_change, panels.token_shares, panels.constraints,
    panels.updates, panels.sampling, panels.mismatch,
)  # fmt: skip


def write_picture(run: RunRecord) -> Path:
    """Draw the run into its folder; return the picture's path. An older picture is replaced atomically."""
    path = run.folder / "report.png"
    with matplotlib.rc_context(STYLE), replacing(path, durable=False) as unfinished:
        draw(run).savefig(unfinished, format="png", dpi=130)
    return path


def draw(run: RunRecord) -> Figure:
    """Return the whole figure of a run: nine panels and a strip with the seconds per step; three panels of fine-tuning."""
    if run.fine_tuned:
        figure = Figure(figsize=(15, 4.6))
        grid = figure.add_gridspec(1, 3, left=0.05, right=0.985, top=0.74, bottom=0.11, wspace=0.18)
        cells = [(panel(run), grid[0, place]) for place, panel in enumerate(panels.FINE_TUNING)]
    else:
        figure = Figure(figsize=(15, 13.9))
        grid = figure.add_gridspec(
            4, 3, height_ratios=(1, 1, 1, 0.42), left=0.05, right=0.985, top=0.89, bottom=0.042, hspace=0.4, wspace=0.18
        )
        cells = [(panel(run), grid[place // 3, place % 3]) for place, panel in enumerate(_PANELS)]
        cells.append((panels.seconds(run), grid[3, :]))
    for chart, cell in cells:
        _draw(figure, cell, chart, run.last_step)
    figure.axes[-1].set_xlabel("step")
    _heading(figure, run)
    return figure


def _draw(figure: Figure, cell: SubplotSpec, chart: Chart, last_step: float) -> None:
    grid = cell.subgridspec(len(chart.axes), 1, hspace=0.38)
    for row, axis in enumerate(chart.axes):
        plot = figure.add_subplot(grid[row])
        plot.set_title(chart.title if row == 0 else "")
        plot.tick_params(labelbottom=row == len(chart.axes) - 1)
        _draw_axis(plot, axis)
        plot.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=(1, 2, 5, 10)))
        plot.set_xlim(-0.015 * last_step, 0.5 + 1.015 * last_step)
        # one row between title and axes, where it never hides data
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 7}
        plot.legend(**place, borderpad=0, borderaxespad=0.3, handlelength=1.4, columnspacing=1.3)


def _draw_axis(plot: Any, axis: ChartAxis) -> None:
    for series in axis.series:
        _draw_series(plot, series)
    for rule in axis.rules:
        style = {"lw": 1.2, "ls": "--", "label": rule.label} if rule.label else {"lw": 1, "ls": ":"}
        plot.axhline(rule.y, color=_COLORS[rule.color], **style)
    if axis.scale == "log":
        plot.set_yscale("log")
    elif axis.scale == "symlog":
        plot.set_yscale("symlog", linthresh=axis.linear, linscale=0.5)
        least, most = math.ceil(math.log10(axis.linear) - 1e-9), math.floor(math.log10(axis.extreme) + 1e-9)
        powers = [10.0**power for power in range(most, least - 1, -max(1, math.ceil((most - least + 1) / 2)))]
        plot.yaxis.set_major_locator(FixedLocator([-p for p in powers] + [0.0] + powers[::-1]))
        plot.yaxis.set_minor_locator(NullLocator())
        plot.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
    if axis.format:
        plot.yaxis.set_major_formatter(_FORMATS[axis.format])
    if axis.limits is not None:
        plot.set_ylim(axis.limits)


def _draw_series(plot: Any, series: Series) -> None:
    color, x, rows = _COLORS[series.color], series.x, series.rows
    if series.kind == "line":
        plot.plot(x, rows[0], color=color, lw=1.8, marker="o" if len(x) <= 60 else "", ms=3, label=series.label)
    elif series.kind == "band":
        plot.fill_between(x, *rows, color=color, alpha=series.opacity, lw=0, label=series.label)
    elif series.kind == "bar":
        edges = np.concatenate(([x[0] - 0.5], (x[:-1] + x[1:]) / 2, [x[-1] + 0.5]))
        plot.stairs(rows[1], edges, baseline=rows[0], fill=True, color=color, label=series.label)
    else:
        errors = [rows[0] - rows[1], rows[2] - rows[0]]
        plot.errorbar(x, rows[0], errors, fmt="D", color=color, ms=6, capsize=4, lw=1.5, zorder=5, label=series.label)


def _power_of_ten(value: float, _: int) -> str:
    return "0" if value == 0 else f"${'-' if value < 0 else ''}10^{{{round(math.log10(abs(value)))}}}$"


def _heading(figure: Figure, run: RunRecord) -> None:
    """Write name and circumstances on the left; the result, once there is one, on the right."""
    summary, height = run.summary, figure.get_size_inches()[1]
    upper, lower = 1 - 0.49 / height, 1 - 0.78 / height
    muted, blue = _COLORS["muted"], _COLORS["blue"]
    if summary is not None and summary.evaluations:
        result = "  →  ".join(f"{accuracy:.1%} ± {100 * error:.1f}" for _, accuracy, error in summary.evaluations)
        figure.text(0.985, upper, result, fontsize=19, fontweight="bold", ha="right", color=blue)
        when = "before and after" if len(summary.evaluations) > 1 else "after"
        figure.text(0.985, lower, f"evaluation accuracy {when}, ± standard error", fontsize=11, ha="right", color=muted)
    figure.text(0.05, upper, run.cfg.name, fontsize=19, fontweight="bold")
    figure.text(0.05, lower, "  ·  ".join(facts(run)), fontsize=11, color=muted)


def write_report(run_dir: Path) -> Path:
    """Write the page and then the picture of a run into its folder; return the page's path.

    `run_dir` must hold config.yaml and metrics.jsonl; other records of the run are shown if present. Both files are replaced
    atomically.

    Raises:
        DataError: No step has been recorded, or a file is malformed.
        ConfigError: config.yaml is malformed, or the page cannot be written.
    """
    run = read_run(run_dir)
    page = write_page(run_dir / "report.html", render([run]))
    write_picture(run)
    return page


def write_comparison(run_dirs: Sequence[Path], page: Path) -> Path:
    """Write a page that compares several runs, with each run below; return its path.

    Raises:
        DataError: As `write_report`.
        ConfigError: As `write_report`, or a run is named twice.
    """
    for place, run_dir in enumerate(run_dirs):
        if any(run_dir.resolve() == other.resolve() for other in run_dirs[:place]):
            raise ConfigError(f"{run_dir} is named twice; a run is compared with others")
    return write_page(page, render([read_run(run_dir) for run_dir in run_dirs]))


def write_page(page: Path, text: str) -> Path:
    """Replace `page` atomically; return its path. Raises ConfigError if the file cannot be written."""
    try:
        replace_file(page, text.encode())
    except OSError as e:
        raise ConfigError(f"{page}: the page cannot be written ({e.strerror}); free some space, or name another file") from None
    return page


def print_results(folder: Path, steps: int) -> None:
    """Print the results of a finished run; write its page and picture if it was killed before it did."""
    names = ("summary.json", "report.html", "report.png", "hf")
    if not (folder / "report.png").exists():  # a run removes the picture before it writes its summary
        with RunLock(folder):
            write_report(folder)
    results = ", ".join(name for name in names if (folder / name).exists())
    taken = json.loads((folder / "summary.json").read_text())["steps"]
    print(f"{escaped(str(folder))}: this run is finished, with {taken} steps; its results: {results}")
    print(f"only {'--evaluation.patience null' if taken < steps else 'a higher training.steps'} makes it go on")


_TEMPLATES = Path(__file__).parent / "templates"


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page of one run, or the comparison of several with each run below. Raises DataError for a malformed file."""
    names = comparison.names(runs)
    views = [_view(run, name, place) for place, (run, name) in enumerate(zip(runs, names, strict=True))]
    several = len(runs) > 1
    compared = (
        comparison.compare(dict(zip(names, runs, strict=True)), [view["held_out"] for view in views]) if several else None
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"on_page": on_page, "pieces": lambda text: samples.of_text(text, "text")}
    script = "\n".join((_TEMPLATES / name).read_text() for name in ("plots.js", "page.js"))
    return environment.get_template("page.html").render(
        title="Comparison of runs" if several else names[0],
        style=Markup((_TEMPLATES / "style.css").read_text()),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        window=WINDOW,
        last_step=max(run.last_step for run in runs),
        runs=views,
        comparison=compared,
    )


def _view(run: RunRecord, name: str, place: int) -> dict[str, Any]:
    anchor, evaluated, suite = f"run-{place}", evaluations.read_held_out(run), evaluations.read_benchmarks(run)
    sections = panels.sections(run)
    numbered = [(name, f"{anchor}-{number}") for number, name in enumerate(sections, start=1)]
    others = ("figures",) if run.fine_tuned else ("evaluation", "samples", "tokens", "figures")
    rest = [(heading.capitalize(), f"{anchor}-{heading}") for heading in others]
    return {
        "name": name,
        "anchor": anchor,
        "color": css_color(comparison.color(place)),
        "facts": (*facts(run), *filter(None, [panels.time_shares(run)])),
        "fine_tuned": run.fine_tuned,
        "safety": safety_checks(run.cfg),
        "notes": run.notes,
        "sections": sections,
        "contents": [*numbered, *rest],
        "held_out": evaluated,
        "evaluation": _evaluation(run),
        "benchmarks": suite,
        "samples": samples.read_samples(run),
        "tokens": tokens.read_tokens(run),
        "table": table(run.curves),
        "config": to_yaml(run.cfg),
        "last_step": run.last_step,
    }


def _evaluation(run: RunRecord) -> Chart | None:
    if run.summary is None or not run.summary.evaluations:
        return None
    results = [(f"step {step}", mean, error, MUTED if step == 0 else BLUE) for step, mean, error in run.summary.evaluations]
    return evaluations.accuracies(results, "Bars: 95 % intervals over problems.")
