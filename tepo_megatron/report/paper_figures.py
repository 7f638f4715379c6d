"""Figures 2 and 3 of the TEPO paper (arXiv 2604.12736), drawn from a run next to the values that the paper publishes.

Its text gives two numbers, the mean seconds per step. Its curves have no printed values, so their captions say what it reports.
"""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from tepo_megatron.report import drawing as draw
from tepo_megatron.report.drawing import Curves

SECONDS = {"TEPO": 338.0, "DAPO/GRPO": 357.0}  # mean seconds per step: caption of Figure 2
SOURCE = "arXiv 2604.12736"
# key of metrics.jsonl -> the paper's figure of it, and what the paper says
CAPTIONS = {
    "loss/clip_fraction": f"Figure 2a of {SOURCE}: TEPO's is below that of DAPO/GRPO. It prints no values.",
    "seconds/total": f"Figure 2b of {SOURCE}: 338 s for TEPO, 357 s for DAPO/GRPO, machines not named.",
    "reward/mean": f"Figure 3a of {SOURCE}: TEPO's is steadier and higher. It prints no values.",
    "actor/grad_norm": f"Figure 3b of {SOURCE}, in percent of what it does not say: TEPO's is higher throughout.",
}


def clip_ratio(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the share of clipped tokens, Figure 2a.

    Args:
        figure: Figure to draw into.
        cell: Cell of its grid.
        curves: Records of the run.
    """
    (axis,) = draw.stacked(figure, cell, "Figure 2a: clip ratio", 1)
    draw.line(axis, curves, curves["loss/clip_fraction"], draw.RED, "tokens clipped")
    axis.yaxis.set_major_formatter(draw.PERCENT)
    draw.from_zero(axis, at_least=1e-3)
    draw.legend(axis)


def step_seconds(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the seconds per step with the paper's two means, Figure 2b. The axis is logarithmic: machines differ a lot.

    Args:
        figure: Figure to draw into.
        cell: Cell of its grid.
        curves: Records of the run.
    """
    axis: Any = draw.stacked(figure, cell, "Figure 2b: seconds per step", 1)[0]
    values = curves["seconds/total"]
    draw.line(axis, curves, np.where(values > 0, values, math.nan), draw.BLUE, "this run")
    for (name, seconds), color in zip(SECONDS.items(), (draw.GREEN, draw.ORANGE), strict=True):
        axis.axhline(seconds, color=color, lw=1.2, ls="--", label=f"{name} in the paper, {seconds:.0f} s")
    axis.set_yscale("log")
    draw.legend(axis)


def reward(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the reward, Figure 3a.

    Args:
        figure: Figure to draw into.
        cell: Cell of its grid.
        curves: Records of the run.
    """
    (axis,) = draw.stacked(figure, cell, "Figure 3a: reward", 1)
    draw.line(axis, curves, curves["reward/mean"], draw.ORANGE, "reward of rollouts")
    axis.yaxis.set_major_formatter(draw.PERCENT)
    draw.legend(axis)


def gradient_norm(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the gradient norm, Figure 3b.

    Args:
        figure: Figure to draw into.
        cell: Cell of its grid.
        curves: Records of the run.
    """
    (axis,) = draw.stacked(figure, cell, "Figure 3b: gradient norm", 1)
    draw.line(axis, curves, curves["actor/grad_norm"], draw.PURPLE, "before gradient clipping")
    draw.from_zero(axis)
    draw.legend(axis)


# key of metrics.jsonl -> its panel
PANELS = {
    "loss/clip_fraction": clip_ratio,
    "seconds/total": step_seconds,
    "reward/mean": reward,
    "actor/grad_norm": gradient_norm,
}
