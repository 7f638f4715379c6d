"""Measure the structure of the package: packages, arrows, lines of code, sizes, and the lengths of the two long paths.

    python -m tools.structure [--arrows]

A package is a folder or a module at the top of `tepo_megatron`; an arrow says that a module of one imports from another. Lines
of code are those that are neither blank nor a comment nor part of a docstring. The path of a rollout and that of a weight are
written in docs/tour.md, hop by hop.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tepo_megatron"
NAME = PACKAGE.name
TOUR = ROOT / "docs" / "tour.md"
ROLLOUT, WEIGHT = "From an engine's answer to the optimizer's step", "From the Megatron shard to the engine"  # headings in TOUR
SIZED = ("tepo_megatron", "launch", "tools", "benchmarks")  # folders whose sizes are bounded
FUNCTION_LINES, FILE_LINES, PUBLIC_METHODS = 60, 350, 15
_PLACE = re.compile(r"`([\w/]+\.py)`: `([\w.]+)`")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    """Return the dotted names that a file imports, at the top or inside functions."""
    found: set[str] = set()
    for node in _walk(ast.parse(path.read_text()), type_checking):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports(name: str, type_checking: bool = True) -> set[str]:
    """Return our modules that a module imports: for `from a.b import c` it is a.b.c if that is a module, else a.b."""
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


def places(text: str) -> list[tuple[str, str]]:
    """Return each (file, qualified name) that a page names as `path/file.py`: `name`, in order."""
    return _PLACE.findall(text)


def hops(heading: str) -> list[tuple[str, str]]:
    """Return the hops of a path, as (file, qualified name): the first place of each list item below a heading of the tour."""
    section = re.split(r"^#+ ", TOUR.read_text().partition(f" {heading}\n")[2], flags=re.MULTILINE)[0]
    return [places(item)[0] for item in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]]


def too_large() -> list[str]:
    """Return the functions, files and classes that are larger than FUNCTION_LINES, FILE_LINES and PUBLIC_METHODS."""
    found = []
    for path in sorted(path for folder in SIZED for path in (ROOT / folder).rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT)
        if (lines := len(text.splitlines())) > FILE_LINES:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _Function) and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
                found.append(f"{name}: {node.name} has {lines} lines")
            elif isinstance(node, ast.ClassDef):
                public = {each.name for each in node.body if isinstance(each, _Function) and not each.name.startswith("_")}
                if len(public) > PUBLIC_METHODS:
                    found.append(f"{name}: {node.name} has {len(public)} public methods")
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
    for what, heading in (("files of a rollout", ROLLOUT), ("modules of a weight", WEIGHT)):
        files = list(dict.fromkeys(file.removeprefix(f"{NAME}/") for file, _ in hops(heading)))
        print(f"{what}, {heading[0].lower() + heading[1:]}: {len(files)} ({', '.join(files)})")
    large = too_large()
    limits = f"{FUNCTION_LINES} lines, files over {FILE_LINES}, classes over {PUBLIC_METHODS} public methods"
    print("\n    ".join([f"functions over {limits}: {len(large)}", *large]))
    if args.arrows:
        print("\n".join(f"{a} -> {b}" for a, b in sorted(arrows())))


if __name__ == "__main__":
    main()
