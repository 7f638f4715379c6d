"""The Markdown pages of the repository, and what they consist of."""

import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

PAGES = sorted(
    [
        Path("README.md"),
        Path("CONTRIBUTING.md"),
        Path("CHANGELOG.md"),
        *(path for path in Path("docs").rglob("*.md") if path.name != "mutants.md"),  # which `make mutants` writes
        *Path("examples").rglob("README.md"),
    ]
)
MARKDOWN = MarkdownIt("commonmark").enable("table")


@functools.cache
def tokens(page: Path) -> list[Token]:
    """Return the tokens of a page, the inline ones in one list with the others."""
    found = []
    for token in MARKDOWN.parse(page.read_text()):
        found += [token, *(token.children or [])]
    return found


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of its headings, as GitHub and MyST name them."""
    all_tokens, found = MARKDOWN.parse(page.read_text()), set[str]()
    for token, following in itertools.pairwise(all_tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in following.children or [] if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        if token.type == "link_open":
            yield str(token.attrs["href"])
        if token.type == "image":
            yield str(token.attrs["src"])
    for block in fences(page, "{toctree}"):
        if ":glob:" not in block:
            entries = [line for line in block.splitlines() if line and not line.startswith(":") and line != "self"]
            yield from (re.sub(r".*<(.*)>", r"\1", entry) + ".md" for entry in entries)


def fences(page: Path, info: str | None = None) -> list[str]:
    blocks = [token for token in tokens(page) if token.type == "fence"]
    return [block.content for block in blocks if info is None or block.info.strip() == info]


def inline_code(page: Path) -> list[str]:
    return [token.content for token in tokens(page) if token.type == "code_inline"]


def commands(page: Path) -> list[list[str]]:
    """Return the lines of blocks in a shell's language, with continued lines joined."""
    found = []
    for block in fences(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\.venv\S*/)?(bin/)?(tepo|python|make|git|cp|hf|torchrun)\b|\.venv", line.strip()):
                found.append(shlex.split(line, comments=True))
    return found
