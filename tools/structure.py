"""Measure the structure of the package: packages, arrows, lines of code, signatures with the whole config.

    python -m tools.structure [--arrows]

A package is a folder or a module at the top of `tepo_megatron`; an arrow says that a module of one imports from another. Lines
of code are those that are neither blank nor a comment nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tepo_megatron"
NAME = PACKAGE.name


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the package by its dotted name, without the package's own; "" is the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path, type_checking: bool = True) -> frozenset[str]:
    """Return the dotted names that a file imports, at the top or inside functions.

    Args:
        path: The file.
        type_checking: Whether to include imports below `if TYPE_CHECKING`, which do not run.
    """
    found: set[str] = set()
    for node in _walk(ast.parse(path.read_text()), type_checking):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports(name: str, type_checking: bool = True) -> set[str]:
    """Return our modules that a module imports: for `from a.b import c` it is a.b.c if that is a module, else a.b.

    Args:
        name: Dotted name of the module, without the package's own.
        type_checking: Whether to include imports below `if TYPE_CHECKING`, which do not run.
    """
    found = set()
    names = {n.removeprefix(NAME + ".") for n in imports(modules()[name], type_checking) if n.startswith(NAME + ".")}
    for other in names:
        longer = any(more.startswith(other + ".") and more in modules() for more in names)
        if other in modules() and not (longer and modules()[other].name == "__init__.py"):
            found.add(other)
    return found - {name}


def package_of(name: str) -> str:
    """Return the folder or module at the top of the package that a module belongs to."""
    return name.partition(".")[0]


def arrows() -> set[tuple[str, str]]:
    """Return the pairs (importing package, imported package)."""
    pairs = {(package_of(name), package_of(other)) for name in modules() if name for other in own_imports(name)}
    return {(a, b) for a, b in pairs if a != b}


def lines_of_code(path: Path) -> int:
    """Count the lines of a file that are neither blank nor a comment nor part of a docstring."""
    text = path.read_text()
    code: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            code -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def takes_config() -> list[str]:
    """Return the functions that have a parameter of the type `Config`, the whole config tree."""
    found = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(a.annotation is not None and ast.unparse(a.annotation).strip("'\"") == "Config" for a in arguments):
                    found.append(f"{name}.{node.name}")
    return found


def _walk(node: ast.AST, type_checking: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not type_checking:
            continue
        yield from _walk(child, type_checking)


def main() -> None:
    """Print the counts, and with --arrows the arrows."""
    parser = argparse.ArgumentParser(prog="python -m tools.structure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arrows", action="store_true", help="list the arrows")
    args = parser.parse_args()
    names = {package_of(name) for name in modules()} - {"", "__main__"}
    loose = {name for name in names if (PACKAGE / f"{name}.py").exists()}
    print(f"packages and modules at the top: {len(names)}, of them modules: {len(loose)} ({', '.join(sorted(loose))})")
    print(f"arrows between them: {len(arrows())}")
    print(f"lines of code: {sum(map(lines_of_code, modules().values()))} in {len(modules())} modules")
    print(f"signatures with the whole Config: {len(takes_config())}")
    if args.arrows:
        print("\n".join(f"{a} -> {b}" for a, b in sorted(arrows())))


if __name__ == "__main__":
    main()
