"""An exhibit of the museum, and how its bug is put into a copy of the tree.

An exhibit names a symbol, not a file, so that it follows the code when files move. It fails loudly when the symbol, or the text
in it that is to be changed, is not there exactly once: a museum that mutates nothing would say that everything is caught.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PLACES = ("tepo_megatron", "launch", "tools", "benchmarks", "tests/running")  # where symbols are looked for


class NotFound(Exception):
    """An exhibit does not fit the tree any more: correct the exhibit, or show that its bug has become impossible."""


@dataclass(frozen=True)
class Exhibit:
    """One silent bug.

    Attributes:
        source: Where the bug was published ("verl #6836"), or which of our own documents describes it.
        bug: The wrong computation, and why nobody sees it; one or two sentences.
        cost: What it cost, or would have cost.
        symbol: The function, "Class.method" or module-level name in PLACES whose source is changed.
        old: A part of that source. It occurs there exactly once, and in no other source of a symbol with that name.
        new: Replacement of that part.
        tests: Pytest's arguments for the tests that catch it.
        guard: The run-time check that stops a run with this bug, where the tests show that.
    """

    name: str
    source: str
    bug: str
    cost: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]
    guard: str = ""


def mutated(exhibit: Exhibit, root: Path) -> tuple[Path, str]:
    """Return the file of `root` that an exhibit changes, and its text afterwards.

    Raises:
        NotFound: The symbol, or the text in it, does not occur exactly once.
    """
    places, found = _symbols(root).get(exhibit.symbol, []), []
    for file, first, last in places:
        lines = (root / file).read_text().splitlines(keepends=True)
        source = "".join(lines[first - 1 : last])
        if exhibit.old and source.count(exhibit.old) == 1:
            found.append((file, "".join([*lines[: first - 1], source.replace(exhibit.old, exhibit.new), *lines[last:]])))
    if len(found) != 1:
        raise NotFound(
            f"{exhibit.name}: one {exhibit.symbol} is to have this text exactly once, and {len(found)} have, of those in "
            f"{', '.join(str(file) for file, _, _ in places) or 'no file'}:\n{exhibit.old}"
        )
    ast.parse(found[0][1])
    return found[0]


@lru_cache(maxsize=4)
def _symbols(root: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """Qualified name -> (file, first line, last line) of every function, class and module-level assignment in PLACES."""
    symbols: dict[str, list[tuple[Path, int, int]]] = {}
    for place in PLACES:
        for path in sorted((root / place).rglob("*.py")):
            for name, node in _named(ast.parse(path.read_text()).body, ""):
                decorators = [d.lineno for d in getattr(node, "decorator_list", ())]
                lines = min([node.lineno, *decorators]), node.end_lineno or node.lineno
                symbols.setdefault(name, []).append((path.relative_to(root), *lines))
    return symbols


def _named(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _named(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, ast.If | ast.Try):
            yield from _named(node.body, prefix)
