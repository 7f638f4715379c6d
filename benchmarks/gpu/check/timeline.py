"""Draw the timeline of a traced step: the share of the time in which each kind of kernel runs, from its start to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "gpu_step.png"


def traces(results: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return what `kernel_times` found, by the name of its line."""
    lines = (line for result in results for line in result["lines"])
    return {line["name"]: line["trace"] for line in lines if line.get("trace", {}).get("timeline")}


def draw(found: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draw one panel for each trace."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), squeeze=False)[:, 0]
    kinds = list(dict.fromkeys(kind for trace in found.values() for kind in trace["kinds"]))
    for ax, (name, trace) in zip(axes, found.items(), strict=True):
        shares = [[100 * x for x in trace["timeline"].get(kind, ())] for kind in kinds]
        bins = max(map(len, shares))
        times = [trace["seconds"] * i / bins for i in range(bins)]
        ax.stackplot(times, [x or [0.0] * bins for x in shares], labels=kinds, colors=[f"C{i % 10}" for i in range(len(kinds))])
        ax.set(title=f"{name}: {trace['seconds']:.3g} s", xlim=(0, trace["seconds"]), ylim=(0, 105), ylabel="% of the time")
    axes[-1].set_xlabel("seconds from the first kernel")
    axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(file, dpi=110)
