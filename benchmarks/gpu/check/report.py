"""The results of the check: a JSON file that is rewritten after each part, and its table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.parts import PARTS, CheckPart

NOT_MEASURED = "not measured"
Result = dict[str, Any]  # of one part


def result_of(part: CheckPart, status: str, lines: Sequence[Mapping[str, Any]], why: str = "", **more: Any) -> Result:
    """Return a part's result. Lines that it should have but did not report are added as not measured.

    Args:
        part: The part.
        status: Status of the part.
        lines: The reported lines.
        why: Reason of the status, and of the missing lines.
        more: Further values, for the JSON file.
    """
    there = {line["name"] for line in lines}
    missing = [
        {"name": n, "status": "skipped", "value": None, "unit": "", "why": why or "not reported"}
        for n in part.lines
        if n not in there
    ]
    return {"part": part.name, "title": part.title, "status": status, "why": why, "lines": [*lines, *missing], **more}


def status_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return "failed" if a line failed, "skipped" if all were skipped, else "passed"."""
    found = {line["status"] for line in lines}
    return "failed" if "failed" in found else "skipped" if found <= {"skipped"} else "passed"


def merged(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Return the new results and the old ones of other parts, in the order of the parts.

    A skipped part does not replace one that ran before.

    Args:
        old, new: Results of parts.
    """
    found = {result["part"]: result for result in old}
    for result in new:
        if result["status"] != "skipped" or found.get(result["part"], result)["status"] == "skipped":
            found[result["part"]] = result
    return [found[part.name] for part in PARTS if part.name in found]


def load(file: Path) -> list[Result]:
    """Return what `save` wrote; [] if the file does not exist."""
    found: list[Result] = json.loads(file.read_text()) if file.exists() else []
    return found


def save(file: Path, results: Sequence[Result]) -> None:
    """Write the JSON file and the table. Each replaces its predecessor atomically, so that a kill leaves a complete file.

    Args:
        file: The JSON file.
        results: Results of parts.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((file, json.dumps(results, indent=1)), (file.with_suffix(".md"), markdown(results))):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text + "\n")
        partial.replace(path)


def markdown(results: Sequence[Result]) -> str:
    """Return one table per part."""
    text = ["# One GPU, checked by `python tools/gpu_check.py`"]
    for result in results:
        text += ["", f"## {result['title']}", "", outcome_line(result), ""]
        rows = [("line", "result", "remark"), ("---", "---", "---")]
        rows += [(line["name"], shown(line), _cell(line["why"])) for line in result["lines"]]
        text += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(text)


def outcome_line(result: Result) -> str:
    """Return a part's outcome in one line."""
    lines = result["lines"]
    counts = {status: sum(line["status"] == status for line in lines) for status in ("passed", "measured", "failed", "skipped")}
    words = ", ".join(f"{n} {NOT_MEASURED if status == 'skipped' else status}" for status, n in counts.items() if n)
    took = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
    where = f" ({result['device']})" if result.get("device") else ""
    return f"{result['part']}: {result['status']}{took}{where}: {words}" + (f". {result['why']}" if result["why"] else "")


def shown(line: Mapping[str, Any]) -> str:
    """Return a line's result as the table shows it."""
    if line["status"] == "skipped":
        return NOT_MEASURED
    value = line["value"]
    text = "" if value is None else value if isinstance(value, str) else f"{value:.3g} {line['unit']}".strip()
    return text if line["status"] == "measured" else f"{line['status']} {text}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:400]
