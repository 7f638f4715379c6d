"""Draw the packages of `tepo_megatron` from the code: `python -m tools.architecture` writes docs/packages.svg.

A package is above all packages that it imports. Its colours are the processes that import it when they start, found by
following imports from the modules in PROCESSES. Imports inside functions, which run only when they are needed, do not count
for the colours.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path

from tools.structure import NAME, PACKAGE, ROOT, arrows, modules, package_of

PICTURE = ROOT / "docs" / "packages.svg"
# process -> the modules that it starts with, its colour
PROCESSES = {
    "launcher": (("command.launcher",), "#8a63d2"),
    "ranks": (("trainer.worker", "trainer.train"), "#2f6fde"),
    "rollout service": (("service.service",), "#22886a"),
    "grading workers": (("rewards.grading.worker",), "#d9702a"),
    "inference servers": (
        ("wire.receiver.vllm_plugin", "wire.receiver.sglang_server", "wire.receiver.torch_server"),
        "#d64550",
    ),
}
WIDTH, MARGIN, HIGH, GAP, TOP = 1040, 20, 58, 9, 72
LETTER, LINES = 6.1, 2  # width of a letter of a description; lines
STYLE = """
    .name { font: 600 14px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #17212b }
    .what { font: 11px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #46525e }
    .note { font: 12.5px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #46525e }
"""


@cache
def imports_at_start(name: str) -> frozenset[str]:
    """Return our modules that run when a module is imported: those above it, and those that it imports outside functions."""
    found = {name.rpartition(".")[0]}

    def visit(nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name.removeprefix(f"{NAME}.") for alias in node.names if alias.name.startswith(f"{NAME}."))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{NAME}."):
                module = str(node.module).removeprefix(f"{NAME}.")
                found.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                visit(node.orelse)
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(ast.iter_child_nodes(node))

    visit(ast.iter_child_nodes(ast.parse(modules()[name].read_text())))
    return frozenset(found & modules().keys() - {"", name})


def packages_of(process: str) -> set[str]:
    """Return the packages that a process of PROCESSES imports when it starts."""
    seen: set[str] = set()
    missing = list(PROCESSES[process][0])
    while missing:
        name = missing.pop()
        if name not in seen:
            seen.add(name)
            missing += imports_at_start(name)
    return {package_of(name) for name in seen}


def rows() -> list[list[str]]:
    """Return the packages in rows from the top down. Each imports packages of lower rows only."""
    names = sorted({package_of(name) for name in modules() if name} - {"__main__"})
    below = {name: {b for a, b in arrows() if a == name} for name in names}

    @cache
    def level(name: str) -> int:
        return 1 + max(map(level, below[name]), default=-1)

    return [found for n in reversed(range(len(names))) if (found := [name for name in names if level(name) == n])]


def description(package: str) -> str:
    """Return the first sentence of a package's docstring, without the command or the name that it begins with."""
    folder = PACKAGE / package / "__init__.py"
    path = folder if folder.exists() else PACKAGE / f"{package}.py"
    sentence = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0]
    first, colon, rest = sentence.partition(": ")
    if colon and len(first.split()) < 3:
        sentence = rest[0].upper() + rest[1:]
    return sentence.rstrip(".").replace("`", "")


def picture() -> str:
    """Return the picture as SVG."""
    users = {name: packages_of(name) for name in PROCESSES}
    lines = rows()
    height = TOP + len(lines) * (HIGH + GAP) + 8
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">']
    parts += ['  <title id="title">The packages of tepo_megatron, and which process imports them</title>']
    parts += [f"  <style>{STYLE}  </style>", f'  <rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff"/>']
    parts.append(
        f'  <text class="note" x="{MARGIN}" y="28">A package imports only from rows below it. Imported at its start by:</text>'
    )
    x = MARGIN
    for name, (_, color) in PROCESSES.items():
        parts.append(f'  <circle cx="{x + 6}" cy="50" r="6" fill="{color}"/>')
        parts.append(f'  <text class="note" x="{x + 17}" y="54">{name}</text>')
        x += 40 + 7 * len(name)
    for number, row in enumerate(lines):
        y = TOP + number * (HIGH + GAP)
        wide = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) // len(row)
        for column, package in enumerate(row):
            colors = [color for name, (_, color) in PROCESSES.items() if package in users[name]]
            parts += _box(MARGIN + column * (wide + GAP), y, wide, package, colors)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(x: int, y: int, wide: int, package: str, colors: list[str]) -> list[str]:
    parts = [f'  <rect x="{x}" y="{y}" width="{wide}" height="{HIGH}" rx="8" fill="#f5f7f9" stroke="#c6ced6"/>']
    parts.append(f'  <text class="name" x="{x + 12}" y="{y + 19}">{package}</text>')
    for number, color in enumerate(reversed(colors)):
        parts.append(f'  <circle cx="{x + wide - 14 - 14 * number}" cy="{y + 14}" r="5" fill="{color}"/>')
    lines = textwrap.wrap(description(package), int((wide - 24) / LETTER), max_lines=LINES, placeholder=" …")
    for number, line in enumerate(lines):
        parts.append(f'  <text class="what" x="{x + 12}" y="{y + 35 + 14 * number}">{escape(line)}</text>')
    return parts


def write(path: Path = PICTURE) -> None:
    """Write the picture."""
    path.write_text(picture())


if __name__ == "__main__":
    write()
