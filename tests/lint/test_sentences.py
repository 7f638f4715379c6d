"""Docstrings, comments and messages are plain English: first lines are sentences, and no private word occurs."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tepo_megatron", "launch", "tools", "examples", "benchmarks")

FIRST_WORDS = re.compile(r"(What|Of|Whether|How)\b")

# Words of a private dialect, each as a whole word. "x stands for y" is English; "x stands there" is not.
BANNED = re.compile(
    r"\b(mend|mends|mended|mending|told|beside|anew|bears|rooms?|fellows?"
    r"|stands(?! for\b)|so many(?! [a-z]+ that\b)|boxes(?! drawn| drawing))\b",
    re.IGNORECASE,
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[Path, ast.Module]:
    """Return the syntax tree of every Python file of the checked folders."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in files}


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Definition) and (text := ast.get_docstring(node)):
            yield (node.body[0].lineno if node.body else 1), text


def prose(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment and string literal, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_two_public_classes_share_a_name():
    found = Counter(n.name for tree in modules().values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert [name for name, count in found.items() if count > 1 and not name.startswith("_")] == []


def test_first_lines_are_sentences():
    wrong = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path, tree in modules().items()
        for line, text in docstrings(tree)
        if FIRST_WORDS.match(text)
    ]
    assert not wrong, "Begin the docstring with a subject or an imperative:\n" + "\n".join(wrong)


def test_no_private_words():
    wrong = [
        f"{place(path, line)}: {match.group()}"
        for path, tree in modules().items()
        for line, text in prose(path.read_text(), tree)
        for match in BANNED.finditer(text)
    ]
    assert not wrong, "Use the plain word (STYLE of CONTRIBUTING.md):\n" + "\n".join(wrong)


def test_names_in_prose_are_in_the_modules_that_they_name():
    """`module.Name` where a module of ours has lost the name, or is gone."""
    package = {p: tree for p, tree in modules().items() if p.is_relative_to(ROOT / "tepo_megatron")}
    names: dict[str, set[str]] = {}
    for path, tree in package.items():
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
            name = getattr(target, "name", getattr(target, "id", None))
            names.setdefault(path.parent.name if path.stem == "__init__" else path.stem, set()).add(str(name))
    foreign = {"tokenizers", "torch", "dist", "losses"}  # `losses` re-exports
    wrong = [
        f"{place(path, line)} {match[0]}"
        for path, tree in package.items()
        for line, text in prose(path.read_text(), tree)
        for match in re.finditer(r"`(\w+)\.([A-Z]\w+)`", text)
        if match[1] not in foreign and match[2] not in names.get(match[1], ())
    ]
    assert wrong == []
