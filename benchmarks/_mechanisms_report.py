"""The tables of `benchmarks.mechanisms`, made from the JSON that it writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tepo_megatron.evaluation.statistics import standard_error, student_95
from tepo_megatron.evaluation.tables import NOTHING

_BASELINE = "grpo"
_EXPLANATION = """\
Written by `python -m benchmarks.mechanisms` (docs/mechanisms.md). Means over {count} seeds, with 95 % intervals over seeds by
Student's t. Accuracy, entropy (nats, mean over states) and KL (nats per token, to the policy that sampled, mean over updates)
are closed forms. Points: percentage points of accuracy over grpo, paired by seed."""


def markdown(found: Mapping[str, Any]) -> str:
    """Return the predictions with their verdicts, and a table for each regime."""
    parts = ["# Mechanisms of the methods on a small task", _EXPLANATION.format(count=len(found["seeds"]))]
    rows = [["prediction", "regime", "origin", "larger", "smaller", "effect [95 %]", "verdict"]]
    rows += [_prediction(x) for x in found["predictions"]]
    parts += ["## Predictions", _table(rows)]
    for regime, arms in found["runs"].items():
        settings = ", ".join(f"{name} {value:g}" for name, value in found["settings"][regime].items())
        rows = [["method", "accuracy, %", f"points over {_BASELINE}", "entropy", "length", "clipped, %", "masked, %", "KL"]]
        rows += [_arm(name, x["measures"], arms.get(_BASELINE, {}).get("measures")) for name, x in arms.items()]
        start = statistics.fmean(next(iter(arms.values()))["measures"]["start accuracy"])
        parts += [f"## Regime {regime}", f"Start accuracy {100 * start:.1f} %; {settings}.", _table(rows)]
    at = f"Commit {found['commit']}, torch {found['versions']['torch']}."
    return "\n\n".join([*parts, at]) + "\n"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half of the 95 % interval over seeds, by Student's t; the half is 0 for one value."""
    return statistics.fmean(values), student_95(max(1, len(values) - 1)) * (standard_error(values) or 0.0)


def _prediction(x: Mapping[str, Any]) -> list[str]:
    factor = "" if x["factor"] == 1 else f"{x['factor']:g} x "
    (first, measure), (second, other) = x["larger"], x["smaller"]
    sides = f"{first}, {measure}: {x['larger_mean']:.4g}", f"{factor}{second}, {other}: {x['smaller_mean']:.4g}"
    low, high = x["interval"]
    return [x["claim"], x["regime"], x["origin"], *sides, f"{x['effect']:+.4g} [{low:+.4g}, {high:+.4g}]", x["verdict"]]


def _arm(name: str, measures: Mapping[str, Sequence[float]], baseline: Mapping[str, Sequence[float]] | None) -> list[str]:
    accuracy, half = interval(measures["accuracy"])
    points = NOTHING
    if baseline is not None and name != _BASELINE:
        paired = [a - b for a, b in zip(measures["accuracy"], baseline["accuracy"], strict=True)]
        points = "{:+.1f} ± {:.1f}".format(*(100 * x for x in interval(paired)))
    means = {key: statistics.fmean(values) for key, values in measures.items()}
    return [
        name, f"{100 * accuracy:.1f} ± {100 * half:.1f}", points, f"{means['entropy']:.3f}", f"{means['length']:.2f}",
        f"{100 * means['clipped']:.2f}", f"{100 * means['masked']:.1f}", f"{means['KL to the old policy']:.4f}",
    ]  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
