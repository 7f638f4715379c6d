"""Docstrings, comments and names under tests/ follow the project's rules for sentences.

String literals are not checked: tests quote what the program prints.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.test_sentences import BANNED, FIRST_WORDS

TESTS = Path(__file__).parents[1]
QUOTED = re.compile(r"`[^`]*`|\"[^\"\n]*\"")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    """Yield each module, class and function that has a docstring, with the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text


def first_lines(source: str) -> Iterator[str]:
    """Yield the docstrings whose first line begins with a question word or "Of"."""
    for _, text in documented(ast.parse(source)):
        if FIRST_WORDS.match(text):
            yield text.splitlines()[0]


def names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds: definitions, parameters and variables; names that it imports are not its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def banned_words(source: str) -> Iterator[str]:
    """Yield the docstrings, comments and bound names with a banned word. Quotations in them are passed over."""
    tree = ast.parse(source)
    texts = [text for _, text in documented(tree)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    for text in [*(QUOTED.sub("", text) for text in texts), *(name.replace("_", " ") for name in names(tree))]:
        if BANNED.search(text):
            yield text


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Yield public functions and methods. A method without a docstring has the contract of the interface that it implements."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (method for method in public_functions(node.body) if ast.get_docstring(method))
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def described(docstring: str) -> set[str]:
    """Return the parameters that the `Args:` block of a docstring describes."""
    block = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    return {name for names in re.findall(r"^    (\w[\w, ]*): ", block, re.MULTILINE) for name in names.split(", ")}


def without_args(source: str) -> Iterator[str]:
    """Yield the public functions with two or more parameters whose `Args:` block does not describe just these.

    Fixtures are excepted.
    """
    for function in public_functions(ast.parse(source).body):
        spec = function.args
        optional = [spec.vararg, spec.kwarg]
        every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *(arg for arg in optional if arg is not None)]
        parameters = [arg.arg for arg in every if arg.arg not in ("self", "cls")]
        fixture = any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)
        if len(parameters) >= 2 and not fixture and described(ast.get_docstring(function) or "") != set(parameters):
            yield function.name


def faults(rule: Callable[[str], Iterator[str]], helpers: bool = False) -> list[str]:
    files = [path for path in sorted(TESTS.rglob("*.py")) if not (helpers and path.name.startswith("test_"))]
    return [f"{path.relative_to(TESTS)}: {fault}" for path in files for fault in rule(path.read_text())]


def test_docstrings_begin_with_a_sentence() -> None:
    assert faults(first_lines) == []


def test_banned_words_are_in_no_docstring_comment_or_name() -> None:
    assert faults(banned_words) == []


def test_public_helpers_document_their_parameters() -> None:
    assert faults(without_args, helpers=True) == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (first_lines, '"""What it does."""'),
        (first_lines, 'def f():\n    """Whether it does."""'),
        (banned_words, "x = 1  # next to it stands a comment"),
        (banned_words, "x = 1  # after so many steps"),
        (banned_words, 'class A:\n    """It is told."""'),
        (banned_words, "def f(): told_of_it = 1"),
        (banned_words, "def f(boxes): ..."),
        (without_args, 'def f(a, *b):\n    """Return both."""'),
        (without_args, "def f(a, b): ..."),
        (without_args, 'def f(a, b):\n    """Return both.\n\n    Args:\n        a: One.\n    """'),
        (without_args, 'class A:\n    def f(self, a, b):\n        """Return both."""'),
    ],
)
def test_a_violation_is_found(rule: Callable[[str], Iterator[str]], source: str) -> None:
    assert len(list(rule(source))) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (first_lines, '"""Whatever it does."""'),
        (banned_words, 'x = "told"  # bold, `boxes`, "room" and a mushroom; it stands for so many things that it is right'),
        (banned_words, "x.told()"),
        (without_args, 'def f(a, b):\n    """Return both.\n\n    Args:\n        a: One.\n        b: Two.\n    """'),
        (without_args, "class A:\n    def f(self, a, b): ...\n\ndef _g(a, b): ..."),
    ],
)
def test_a_correct_source_passes(rule: Callable[[str], Iterator[str]], source: str) -> None:
    assert list(rule(source)) == []
