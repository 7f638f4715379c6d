"""The kill matrix: which test notices which bug. Written to a file of results and a page of the documentation."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.copies import Verdict
from tests.mutants.exhibits import all_exhibits, by_kind

RESULTS, PAGE = "benchmarks/results/mutants.json", "docs/mutants.md"
_INTRODUCTION = """# The museum of silent bugs

Every row is a bug that raises no error. Many were published by users of other RL backends; the others were found in this
one, or are easy to make in it. `make mutants` puts each into a copy of the tree, as a small change of this package, and runs
the tests that are to notice it. This page is written by `python -m tests.mutants --write`; what is changed is in
`tests/mutants/exhibits/`.
"""


def write(root: Path, verdicts: Sequence[Verdict]) -> None:
    """Add the verdicts to the results of other exhibits, and write the page of all current exhibits."""
    path = root / RESULTS
    known = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    known |= {verdict.name: asdict(verdict) for verdict in verdicts}
    names = [exhibit.name for exhibit in all_exhibits()]
    path.write_text(json.dumps([known[name] for name in names if name in known], indent=1) + "\n")
    (root / PAGE).write_text(page(known))


def page(verdicts: dict[str, dict[str, object]]) -> str:
    """Return the page."""
    lines = [_INTRODUCTION]
    for kind, exhibits in by_kind().items():
        lines += [f"## {kind.capitalize()}", "", "| bug | source | what it cost | noticed by | s |", "|---|---|---|---|---|"]
        for exhibit in exhibits:
            verdict = verdicts.get(exhibit.name, {})
            by = f"`{verdict['caught_by']}`" if verdict.get("caught_by") else "**nobody**" if verdict else "not run"
            by += f"; in a run: {exhibit.guard}" if exhibit.guard else ""
            cells = (exhibit.bug, exhibit.source, exhibit.cost, by, str(verdict.get("seconds", "")))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
