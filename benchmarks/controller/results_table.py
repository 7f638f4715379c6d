"""The file that keeps the figures of the data path before a change and now, and its table for readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.controller.parts import LARGEST

STATES = ("before", "now")
# state -> part -> what `part` found, with machine and commit; see `as_found`
Results = dict[str, dict[str, Any]]


def load_results(path: Path) -> Results:
    """Return what `save_results` wrote; {} if the file does not exist."""
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    return results


def save_results(path: Path, results: Results) -> None:
    """Write the figures as JSON and, next to it, their tables as Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(results))


def markdown(results: Results) -> str:
    """Return the tables: rows that grow with the step, single figures, and where they were measured."""
    sizes = sorted({size for found in results.values() for part in found.values() for size in part["sizes"]} - {LARGEST})
    head = ["part", "", *(f"{size:g}M" for size in sizes), f"{LARGEST:g}M", "exponent", "peak MiB", "target", ""]
    grown, single = [head], [["figure", "", "value", "target", "", "note"]]
    for name in dict.fromkeys(name for state in STATES for name in results.get(state, {})):
        parts = {state: results[state][name] for state in STATES if name in results.get(state, {})}
        for title in dict.fromkeys(row["title"] for part in parts.values() for row in part["rows"]):
            for state, part in parts.items():
                grown += [_grown(state, row, sizes, part["sizes"]) for row in part["rows"] if row["title"] == title]
        for title in dict.fromkeys(figure["title"] for part in parts.values() for figure in part["figures"]):
            for state, part in parts.items():
                single += [_single(state, figure) for figure in part["figures"] if figure["title"] == title]
        for state, part in parts.items():
            if part["error"]:
                single.append([name, state, "not measured", "", "", part["error"]])
    where = [line for state in STATES if state in results for line in _where(state, results[state])]
    return "\n".join(
        [
            "# The rollout data path at the sizes of a cluster",
            "",
            "CPU seconds of the process that does the work, by millions of response tokens of a step (128 x 16 samples of",
            f"6,000 tokens are 12M). x: extrapolated to {LARGEST:g}M by the exponent, a least-squares fit of the logarithms.",
            "The target is in CPU seconds per million tokens; every exponent has to be at most 1.1. The command",
            "`python -m benchmarks.controller` measures the state `now` again.",
            "",
            *_lines(grown),
            "",
            *_lines(single),
            "",
            *where,
            "",
        ]
    )


def _grown(state: str, row: Mapping[str, Any], sizes: Sequence[float], measured: Sequence[float]) -> list[str]:
    at = dict(zip(measured, row["points"], strict=False))
    cells = [f"{at[size]['cpu_seconds']:.3g}" if size in at else "" for size in sizes]
    peaks = [point["peak_mib"] for point in row["points"] if point["peak_mib"] is not None]
    largest = f"{row['at_largest']:.3g}{' x' if row['extrapolated'] else ''}"
    target = "" if row["target"] is None else f"<= {row['target']:g}"
    peak = f"{max(peaks):.0f}" if peaks else ""
    return [row["title"], state, *cells, largest, f"{row['exponent']:.2f}", peak, target, _outcome(row["met"])]


def _single(state: str, figure: Mapping[str, Any]) -> list[str]:
    value = "did not run" if figure["value"] is None else f"{figure['value']:.3g} {figure['unit']}".strip()
    target = (figure["target"] or "").removeprefix("value ")
    return [figure["title"], state, value, target, _outcome(figure["met"]), figure["note"]]


def _outcome(met: bool | None) -> str:
    return {None: "reported", True: "met", False: "MISSED"}[met]


def _where(state: str, parts: Mapping[str, Any]) -> list[str]:
    """Return a line for each commit of a state: the machine, and the load during its parts."""
    lines = []
    for commit in dict.fromkeys(part["commit"] for part in parts.values()):
        measured = {name: part for name, part in parts.items() if part["commit"] == commit}
        machine = next(iter(measured.values()))["machine"]
        loads = [part["machine"]["load"][0] for part in measured.values()]
        what = (
            f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, load {min(loads):g} to {max(loads):g}"
        )
        lines.append(f"- {state}: commit {commit}; {what}: {', '.join(measured)}")
    return lines


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return lines
