"""The charts of a run's page, by section: each panel of the picture alone, with a sentence on how to read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from tepo_megatron.report import panels, paper_figures
from tepo_megatron.report.drawing import STYLE, Curves, steps_along
from tepo_megatron.report.run import RunRecord
from tepo_megatron.report.svg import listed, to_svg

_INCHES = (5.3, 3.1)  # text of 10 points stays readable if this is scaled to the width of a phone

_OF_FINE_TUNING: dict[Callable[..., None], str] = {
    panels.cross_entropy: "A held-out loss that rises while the other falls: the model learns by heart.",
    panels.gradients: "A sudden large gradient precedes a loss that rises.",
    panels.throughput: "Padding is the share of an update's work that teaches nothing.",
}

Panel = Callable[[Figure, SubplotSpec], None]


@dataclass(frozen=True)
class Chart:
    """One chart of a page.

    Attributes:
        caption: Sentence on how to read the chart.
        svg: SVG markup made by this package, inserted into the page unescaped.
        axes: Values that the page lists at the pointer (`svg.listed`).
    """

    title: str
    caption: str
    svg: str
    axes: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class PanelChart:
    """A chart before it is drawn: `chart` draws it with matplotlib, and the live page in the browser.

    Attributes:
        name: Name that no other chart of the page has; it keeps the SVG ids unique.
        caption: Sentence on how to read the chart.
        panel: Draws the panel into a cell of a figure.
        last_step: End of the horizontal axis in steps; None if that axis is not in steps.
    """

    name: str
    caption: str
    panel: Panel
    last_step: float | None


@dataclass(frozen=True)
class PanelSection:
    """Charts under one heading, before they are drawn."""

    name: str
    charts: Sequence[PanelChart]


@dataclass(frozen=True)
class ChartSection:
    """Charts under one heading."""

    name: str
    charts: Sequence[Chart]


def chart(drawn: PanelChart) -> Chart:
    """Draw one panel as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_INCHES)
        width, height = figure.get_size_inches()
        edges = {"left": 0.66 / width, "right": 1 - 0.1 / width, "bottom": 0.3 / height, "top": 1 - 0.3 / height}
        drawn.panel(figure, figure.add_gridspec(1, 1, **edges)[0, 0])
        title = figure.axes[0].get_title("left")
        figure.axes[0].set_title("")
        for axis in figure.axes:
            axis.set_xlabel("")
            if drawn.last_step is not None:
                steps_along(axis, drawn.last_step)
        return Chart(title, drawn.caption, to_svg(figure, drawn.name), listed(figure))


def sections(run: RunRecord, prefix: str) -> list[ChartSection]:
    """Draw the charts of one run."""
    return [ChartSection(section.name, list(map(chart, section.charts))) for section in panel_sections(run, prefix)]


def panel_sections(run: RunRecord, prefix: str) -> list[PanelSection]:
    """Return the charts of one run without drawing them."""
    curves, evaluations = run.curves, [] if run.summary is None else run.summary.evaluations

    def draw(panel: Callable[..., None], caption: str, *others: Any) -> PanelChart:
        name = f"{prefix}-{panel.__name__}"
        return PanelChart(name, caption, lambda f, cell: panel(f, cell, curves, *others), run.last_step)

    if run.fine_tuned:
        return [PanelSection("Learning", [draw(panel, caption) for panel, caption in _OF_FINE_TUNING.items()])]
    in_turns = "Stacked: what training spent each step on."
    ahead = f"{in_turns} The line: rollouts, which were sampled meanwhile."
    time = [
        draw(
            panels.mismatch,
            "Engine and actor on the same tokens: growth means that they no longer agree.",
            panels.has_limits(run.cfg.platform, run.cfg.model.precision),
        ),
        draw(panels.seconds, ahead if run.cfg.rollout.max_staleness else in_turns, run.cfg.rollout.max_staleness > 0),
        draw(panels.throughput, "Padding and bubbles are shares of a step's work that teach nothing."),
    ]
    if curves.named("memory/"):
        time.append(draw(panels.memory, "Memory of the rank that holds most, and of all servers together."))
    losses = [draw(panels.lost, "Samples whose function failed, which training left out.")] if _lost_any(curves) else []
    return [
        PanelSection(
            "Learning",
            [
                draw(panels.learning, "All samples; diamonds: held-out problems, ± standard error.", evaluations),
                draw(panels.entropy, "A fall to 0 means that all samples of a prompt become the same."),
                draw(panels.updates, "A sudden large gradient, or responses that keep growing, precede a collapse."),
                draw(panels.sampling, "Groups all right or all wrong have no advantage; by default they are not trained on."),
                *losses,
            ],
        ),
        PanelSection(
            "TEPO",
            [
                draw(panels.ratio, "Geometric mean of a sequence's token ratios. Clip bounds act outside 1 ± eps."),
                draw(
                    panels.entropy_change,
                    "TEPO's KL mask selects tokens with A > 0 and falling entropy: the negative values of the upper plot.",
                ),
                draw(panels.token_shares, "Grey: masked by rounding alone."),
                draw(panels.constraints, "The constraints on the policy: the bounds of the ratio, and the KL under the mask."),
            ],
        ),
        PanelSection("Mismatch and time", time),
        PanelSection("Figures 2 and 3 of the paper", _of_the_paper(run, prefix)),
    ]


def _lost_any(curves: Curves) -> bool:
    return any(np.nansum(curves[f"rollout/samples_{kind}"]) > 0 for kind in panels.LOSSES)


def _of_the_paper(run: RunRecord, prefix: str) -> list[PanelChart]:
    return [
        PanelChart(f"{prefix}-paper-{it.key.replace('/', '-')}", it.caption, partial(it.draw, curves=run.curves), run.last_step)
        for it in paper_figures.FIGURES
        if it.key in run.curves
    ]
