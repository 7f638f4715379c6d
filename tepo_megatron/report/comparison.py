"""Compare several runs: curves in shared axes, final figures, evaluations, and the settings that differ."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tepo_megatron.config import Config
from tepo_megatron.config.io import plain
from tepo_megatron.report import evaluations
from tepo_megatron.report.chart import BLUE, GREEN, ORANGE, PURPLE, RED, Chart, ChartAxis, Series, points
from tepo_megatron.report.evaluations import HeldOut
from tepo_megatron.report.panels import PAPER
from tepo_megatron.report.run import NOTHING, QUANTITIES, Quantity, RunRecord, at_end

COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED)
DASHES = ("-", "--", ":", "-.")  # used after the colours run out
_FROM_ZERO = (
    "sft/loss",
    "sft/eval_loss",
    "actor/entropy",
    "actor/grad_norm",
    "rollout/response_tokens_mean",
    "seconds/total",
    "tokens_per_second",
)


def names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs, or their folders if two runs have the same name."""
    names = [run.cfg.name for run in runs]
    return names if len(set(names)) == len(runs) else [str(run.folder) for run in runs]


def color(place: int) -> str:
    """Return the colour of the run at this index."""
    return COLORS[place % len(COLORS)]


def compare(runs: Mapping[str, RunRecord], evaluated: Sequence[HeldOut]) -> dict[str, Any]:
    """Return what comparison.html shows of runs, the first of which is the baseline.

    `differences`: each run's name with the paired difference of its evaluation to the first one's, in words. `settings`: rows
    (key, value in each run) of those that are not the same in all runs.
    """
    records = list(runs.values())
    rows = [_figures(q, records) for q in QUANTITIES if any(q.key in run.curves for run in records)]
    rows.insert(0, ("steps", *(f"{run.curves.steps[-1]:.0f}" for run in runs.values())))
    return {
        "charts": overlays(records),
        "headings": ["", *runs],
        "rows": rows,
        "evaluation": _accuracies(runs),
        "differences": _differences(list(runs), evaluated),
        "settings": _settings([run.cfg for run in runs.values()]),
    }


def overlays(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return a chart for each evaluation and each quantity that some run has, with a line per run."""
    shown = [quantity for quantity in QUANTITIES if any(quantity.key in run.curves for run in runs)]
    evaluated = dict.fromkeys(name for run in runs for name in run.evaluations)
    return [*(_evaluations(name, runs) for name in evaluated), *(_overlay(quantity, runs) for quantity in shown)]


def _evaluations(evaluation: str, runs: Sequence[RunRecord]) -> Chart:
    series: list[Series] = []
    for place, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        if evaluation in run.evaluations:
            series += points(run.evaluations[evaluation], color(place), name, _dash(place))
    caption = "Mean score ± standard error, clustered by problem."
    return Chart(f"Evaluation: {evaluation.replace('_', ' ')}", caption, [ChartAxis(series, format="percent")])


def _dash(place: int) -> str:
    return DASHES[place // len(COLORS) % len(DASHES)]


def _overlay(quantity: Quantity, runs: Sequence[RunRecord]) -> Chart:
    key, series = quantity.key, []
    widths = np.linspace(1.2 + 0.6 * min(4, len(runs)), 1.4, len(runs))  # decreasing, so identical curves all show
    for place, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        values = run.curves.between(key) if quantity.sparse else run.curves[key]
        series.append(Series("line", name, color(place), run.curves.steps, [values], _dash(place), float(widths[place])))
    least = 0.01 if quantity.percent else 0.0 if key in _FROM_ZERO else None
    scale = "log" if key.startswith("rollout/logprob_diff") else "linear"
    axis = ChartAxis(series, format="percent" if quantity.percent else "", scale=scale, least=least)
    return Chart(quantity.label[0].upper() + quantity.label[1:], PAPER[key].caption if key in PAPER else "", [axis])


def _figures(quantity: Quantity, runs: Sequence[RunRecord]) -> tuple[str, ...]:
    values = [at_end(run.curves[quantity.key]) for run in runs]
    others = [f"{quantity.format(v)} ({quantity.format(v - values[0], sign='+')})" for v in values[1:]]
    return (quantity.label, quantity.format(values[0]), *others)


def _accuracies(runs: Mapping[str, RunRecord]) -> Chart | None:
    """Draw the last evaluation of each run; None if no run has any."""
    rows = [
        (name, run.summary.evaluations[-1][1], run.summary.evaluations[-1][2], color(place))
        for place, (name, run) in enumerate(runs.items())
        if run.summary and run.summary.evaluations
    ]
    if not rows:
        return None
    return evaluations.accuracies(rows, "After each run; bars: 95 % intervals over problems.")


def _differences(called: Sequence[str], evaluated: Sequence[HeldOut]) -> list[tuple[str, str]]:
    """Return the difference of each run to the first one, in words."""
    rows = []
    for name, one in zip(called[1:], evaluated[1:], strict=True):
        change = evaluations.change(one.after, evaluated[0].after)
        words = f"against {called[0]}: no paired difference, because there are no scores of the same problems."
        if change is not None:
            words = (
                f"against {called[0]}, paired by problem: {change} (95 %), {change.verdict}; {change.better} problems better, "
                f"{change.worse} worse, {change.same} the same. What other seeds would change is not in the interval."
            )
        rows.append((name, words))
    return rows


def _settings(configs: Sequence[Config]) -> list[tuple[str, ...]]:
    """Return (key, value in each run) of the settings that differ, except `name`."""
    flat = [dict(_flat(plain(cfg))) for cfg in configs]
    keys = dict.fromkeys(itertools.chain.from_iterable(flat))
    rows = [(key, *(NOTHING if f.get(key) is None else str(f[key]) for f in flat)) for key in keys if key != "name"]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(tree: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Return nested settings by dotted key: {a: {b: 1}} as [("a.b", 1)]."""
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        rows += _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else [(f"{above}{key}", value)]
    return rows
