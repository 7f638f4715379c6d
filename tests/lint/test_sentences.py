"""Docstrings, comments and messages are plain English: first lines are sentences, and no private word occurs."""

import ast
import io
import re
import tokenize
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

# Base classes that declare no method for their subclasses to implement.
TYPING_BASES = {"Protocol", "Generic", "NamedTuple", "TypedDict", "ABC", "Enum", "StrEnum", "Exception", "object", "BaseModel"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[Path, ast.Module]:
    """Return the syntax tree of every Python file of the checked folders."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in files}


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def name_of(base: ast.expr) -> str:
    """Return the last name of a base class: `Module` of `torch.nn.Module`, `Protocol` of `Protocol[T]`."""
    if isinstance(base, ast.Subscript):
        return name_of(base.value)
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def inherits(owner: ast.ClassDef, method: str) -> bool:
    """Return whether a base class declares the method. A base outside of the checked folders may declare any."""
    for base in map(name_of, owner.bases):
        if base in TYPING_BASES:
            continue
        known = classes().get(base)
        if known is None or any(
            any(isinstance(item, Definition) and item.name == method for item in parent.body) or inherits(parent, method)
            for parent in known
            if parent is not owner  # a base of another package may have the same name
        ):
            return True
    return False


@cache
def protocol_methods() -> set[tuple[str, ...]]:
    """Return (name, parameters ...) of every method that a Protocol of the checked folders declares."""
    return {
        (method.name, *parameters(method, owner))
        for owners in classes().values()
        for owner in owners
        if "Protocol" in map(name_of, owner.bases)
        for method in owner.body
        if isinstance(method, Definition)
    }


def public_functions(tree: ast.Module) -> Iterator[tuple[Definition, ast.ClassDef | None]]:
    """Yield the public functions of a module and the public methods of its public classes, each with its class.

    Left out, because their contract is elsewhere: overloads, property setters, methods that a base class declares, and
    functions with the name and the parameters of a Protocol's method, which implement it.
    """
    for node in tree.body:
        if isinstance(node, Definition):
            found: list[tuple[Definition, ast.ClassDef | None]] = [(node, None)]
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found = [(item, node) for item in node.body if isinstance(item, Definition) and not inherits(node, item.name)]
        else:
            continue
        for function, owner in found:
            implements = (function.name, *parameters(function, owner)) in protocol_methods()
            declares = owner is not None and "Protocol" in map(name_of, owner.bases)
            if is_documented_here(function) and (declares or not implements):
                yield function, owner


def is_documented_here(function: Definition) -> bool:
    """Return whether a function is public, no overload and no property setter."""
    decorators = {name_of(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}
    return not function.name.startswith("_") and not decorators & {"overload", "setter"}


def parameters(function: Definition, owner: ast.ClassDef | None) -> list[str]:
    """Return the names of a function's parameters without `self` and `cls`."""
    given = function.args
    names = [a.arg for a in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg] if a is not None]
    is_static = any(name_of(d) == "staticmethod" for d in function.decorator_list)
    return names[1:] if owner is not None and not is_static else names


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
    assert [name for name, found in classes().items() if len(found) > 1 and not name.startswith("_")] == []


def test_first_lines_are_sentences():
    wrong = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path, tree in modules().items()
        for line, text in docstrings(tree)
        if FIRST_WORDS.match(text)
    ]
    assert not wrong, "Begin the docstring with a subject or an imperative:\n" + "\n".join(wrong)


def test_public_functions_have_docstrings():
    wrong = [
        f"{place(path, function.lineno)}: {function.name}"
        for path, tree in modules().items()
        for function, _ in public_functions(tree)
        if not ast.get_docstring(function)
    ]
    assert not wrong, "Write a docstring:\n" + "\n".join(wrong)


def test_no_private_words():
    wrong = [
        f"{place(path, line)}: {match.group()}"
        for path, tree in modules().items()
        for line, text in prose(path.read_text(), tree)
        for match in BANNED.finditer(text)
    ]
    assert not wrong, "Use the plain word (STYLE of CONTRIBUTING.md):\n" + "\n".join(wrong)
