"""Figures 2 and 3 of the TEPO paper (arXiv 2604.12736), drawn from a run next to the values that the paper publishes.

Its text gives two numbers, the mean seconds per step. Its curves have no printed values, so their captions say what it reports.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from tepo_megatron.report import drawing as draw
from tepo_megatron.report.drawing import Curves

SECONDS = {"TEPO": 338.0, "DAPO/GRPO": 357.0}  # mean seconds per step: caption of Figure 2
SOURCE = "arXiv 2604.12736"


@dataclass(frozen=True)
class PaperFigure:
    """One plot of the paper's figures.

    Attributes:
        percent: Whether values are shares, shown in percent.
        from_zero: Whether the axis starts at 0; it then reaches at least `at_least`.
        at_least: Least upper end of that axis.
        seconds: Whether the paper's two means are drawn too. The axis is logarithmic then: machines differ a lot.
    """

    key: str
    title: str
    label: str
    color: str
    caption: str
    percent: bool = False
    from_zero: bool = False
    at_least: float = 0.0
    seconds: bool = False

    def draw(self, figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
        """Draw the plot."""
        axis: Any = draw.stacked(figure, cell, self.title, 1)[0]
        values = curves[self.key]
        draw.line(axis, curves, np.where(values > 0, values, math.nan) if self.seconds else values, self.color, self.label)
        if self.percent:
            axis.yaxis.set_major_formatter(draw.PERCENT)
        if self.from_zero:
            draw.from_zero(axis, self.at_least)
        if self.seconds:
            for (name, seconds), color in zip(SECONDS.items(), (draw.GREEN, draw.ORANGE), strict=True):
                axis.axhline(seconds, color=color, lw=1.2, ls="--", label=f"{name} in the paper, {seconds:.0f} s")
            axis.set_yscale("log")
        draw.legend(axis)


FIGURES = (
    PaperFigure(
        *("loss/clip_fraction", "Figure 2a: clip ratio", "tokens clipped", draw.RED),
        f"Figure 2a of {SOURCE}: TEPO's is below that of DAPO/GRPO. It prints no values.",
        percent=True,
        from_zero=True,
        at_least=1e-3,
    ),
    PaperFigure(
        *("seconds/total", "Figure 2b: seconds per step", "this run", draw.BLUE),
        f"Figure 2b of {SOURCE}: 338 s for TEPO, 357 s for DAPO/GRPO, machines not named.",
        seconds=True,
    ),
    PaperFigure(
        *("reward/mean", "Figure 3a: reward", "reward of rollouts", draw.ORANGE),
        f"Figure 3a of {SOURCE}: TEPO's is steadier and higher. It prints no values.",
        percent=True,
    ),
    PaperFigure(
        *("actor/grad_norm", "Figure 3b: gradient norm", "before gradient clipping", draw.PURPLE),
        f"Figure 3b of {SOURCE}, in percent of what it does not say: TEPO's is higher throughout.",
        from_zero=True,
    ),
)
CAPTIONS = {figure.key: figure.caption for figure in FIGURES}
