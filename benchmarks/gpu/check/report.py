"""The results of the check: a JSON file that is rewritten whenever a line is known, and the same as a page in Markdown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.parts import PARTS, CheckPart, CheckTask

NOT_MEASURED = "not measured"
SEVERITY = ("failed", "cut off", "no time left", "running", "waiting", "passed", "skipped")  # statuses, the worst one first
ON_CPU = "Rehearsed on a CPU at tiny sizes, which tests the check: nothing here is about a GPU."
INTRODUCTION = """`python tools/gpu_check.py` writes this page ([how to run it](index.md#check-a-gpu-machine)). Each part names
the card, the day and the commit that it was measured on. A share or a ratio refers to a limit that was measured in the same
minute. Without Transformer Engine, an engine and a second card, FP8, vLLM and SGLang on CUDA, and NCCL over several cards are
not measured. Inside the image the same command runs what it has."""
COMMIT_DIGITS = 8
TIMELINE = "gpu_step.png"
Result = dict[str, Any]  # of one part


@dataclass
class TaskResult:
    """The result of a task so far."""

    task: CheckTask
    status: str
    lines: Sequence[Mapping[str, Any]]  # its reported lines; the last one of a name counts
    why: str  # reason of the status, and of lines that are missing
    more: Mapping[str, Any]

    def all_lines(self) -> list[dict[str, Any]]:
        """Return the reported lines and, as not measured, those that are missing."""
        by_name = {name: _missing(name, self.why) for name in self.task.lines}
        by_name |= {line["name"]: dict(line) for line in self.lines}
        for line in by_name.values():
            if line["status"] == "running" and self.status != "running":
                line |= {"status": "failed", "why": "; ".join(filter(None, (self.why, line["why"])))}
        return list(by_name.values())


def result_of(part: CheckPart, tasks: Sequence[TaskResult], **more: Any) -> Result:
    """Return a part's result."""
    names: dict[str, list[str]] = {}
    for x in tasks:
        names.setdefault(x.why, []).append(x.task.name)
    reasons = [why if len(n) == len(tasks) else f"{', '.join(n)}: {why}" for why, n in names.items() if why]
    seconds = sum(x.more.get("seconds", 0.0) for x in tasks)
    return {
        "part": part.name, "title": part.title, "status": min((x.status for x in tasks), key=SEVERITY.index),
        "why": "; ".join(reasons), "lines": [line for x in tasks for line in x.all_lines()],
        **({"seconds": round(seconds, 1)} if seconds else {}),
        "tasks": [{"task": x.task.name, "status": x.status, "why": x.why, **x.more} for x in tasks], **more,
    }  # fmt: skip


def _missing(name: str, why: str) -> dict[str, Any]:
    return {"name": name, "status": "skipped", "value": None, "unit": "", "why": why or "not reported"}


def status_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return "failed" if a line failed, "skipped" if all were skipped, else "passed"."""
    statuses = {line["status"] for line in lines}
    return "failed" if "failed" in statuses else "skipped" if statuses <= {"skipped"} else "passed"


def merged(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Return the new results and the old ones of other parts, in the order of the parts.

    A part that measured nothing does not replace one that did before: its lines that the old one lacks are added to it.
    """
    by_part = {result["part"]: result for result in old}
    for result in new:
        before = by_part.get(result["part"], result)
        if not _ran(result) and _ran(before):
            names = {line["name"] for line in before["lines"]}
            added = [line for line in result["lines"] if line["name"] not in names]
            result = before | {"title": result["title"], "lines": [*before["lines"], *added]}
        by_part[result["part"]] = result
    return [by_part[part.name] for part in PARTS if part.name in by_part]


def _ran(result: Result) -> bool:
    """Return whether a part has run: a line is known, or it failed before its first one."""
    return result["status"] in ("failed", "cut off") or any(line["status"] != "skipped" for line in result["lines"])


def load(file: Path) -> list[Result]:
    """Return what `save` wrote; [] if the file does not exist."""
    found: list[Result] = json.loads(file.read_text()) if file.exists() else []
    return found


def save(file: Path, page: Path, results: Sequence[Result]) -> None:
    """Write the JSON file and the page. Each replaces its predecessor atomically, so that a kill leaves a complete file."""
    for path, text in ((file, json.dumps(results, indent=1)), (page, markdown(results))):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text + "\n")
        partial.replace(path)


def markdown(results: Sequence[Result]) -> str:
    """Return the page: a table per part."""
    text = ["# Measured on one GPU", "", INTRODUCTION]
    if any(result.get("device") == "CPU" for result in results):
        text += ["", ON_CPU]
    for result in results:
        text += ["", f"## {result['title']}", "", outcome_line(result)]
        if traces([result]):
            text += ["", f"![Share of the time in which each kind of kernel runs]({TIMELINE})"]
        known = [line for line in result["lines"] if line["status"] != "skipped"]
        if known:
            rows = [("line", "result", "remark"), ("---", "---", "---")]
            rows += [(line["name"], shown(line), _cell(line["why"])) for line in known]
            text += ["", *("| " + " | ".join(row) + " |" for row in rows)]
        missing: dict[str, list[str]] = {}
        for line in result["lines"]:
            if line["status"] == "skipped":
                missing.setdefault(line["why"], []).append(line["name"])
        text += [x for why, names in missing.items() for x in ("", f"{NOT_MEASURED.capitalize()} ({why}): {'; '.join(names)}.")]
    return "\n".join(text)


def outcome_line(result: Result) -> str:
    """Return a part's outcome in one line."""
    lines = result["lines"]
    counts = {status: sum(line["status"] == status for line in lines) for status in ("passed", "measured", "failed", "skipped")}
    words = ", ".join(f"{n} {NOT_MEASURED if status == 'skipped' else status}" for status, n in counts.items() if n)
    took = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
    known = (result.get("device"), result.get("date"), result.get("commit", "")[:COMMIT_DIGITS])
    where = f" ({', '.join(filter(None, known))})" if result.get("device") else ""
    return f"{result['part']}: {result['status']}{took}{where}: {words}" + (f". {result['why']}" if result["why"] else "")


def shown(line: Mapping[str, Any]) -> str:
    """Return a line's result as the table shows it."""
    value = line["value"]
    text = "" if value is None else value if isinstance(value, str) else f"{value:.3g} {line['unit']}".strip()
    return text if line["status"] == "measured" else f"{line['status']} {text}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:400]


def traces(results: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return what `run_step.kernel_times` measured, by the name of its line."""
    lines = (line for result in results for line in result["lines"])
    return {line["name"]: line["trace"] for line in lines if line.get("trace", {}).get("timeline")}


def draw_timeline(found: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draw for each trace the share of the time in which each kind of kernel runs, from the step's start to its end."""
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
