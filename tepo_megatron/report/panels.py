"""The panels of the picture. Each function draws one cell of the grid; quantities that no step measured are left out."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from tepo_megatron.report import drawing as draw
from tepo_megatron.report.drawing import Curves

# fp32 on the CPU platform keeps the rollout/train log-prob difference below these if the engine serves the actor's weights
FP32_MEAN_GATE = 1e-5
FP32_MAX_GATE = 1e-3

PHASES = (
    ("rollout", draw.BLUE), ("grading_wait", draw.ORANGE), ("old_stats", draw.PURPLE), ("update", draw.GREEN),
    ("sync", draw.RED),
)  # fmt: skip
LOSSES = {"raised": draw.RED, "timed_out": draw.ORANGE, "over_limit": draw.PURPLE}
PHASES_AHEAD = (("wait", draw.BLUE), *PHASES[2:])


def learning(figure: Figure, cell: SubplotSpec, curves: Curves, evaluations: Sequence[tuple[float, float, float]]) -> None:
    """Draw reward and accuracy."""
    (axis,) = draw.stacked(figure, cell, "Reward and accuracy", 1)
    reward, accuracy = curves["reward/mean"], curves["accuracy/mean"]
    if np.array_equal(reward, accuracy, equal_nan=True):
        draw.line(axis, curves, accuracy, draw.BLUE, "rollouts: reward = accuracy")
    else:
        draw.line(axis, curves, reward, draw.ORANGE, "rollouts: reward")
        draw.line(axis, curves, accuracy, draw.BLUE, "accuracy")
    if evaluations:
        steps, means, errors = zip(*evaluations, strict=True)
        axis.errorbar(steps, means, errors, fmt="D", color=draw.INK, ms=6, capsize=4, lw=1.5, zorder=5, label="evaluation")
    axis.yaxis.set_major_formatter(draw.PERCENT)
    draw.legend(axis)


def cross_entropy(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the loss of fine-tuning, and that of the held-out conversations at the updates that measured it."""
    (axis,) = draw.stacked(figure, cell, "Cross-entropy, nats per token", 1)
    draw.line(axis, curves, curves["sft/loss"], draw.BLUE, "conversations of the update")
    if "sft/eval_loss" in curves:
        draw.line(axis, curves, curves.between("sft/eval_loss"), draw.ORANGE, "held-out conversations")
    draw.from_zero(axis)
    draw.legend(axis)


def gradients(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the gradient norm and the tokens of each update of fine-tuning."""
    top, bottom = draw.stacked(figure, cell, "Gradient norm and tokens of an update", 2)
    draw.line(top, curves, curves["actor/grad_norm"], draw.ORANGE, "gradient norm before clipping")
    draw.line(bottom, curves, curves["sft/learned_tokens"], draw.BLUE, "tokens that are learned")
    for axis in (top, bottom):
        draw.from_zero(axis)
    draw.legend(top, bottom)


def entropy(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the entropy and, if there is a reference policy, the KL to it: per token in the loss, per response in the reward."""
    units = {"loss/ref_kl": "nats per token", "reward/ref_kl": "nats per response"}
    measured = [key for key in units if key in curves]
    top, *rest = draw.stacked(figure, cell, "Entropy and KL to the reference" if measured else "Entropy", 1 + len(measured))
    draw.line(top, curves, curves["actor/entropy"], draw.PURPLE, "mean over response tokens, nats")
    draw.from_zero(top)
    draw.legend(top)
    for axis, key in zip(rest, measured, strict=True):
        draw.line(axis, curves, curves[key], draw.BLUE, f"KL to the reference, {units[key]}")
        draw.legend(axis)


def ratio(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the importance ratio w, the geometric mean of a sequence's token ratios: median, 1st and 99th percentile."""
    (axis,) = draw.stacked(figure, cell, "Ratio w to the old policy", 1)
    draw.line(axis, curves, curves["tepo/ratio_p50"], draw.GREEN, "median")
    draw.band(axis, curves, curves["tepo/ratio_p01"], curves["tepo/ratio_p99"], draw.GREEN, "1st to 99th percentile")
    axis.axhline(1, color=draw.MUTED, lw=1, ls=":")
    draw.legend(axis)


def entropy_change(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw dH = H - H_old on one scale, for A > 0 above and A < 0 below. Values within the grey area are rounding noise."""
    axes = draw.stacked(figure, cell, "Entropy change dH by sign of A, nats", 2)
    floor = curves.between("tepo/entropy_noise_floor")
    magnitudes = [0.0]
    for axis, side, color, label in zip(
        axes, ("up", "down"), (draw.BLUE, draw.ORANGE), ("A > 0: median", "A < 0: median"), strict=True
    ):
        low, middle, high = (curves[f"tepo/dH_{side}_p{q}"] for q in ("05", "50", "95"))
        magnitudes += [float(v) for v in np.abs(np.concatenate((low, high))) if math.isfinite(v)]
        draw.line(axis, curves, middle, color, label)
        draw.band(axis, curves, low, high, color, "5th to 95th percentile")
        if "tepo/entropy_noise_floor" in curves:
            axis.fill_between(curves.steps, -floor, floor, color=draw.GREY, alpha=0.6, lw=0, zorder=0.5, label="noise floor")
        axis.axhline(0, color=draw.MUTED, lw=1, ls=":")
        draw.legend(axis)
    extreme = max(magnitudes) or 1.0
    measured = floor[floor > 0]
    linear = float(np.median(measured)) if measured.size else extreme / 100
    draw.symmetric_log(axes, linear, max(extreme, 10 * linear))


def token_shares(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the share of tokens under the KL penalty and, if there is a weighting, of those that it affects."""
    weighted = "weighting/affected_share" in curves
    top, *rest = draw.stacked(figure, cell, "KL mask and weighting" if weighted else "KL mask", 2 if weighted else 1)
    share = curves["tepo/kl_mask_share"]
    draw.line(top, curves, share, draw.GREEN, "tokens under the mask")
    if "tepo/mask_below_noise" in curves:
        noise = share * curves.between("tepo/mask_below_noise")
        top.fill_between(curves.steps, 0, noise, color=draw.GREY, alpha=0.8, lw=0, label="of these, dH below the noise floor")
    for axis in rest:
        draw.line(axis, curves, curves["weighting/affected_share"], draw.PURPLE, "tokens that the weighting acts on")
    for axis, at_least in zip((top, *rest), (1e-2, 1e-4), strict=False):
        axis.yaxis.set_major_formatter(draw.PERCENT)
        draw.from_zero(axis, at_least)
        draw.legend(axis)


def constraints(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the share of tokens whose ratio is clipped, and the KL term."""
    top, bottom = draw.stacked(figure, cell, "Clipping and KL term", 2)
    draw.line(top, curves, curves["loss/clip_fraction_high"], draw.RED, "tokens clipped: upper bound")
    draw.line(top, curves, curves["loss/clip_fraction_low"], draw.BLUE, "lower bound")
    top.yaxis.set_major_formatter(draw.PERCENT)
    draw.from_zero(top, at_least=1e-3)
    kl = curves["loss/kl"]
    draw.line(bottom, curves, kl, draw.GREEN, "KL term, nats per token")
    if not (kl < 0).any():  # only the k1 estimator can be negative
        draw.from_zero(bottom, at_least=1e-6)
    bottom.yaxis.set_major_formatter(draw.SMALL)
    draw.legend(top, bottom)


def updates(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw gradient norm and response length."""
    top, bottom = draw.stacked(figure, cell, "Gradient norm and response length", 2)
    draw.line(top, curves, curves["actor/grad_norm"], draw.ORANGE, "gradient norm before clipping")
    draw.from_zero(top)
    draw.line(bottom, curves, curves["rollout/response_tokens_mean"], draw.BLUE, "mean response, tokens")
    draw.legend(top, bottom)


def sampling(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw how many groups were sampled and trained on, and the share of responses that hit the length limit."""
    top, bottom = draw.stacked(figure, cell, "Groups and truncated responses", 2)
    if "rollout/sampled_groups" in curves:
        draw.line(top, curves, curves["rollout/sampled_groups"], draw.MUTED, "groups sampled")
    draw.line(top, curves, curves["rollout/kept_groups"], draw.GREEN, "trained on")
    draw.from_zero(top)
    draw.line(bottom, curves, curves["rollout/truncated"], draw.RED, "responses at the length limit")
    bottom.yaxis.set_major_formatter(draw.PERCENT)
    draw.from_zero(bottom, at_least=0.01)
    draw.legend(top, bottom)


def lost(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the samples that steps lost, by what went wrong with their function."""
    (axis,) = draw.stacked(figure, cell, "Lost samples of a step", 1)
    for kind, color in LOSSES.items():
        draw.line(axis, curves, curves[f"rollout/samples_{kind}"], color, kind.replace("_", " "))
    draw.from_zero(axis)
    draw.legend(axis)


def mismatch(figure: Figure, cell: SubplotSpec, curves: Curves, gated: bool) -> None:
    """Draw the log-prob difference between engine and actor and, if present, the weight that corrects for it.

    Args:
        gated: Draw the limits of fp32.
    """
    corrected = "correction/weight_mean" in curves
    axis, *rest = draw.stacked(figure, cell, "Rollout/train log-prob difference, nats", 2 if corrected else 1)
    for name, color, gate in (("max", draw.ORANGE, FP32_MAX_GATE), ("mean", draw.BLUE, FP32_MEAN_GATE)):
        values = curves[f"rollout/logprob_diff_{name}"]
        draw.line(axis, curves, np.where(values > 0, values, math.nan), color, name)  # a log scale cannot show 0
        if gated:
            axis.axhline(gate, color=color, lw=1.2, ls="--", label=f"limit {gate:g}")
    axis.set_yscale("log")
    draw.legend(axis)
    for below in rest:
        draw.line(below, curves, curves["correction/weight_mean"], draw.PURPLE, "mean correction weight")
        below.axhline(1, color=draw.MUTED, lw=1, ls=":")
        draw.legend(below)


def seconds(figure: Figure, cell: SubplotSpec, curves: Curves, ahead: bool) -> None:
    """Draw the seconds of each step by phase."""
    axis: Any = draw.stacked(figure, cell, "Seconds per step", 1)[0]
    phases = PHASES_AHEAD if ahead else PHASES
    layers = [(phase.replace("_", " "), np.nan_to_num(curves[f"seconds/{phase}"]), color) for phase, color in phases]
    known = np.sum([height for _, height, _ in layers], axis=0)
    layers.append(("other", np.clip(np.nan_to_num(curves["seconds/total"]) - known, 0, None), draw.GREY))
    draw.stack(axis, curves, layers)
    if ahead:
        draw.line(axis, curves, curves["seconds/rollout"], draw.INK, "rollout")
    axis.grid(axis="x", visible=False)
    axis.set_xlabel("step")
    draw.from_zero(axis)
    draw.legend(axis)


def throughput(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw tokens per second of the whole step, and the shares of padding and pipeline bubbles."""
    top, bottom = draw.stacked(figure, cell, "Throughput and layout", 2)
    draw.line(top, curves, curves["tokens_per_second"], draw.BLUE, "trained tokens per second, prompts too")
    draw.from_zero(top)
    draw.line(bottom, curves, curves["packing/padding_share"], draw.ORANGE, "padding")
    if "packing/bubble_share" in curves:
        draw.line(bottom, curves, curves["packing/bubble_share"], draw.PURPLE, "pipeline bubble")
    bottom.yaxis.set_major_formatter(draw.PERCENT)
    draw.from_zero(bottom, at_least=0.01)
    draw.legend(top, bottom)


def memory(figure: Figure, cell: SubplotSpec, curves: Curves) -> None:
    """Draw the most memory that any phase of a step held, for each kind of memory that is measured."""
    (axis,) = draw.stacked(figure, cell, "Memory, GiB, most of any phase", 1)
    keys = curves.named("memory/")
    things = sorted({key.rpartition("_")[2] for key in keys})
    for thing, color in zip(things, (draw.BLUE, draw.ORANGE, draw.GREEN, draw.PURPLE, draw.RED), strict=False):
        draw.line(axis, curves, np.fmax.reduce([curves[key] for key in keys if key.endswith(f"_{thing}")]), color, thing)
    draw.from_zero(axis)
    draw.legend(axis)


def has_limits(platform: str, precision: str) -> bool:
    """Return whether the limits of fp32 apply to the rollout/train difference."""
    return platform == "cpu" and precision == "fp32"
