"""The tour names files and functions that exist, and follows its four things."""

import ast
from pathlib import Path

from tools.structure import TOUR, places


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
