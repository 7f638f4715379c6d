"""Sphinx builds the documentation: `make docs`. Pages are Markdown (MyST); the repository's root is the source folder, so that
links between README.md, docs/ and source files are the same here and in any viewer of the repository.
"""

import ast
import functools
import html
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "tepo_megatron"
author = "the authors of tepo_megatron"
copyright = author
extensions = ["myst_parser", "autoapi.extension", "sphinx_copybutton"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "examples/**/README.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "runs", "tests", "tepo_megatron", "docs/mutants.md"]  # not looked through
suppress_warnings = [
    "misc.highlighting_failure",  # formulas in the form of Python
    "autoapi.python_import_resolution",  # constants that modules import from each other
    "ref.python",  # `type`, a field of several sections of the config
]

myst_heading_anchors = 4  # as GitHub names them
myst_enable_extensions: list[str] = []

# The API is read from the syntax trees: nothing is imported, so that this environment needs none of the packages.
autoapi_dirs = [str(ROOT / "tepo_megatron")]
autoapi_generate_api_docs = False  # the pages in docs/api/ name what they show
autoapi_options = ["members", "undoc-members", "show-inheritance"]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
SHOWN = {
    name.split(".")[0]
    for page in (ROOT / "docs/api").glob("*.md")
    for name in re.findall(r"tepo_megatron\.(\w+)", page.read_text())
}
autoapi_ignore = [
    str(path) + ("/*" if path.is_dir() else "")
    for path in sorted((ROOT / "tepo_megatron").iterdir())
    if path.stem not in SHOWN | {"__init__"}
]

html_theme = "furo"
html_title = "tepo_megatron"
html_show_copyright = False
html_show_sourcelink = False
html_additional_pages = {"index": "to-the-start.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["wide.css"]
highlight_language = "none"  # of blocks without a name
pygments_style = "friendly"
pygments_dark_style = "monokai"
linkcheck_timeout = 20
linkcheck_workers = 4


def docstring_as_text(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code` and indented blocks; what reStructuredText would make of |y|, *, and names_ is not
    meant.
    """
    cleaned, written = inspect.cleandoc("\n".join(lines)).split("\n"), list[str]()
    for before, line in zip(["", *cleaned], cleaned, strict=False):
        if line.startswith("  ") and not before.startswith("  "):
            written += ["", "::", ""]
        if not line.startswith("  ") and before.startswith("  "):
            written.append("")
        written.append(line if line.startswith("  ") else _escaped(line))
    lines[:] = [*written, ""]


@functools.cache
def comments_of_fields(path: Path) -> dict[str, str]:
    """Return the comment of each field of the classes in a file, by CLASS.FIELD: behind it, or in the lines above it."""
    lines, comments = path.read_text().splitlines(), dict[str, str]()
    for node in ast.walk(ast.parse("\n".join(lines))):
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                above = itertools.takewhile(lambda line: line.strip().startswith("# "), reversed(lines[: field.lineno - 1]))
                behind = lines[field.end_lineno - 1][field.end_col_offset :].partition("#")[2]
                words = [behind] if behind else [line.strip()[1:] for line in reversed(list(above))]
                comments[f"{node.name}.{field.target.id}"] = " ".join(word.strip() for word in words)
    return comments


def describe_field(app: object, what: str, name: str, obj: Any, skip: bool, options: object) -> None:
    """Describe a field of a data object by the comment next to it. autoapi has no other event for what has no docstring."""
    parts = name.split(".")
    path = ROOT.joinpath(*parts[:-2]).with_suffix(".py")
    if what == "attribute" and not obj.docstring and path.is_file():
        obj.docstring = _escaped(comments_of_fields(path).get(".".join(parts[-2:]), ""))


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{p}`" if p.startswith("`") else re.sub(r"([|*_\\])", r"\\\1", p) for p in parts)


def imports_are_skipped(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """A module's page shows what is defined in it."""
    return True if getattr(obj, "imported", False) else None


def titled(app: object, docname: str, source: list[str]) -> None:
    """A table that `make bench` writes has no heading."""
    if docname == "benchmarks/results/cpu":
        source[0] = f"# Results on a CPU\n\n{source[0]}"


def breakable_names(app: object, doctree: nodes.document, docname: str) -> None:
    """A long name in a table may be broken after its dots, slashes and underscores, and nowhere else."""
    for table in doctree.findall(nodes.table):
        for literal in list(table.findall(nodes.literal)):
            text = re.sub(r"(?<=[\w/])([._/]+)(?=\w)", r"\1<wbr>", html.escape(literal.astext()))
            literal.replace_self(nodes.raw("", f'<code class="docutils literal notranslate">{text}</code>', format="html"))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", docstring_as_text)
    app.connect("source-read", titled)
    app.connect("autodoc-skip-member", imports_are_skipped)
    app.connect("autoapi-skip-member", describe_field)
    app.connect("doctree-resolved", breakable_names)
