"""The tour names files and functions that exist, and follows its four things."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.structure import ROLLOUT, TOUR, WEIGHT, hops, places


def defined(path: Path) -> set[str]:
    """Return the qualified names of a file's functions, classes and methods."""

    def below(node: ast.AST, above: str) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found |= {above + child.name} | below(child, f"{above}{child.name}.")
        return found

    return below(ast.parse(path.read_text()), "")


def test_every_place_of_the_tour_exists() -> None:
    named = places(TOUR.read_text())
    assert len(named) > 50
    assert [(file, name) for file, name in named if not Path(file).is_file() or name not in defined(Path(file))] == []


def test_every_step_of_the_tour_names_a_place() -> None:
    steps = [line for line in TOUR.read_text().splitlines() if line.partition(".")[0].isdigit()]
    assert [step for step in steps if not places(step)] == []


def test_the_tour_follows_four_things() -> None:
    headings = [line for line in TOUR.read_text().splitlines() if line.startswith("#")]
    wanted = ["## A prompt", f"### {ROLLOUT}", "## A weight", f"### {WEIGHT}", "## A config key", "## A log-prob"]
    assert [heading for heading in headings if heading in wanted] == wanted
    assert all(len(hops(heading)) > 5 for heading in (ROLLOUT, WEIGHT))
