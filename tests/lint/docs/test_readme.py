"""README.md, the tour and docs/ agree with the code in what can be looked up."""

import ast
import re
from pathlib import Path

import pytest

from tepo_megatron.losses import OBJECTIVES
from tools import config_reference
from tools.structure import TOUR, places

README, OBJECTIVES_PAGE = Path("README.md").read_text(), Path("docs/objectives.md").read_text()
PAGES = {
    page: Path(page).read_text()
    for page in ("README.md", "docs/comparison.md", "docs/objectives.md", "docs/tour.md", "examples/paper/README.md")
}


def test_the_number_of_settings() -> None:
    row = next(line for line in PAGES["docs/comparison.md"].splitlines() if line.startswith("| Settings"))
    assert re.search(r"\d+", row.split("|")[2]).group() == str(config_reference.count(config_reference.page()))


def test_every_method_is_named() -> None:
    assert f"names {len(OBJECTIVES)} methods" in OBJECTIVES_PAGE and f"{len(OBJECTIVES) - 1} other objectives" in README
    assert all(f"`{name}`" in OBJECTIVES_PAGE for name in OBJECTIVES)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    """Links, and words in backticks with a folder and an ending, are files of this repository."""
    roots = (Path(), Path("tepo_megatron"), Path(page).parent)
    named = set(re.findall(r"`([\w.-]+/[\w./-]*\.(?:py|md|yaml|csv))`", PAGES[page]))
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page])}
    elsewhere = ("recipe/", "verl/")  # in other projects
    names = [name for name in sorted(named | linked) if not name.startswith(elsewhere)]
    assert len(names) > 5 or page in ("docs/comparison.md", "docs/objectives.md")
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []


def test_the_readme_is_short() -> None:
    """Two screens. A line of code may be longer than one of prose."""
    lines, in_code = README.splitlines(), False
    assert len(lines) <= 120
    for line in lines:
        in_code ^= line.startswith("```")
        assert in_code or len(line) <= 160, line


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
