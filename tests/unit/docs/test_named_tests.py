"""Every test and every file under tests/ that a page names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.docs.pages import PAGES

# "tests/folder/test_file.py::test_name"; a slash before it is that of a link into another repository
NAMED = re.compile(r"(?<![\w./-])(tests/[\w./-]*\w)(?:::(\w+))?")
# `test_name` alone
ALONE = re.compile(r"`(test_\w+)(?:\[[^`]*)?`")


def functions(path: Path) -> set[str]:
    """Return the names of a file's functions."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def missing(text: str, known: set[str]) -> Iterator[str]:
    """Yield what a text names and what does not exist. `known`: names of all tests."""
    for name, test in NAMED.findall(text):
        path = Path(name)
        if not path.exists() or (test and test not in functions(path)):
            yield f"{name}::{test}" if test else name
    yield from (test for test in ALONE.findall(text) if test not in known)


def test_named_tests_exist() -> None:
    known = set().union(*(functions(path) for path in Path("tests").rglob("test_*.py")))
    pages = {str(page): page.read_text() for page in PAGES}
    assert sum(len(NAMED.findall(text)) for text in pages.values()) > 100
    assert [(page, name) for page, text in pages.items() for name in missing(text, known)] == []


def test_a_missing_test_is_found() -> None:
    here = "tests/unit/docs/test_named_tests.py"
    text = (
        f"`tests/no.py`, `{here}::test_no`, `test_no_either[3]`, `{here}::functions`, `test_yes`, https://host/tests/there.py"
    )
    assert list(missing(text, {"test_yes"})) == ["tests/no.py", f"{here}::test_no", "test_no_either"]
