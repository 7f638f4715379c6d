"""The charts of a run, by section. Quantities that no step measured are left out."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tepo_megatron.report.chart import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    Chart,
    ChartAxis,
    ReferenceLine,
    Series,
    band,
    line,
    points,
)
from tepo_megatron.report.run import RunRecord, at_end

_TRAINED = {"old_stats": PURPLE, "reference": MUTED, "update": GREEN, "sync": RED}
PHASES = {"rollout": BLUE, "grading_wait": ORANGE, **_TRAINED}
PHASES_AHEAD = {"wait": BLUE, **_TRAINED}
EVALUATION_COLORS = (INK, BLUE, ORANGE, GREEN, PURPLE, RED, MUTED)
LOSSES = {"raised": RED, "timed_out": ORANGE, "over_limit": PURPLE}
SOURCE = "arXiv 2604.12736"  # Figures 2 and 3 of the TEPO paper; its curves have no printed values
SECONDS = {"TEPO": 338.0, "DAPO/GRPO": 357.0}  # not a limit: mean seconds per step, caption of Figure 2


def learning(run: RunRecord) -> Chart:
    """Reward and accuracy of rollouts, and below them the evaluations, if there are any."""
    curves, evaluations = run.curves, run.evaluations
    if np.array_equal(curves["reward/mean"], curves["accuracy/mean"], equal_nan=True):
        series = [line(curves, "accuracy/mean", BLUE, "rollouts: reward = accuracy")]
    else:
        series = [
            line(curves, "reward/mean", ORANGE, "rollouts: reward"),
            line(curves, "accuracy/mean", BLUE, "accuracy"),
        ]
    axes, evaluated = [ChartAxis(series, format="percent")], list[Series]()
    keys = curves.named("reward/terms/")
    terms = [line(curves, key, color, f"term {key[13:]}") for key, color in zip(keys, itertools.cycle(EVALUATION_COLORS))]
    axes += [ChartAxis(terms)] if terms else []
    for (name, results), color in zip(evaluations.items(), itertools.cycle(EVALUATION_COLORS), strict=False):
        evaluated += points(results, color, f"evaluation: {name.replace('_', ' ')}")
    axes += [ChartAxis(evaluated, format="percent")] if evaluated else []
    caption = "All samples of training"
    caption += "; below, the evaluations ± standard error, clustered by problem." if evaluated else "."
    return Chart("Reward and accuracy", caption, axes)


def entropy(run: RunRecord) -> Chart:
    """Entropy and, if there is a reference policy, the KL to it: per token in the loss, per response in the reward."""
    curves, units = run.curves, {"loss/ref_kl": "nats per token", "reward/ref_kl": "nats per response"}
    measured = [key for key in units if key in curves]
    title = "Entropy and KL to the reference" if measured else "Entropy"
    axes = [ChartAxis([line(curves, "actor/entropy", PURPLE, "mean over response tokens, nats")], least=0.0)]
    axes += [ChartAxis([line(curves, key, BLUE, f"KL to the reference, {units[key]}")]) for key in measured]
    return Chart(title, "A fall to 0 means that all samples of a prompt become the same.", axes)


def updates(run: RunRecord) -> Chart:
    """Gradient norm and response length."""
    gradient = line(run.curves, "actor/grad_norm", ORANGE, "gradient norm before clipping")
    length = line(run.curves, "rollout/response_tokens_mean", BLUE, "mean response, tokens")
    caption = "A sudden large gradient, or responses that keep growing, precede a collapse."
    return Chart("Gradient norm and response length", caption, [ChartAxis([gradient], least=0.0), ChartAxis([length])])


def sampling(run: RunRecord) -> Chart:
    """Groups that were sampled and trained on, and the share of responses that hit the length limit."""
    curves, sampled = run.curves, "rollout/sampled_groups"
    groups = [line(curves, sampled, MUTED, "groups sampled")] if sampled in curves else []
    groups.append(line(curves, "rollout/kept_groups", GREEN, "trained on"))
    cut = ChartAxis([line(curves, "rollout/truncated", RED, "responses at the length limit")], format="percent", least=0.01)
    caption = "Groups all right or all wrong have no advantage; by default they are not trained on."
    return Chart("Groups and truncated responses", caption, [ChartAxis(groups, least=0.0), cut])


def lost(run: RunRecord) -> Chart | None:
    """Samples that steps lost, by what went wrong with their function; None if none was lost."""
    keys = {kind: f"rollout/samples_{kind}" for kind in LOSSES}
    if not any(np.nansum(run.curves[key]) > 0 for key in keys.values()):
        return None
    series = [line(run.curves, key, LOSSES[kind], kind.replace("_", " ")) for kind, key in keys.items()]
    return Chart(
        "Lost samples of a step", "Samples whose function failed, which training left out.", [ChartAxis(series, least=0.0)]
    )


def ratio(run: RunRecord) -> Chart:
    """Importance ratio that the objective uses: median, 1st and 99th percentile over tokens."""
    low, high = (run.curves[f"tepo/ratio_{q}"] for q in ("p01", "p99"))
    spread = band(run.curves, low, high, GREEN, "1st to 99th percentile")
    caption = "Per token or per sequence, as the objective has it; 1 if it has none. Clip bounds act outside 1 ± eps."
    axis = ChartAxis([line(run.curves, "tepo/ratio_p50", GREEN, "median"), spread], [ReferenceLine(1.0)])
    return Chart("Ratio w to the old policy", caption, [axis])


def entropy_change(run: RunRecord) -> Chart:
    """dH = H - H_old on one scale, for A > 0 above and A < 0 below. Values within the grey area are rounding noise."""
    curves, floor = run.curves, run.curves.between("tepo/entropy_noise_floor")
    noise = [band(curves, -floor, floor, GREY, "noise floor")] if "tepo/entropy_noise_floor" in curves else []
    bounds = {side: [curves[f"tepo/dH_{side}_{q}"] for q in ("p05", "p95")] for side in ("up", "down")}
    sizes = np.abs(np.concatenate([*bounds["up"], *bounds["down"]]))
    extreme = float(sizes[np.isfinite(sizes)].max(initial=0.0)) or 1.0
    measured = floor[floor > 0]
    linear = float(np.median(measured)) if measured.size else extreme / 100
    axes = []
    for side, color, label in (("up", BLUE, "A > 0: median"), ("down", ORANGE, "A < 0: median")):
        spread = band(curves, bounds[side][0], bounds[side][1], color, "5th to 95th percentile")
        series = [*noise, line(curves, f"tepo/dH_{side}_p50", color, label), spread]
        axes.append(ChartAxis(series, [ReferenceLine(0.0)], scale="symlog", linear=linear, extreme=max(extreme, 10 * linear)))
    caption = "TEPO's KL mask selects tokens with A > 0 and falling entropy: the negative values of the upper plot."
    return Chart("Entropy change dH by sign of A, nats", caption, axes)


def token_shares(run: RunRecord) -> Chart:
    """Share of tokens under the KL penalty and, if there is a weighting, of those that it affects."""
    curves, share = run.curves, run.curves["tepo/kl_mask_share"]
    masked = [line(curves, share, GREEN, "tokens under the mask")]
    if "tepo/mask_below_noise" in curves:
        noise = share * curves.between("tepo/mask_below_noise")
        masked.append(band(curves, np.zeros_like(noise), noise, GREY, "of these, dH below the noise floor"))
    axes = [ChartAxis(masked, format="percent", least=1e-2)]
    if "weighting/affected_share" in curves:
        affected = line(curves, "weighting/affected_share", PURPLE, "tokens that the weighting acts on")
        axes.append(ChartAxis([affected], format="percent", least=1e-4))
    return Chart("KL mask and weighting" if len(axes) > 1 else "KL mask", "Grey: masked by rounding alone.", axes)


def constraints(run: RunRecord) -> Chart:
    """Share of tokens whose ratio is clipped, and the KL term, which only the k1 estimator can make negative."""
    curves, kl = run.curves, run.curves["loss/kl"]
    clipped = [
        line(curves, "loss/clip_fraction_high", RED, "tokens clipped: upper bound"),
        line(curves, "loss/clip_fraction_low", BLUE, "lower bound"),
    ]
    axes = [
        ChartAxis(clipped, format="percent", least=1e-3),
        ChartAxis([line(curves, kl, GREEN, "KL term, nats per token")], format="small", least=None if (kl < 0).any() else 1e-6),
    ]
    caption = "The constraints on the policy: the bounds of the ratio, and the KL under the mask."
    return Chart("Clipping and KL term", caption, axes)


def mismatch(run: RunRecord) -> Chart:
    """Log-prob difference between engine and actor and, if present, the weight that corrects for it."""
    curves, limit = run.curves, run.cfg.sync.max_logprob_diff
    series = [_positive(run, f"rollout/logprob_diff_{name}", color, name) for name, color in (("max", ORANGE), ("mean", BLUE))]
    rules = [ReferenceLine(limit, BLUE, f"limit of the mean {limit:g}")]
    axes = [ChartAxis(series, rules, scale="log")]
    if "correction/weight_mean" in curves:
        axes.append(ChartAxis([line(curves, "correction/weight_mean", PURPLE, "mean correction weight")], [ReferenceLine(1.0)]))
    caption = "Engine and actor on the same tokens: growth means that they no longer agree."
    return Chart("Rollout/train log-prob difference, nats", caption, axes)


def seconds(run: RunRecord) -> Chart:
    """Seconds of each step by phase, stacked."""
    curves, ahead = run.curves, run.cfg.rollout.max_staleness > 0
    layers = [(name, np.nan_to_num(curves[f"seconds/{name}"]), c) for name, c in (PHASES_AHEAD if ahead else PHASES).items()]
    known = np.sum([height for _, height, _ in layers], axis=0)
    layers.append(("other", np.clip(np.nan_to_num(curves["seconds/total"]) - known, 0, None), GREY))
    series, bottom = [], np.zeros_like(curves.steps)
    for name, height, color in layers:
        series.append(Series("bar", name.replace("_", " "), color, curves.steps, [bottom, bottom + height]))
        bottom = bottom + height
    caption = "Stacked: what training spent each step on."
    if ahead:
        series.append(line(curves, "seconds/rollout", INK, "rollout"))
        caption += " The line: rollouts, which were sampled meanwhile."
    return Chart("Seconds per step", caption, [ChartAxis(series, least=0.0)])


def time_shares(run: RunRecord) -> str:
    """Return what share of the last steps each phase took, as text; shares below half a percent are left out."""
    curves, total = run.curves, at_end(run.curves["seconds/total"])
    phases = PHASES_AHEAD if run.cfg.rollout.max_staleness > 0 else PHASES
    means = {name: at_end(curves[f"seconds/{name}"]) for name in phases}
    shares = [f"{name.replace('_', ' ')} {mean / total:.0%}" for name, mean in means.items() if mean / total >= 0.005]
    return f"of a step's time: {', '.join(shares)}" if shares and total > 0 else ""


def throughput(run: RunRecord) -> Chart:
    """Tokens per second of the whole step, and the shares of padding and pipeline bubbles."""
    curves, bubbles = run.curves, "packing/bubble_share"
    speed = line(curves, "tokens_per_second", BLUE, "trained tokens per second, prompts too")
    shares = [line(curves, "packing/padding_share", ORANGE, "padding")]
    shares += [line(curves, bubbles, PURPLE, "pipeline bubble")] if bubbles in curves else []
    shares += [line(curves, "mfu", GREEN, "MFU of the trainer's phases")] if "mfu" in curves else []
    caption = "Padding and bubbles are shares of a step's work that teach nothing."
    return Chart(
        "Throughput and layout", caption, [ChartAxis([speed], least=0.0), ChartAxis(shares, format="percent", least=0.01)]
    )


def memory(run: RunRecord) -> Chart | None:
    """The most memory that any phase of a step held, for each kind that is measured; None if none is."""
    curves, keys = run.curves, run.curves.named("memory/")
    if not keys:
        return None
    kinds = sorted({key.rpartition("_")[2] for key in keys})
    series = [
        line(curves, np.fmax.reduce([curves[key] for key in keys if key.endswith(f"_{kind}")]), color, kind)
        for kind, color in zip(kinds, (BLUE, ORANGE, GREEN, PURPLE, RED), strict=False)
    ]
    caption = "Memory of the rank that holds most, and of all servers together."
    return Chart("Memory, GiB, most of any phase", caption, [ChartAxis(series, least=0.0)])


def cross_entropy(run: RunRecord) -> Chart:
    """Loss of fine-tuning, and that of the held-out conversations at the updates that measured it."""
    curves = run.curves
    series = [line(curves, "sft/loss", BLUE, "conversations of the update")]
    if "sft/eval_loss" in curves:
        series.append(line(curves, curves.between("sft/eval_loss"), ORANGE, "held-out conversations"))
    caption = "A held-out loss that rises while the other falls: the model learns by heart."
    return Chart("Cross-entropy, nats per token", caption, [ChartAxis(series, least=0.0)])


def gradients(run: RunRecord) -> Chart:
    """Gradient norm and tokens of each update of fine-tuning."""
    top = ChartAxis([line(run.curves, "actor/grad_norm", ORANGE, "gradient norm before clipping")], least=0.0)
    bottom = ChartAxis([line(run.curves, "sft/learned_tokens", BLUE, "tokens that are learned")], least=0.0)
    caption = "A sudden large gradient precedes a loss that rises."
    return Chart("Gradient norm and tokens of an update", caption, [top, bottom])


@dataclass(frozen=True)
class PaperFigure:
    """One plot of the paper's figures, drawn from a run."""

    title: str
    label: str
    color: str
    caption: str
    format: str = ""
    least: float | None = None
    seconds: bool = False  # whether the paper's two means are drawn too. The axis is logarithmic then: machines differ a lot.

    def chart(self, run: RunRecord, key: str) -> Chart:
        """Return the plot of a run."""
        means = [
            ReferenceLine(mean, color, f"{name} in the paper, {mean:.0f} s")
            for (name, mean), color in zip(SECONDS.items(), (GREEN, ORANGE), strict=True)
        ]
        if self.seconds:
            axis = ChartAxis([_positive(run, key, self.color, self.label)], means, scale="log")
        else:
            axis = ChartAxis([line(run.curves, key, self.color, self.label)], format=self.format, least=self.least)
        return Chart(self.title, self.caption, [axis])


PAPER = {
    "loss/clip_fraction": PaperFigure(
        title="Figure 2a: clip ratio",
        label="tokens clipped",
        color=RED,
        caption=f"Figure 2a of {SOURCE}: TEPO's is below that of DAPO/GRPO. It prints no values.",
        format="percent",
        least=1e-3,
    ),
    "seconds/total": PaperFigure(
        title="Figure 2b: seconds per step",
        label="this run",
        color=BLUE,
        caption=f"Figure 2b of {SOURCE}: 338 s for TEPO, 357 s for DAPO/GRPO, machines not named.",
        seconds=True,
    ),
    "reward/mean": PaperFigure(
        title="Figure 3a: reward",
        label="reward of rollouts",
        color=ORANGE,
        caption=f"Figure 3a of {SOURCE}: TEPO's is steadier and higher. It prints no values.",
        format="percent",
    ),
    "actor/grad_norm": PaperFigure(
        title="Figure 3b: gradient norm",
        label="before gradient clipping",
        color=PURPLE,
        caption=f"Figure 3b of {SOURCE}: TEPO's is higher throughout. It prints percent, but not of what.",
        least=0.0,
    ),
}
FINE_TUNING = (cross_entropy, gradients, throughput)
_SECTIONS: dict[str, tuple[Callable[[RunRecord], Chart | None], ...]] = {
    "Learning": (learning, entropy, updates, sampling, lost),
    "Objective": (ratio, entropy_change, token_shares, constraints),
    "Mismatch and time": (mismatch, seconds, throughput, memory),
}


def sections(run: RunRecord) -> dict[str, list[Chart]]:
    """Return the charts of one run by section."""
    if run.fine_tuned:
        return {"Learning": [panel(run) for panel in FINE_TUNING]}
    of_run = {name: [chart for panel in panels if (chart := panel(run))] for name, panels in _SECTIONS.items()}
    of_paper = [figure.chart(run, key) for key, figure in PAPER.items() if key in run.curves]
    return of_run | {"Figures 2 and 3 of the paper": of_paper}


def _positive(run: RunRecord, key: str, color: str, label: str) -> Series:
    """Return a curve without the values that a logarithmic scale cannot show."""
    values = run.curves[key]
    return line(run.curves, np.where(values > 0, values, math.nan), color, label)
