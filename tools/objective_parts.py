"""Write the section "Parts of an objective" of docs/objectives.md: part of `python -m tools.config_reference`.

The parts are the fields of `config.objective.ObjectiveParts` and of the dataclasses in it; the choices are the tables in
`losses/`.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from tepo_megatron.config.objective import PARTS, ObjectiveParts, variants
from tepo_megatron.losses.objective import choices
from tools.config_reference import comments, default_of, prose, type_of

PAGE: Path = Path(__file__).parents[1] / "docs" / "objectives.md"
START, END = "## Parts of an objective\n", "\n## "
INTRO = """
Made by `python -m tools.config_reference` from `tepo_megatron/config/objective.py`; a test compares.

A row sets some of these parts; the others have the default of this table. `objective.PART` replaces the part of a row:
`--objective.clip_high 0.3`. Of a part with a type, fields that are left out are as in the row, unless the type is another one.
The type alone can be written as a text: `--objective.correction tis`.
"""


def section() -> str:
    """Return the section with its heading."""
    meanings = comments(ObjectiveParts)
    lines = [START.strip(), INTRO, "| part | type | default | meaning |", "|---|---|---|---|"]
    below: list[str] = []
    for field in dataclasses.fields(ObjectiveParts):
        found = variants(PARTS[field.name])
        if found:
            below += _fields_of(field.name, found)
        kind = _kind(field.name, found) or type_of(PARTS[field.name])
        default = "the row sets it" if field.default is dataclasses.MISSING and not found else _default(field)
        lines.append(_row(f"`{field.name}`", kind, default, prose(meanings[field.name])))
    return "\n".join([*lines, *below]) + "\n"


def with_section(page: str) -> str:
    """Return the page with today's section."""
    start = page.index(START)
    end = page.find(END, start + 1)
    return page[:start] + section() + (page[end:] if end >= 0 else "")


def _kind(part: str, found: dict[str, type]) -> str:
    """Return the choices of a part; empty if it has none."""
    if found:
        types = ", ".join(f"`{name}`" for name in found if name)
        return f"section with a `type`: {types}" if types else "section or `null`"
    return ", ".join(f"`{name}`" for name in choices().get(part, ()))


def _fields_of(part: str, found: dict[str, type]) -> list[str]:
    """Return the table of the fields that the variants of a part have."""
    lines = [
        "",
        f"Fields of `{part}`:",
        "",
        "| type | field | type of the value | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, cls in found.items():
        fields = [field for field in dataclasses.fields(cls) if field.name != "type"]
        if name:
            lines.append(_row(f"`{name}`", "", "", "", prose(inspect.getdoc(cls) or "")))
        meanings, hints = comments(cls), inspect.get_annotations(cls, eval_str=True)
        for field in fields:
            names = ", ".join(f"`{choice}`" for choice in choices().get(f"{part}.{field.name}", ()))
            kind = names or type_of(hints[field.name])
            lines.append(_row("", f"`{field.name}`", kind, default_of(field), prose(meanings[field.name])))
    return lines


def _default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a part as code: the type of a part with a type."""
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return f"`{value.type}`" if hasattr(value, "type") else default_of(field)


def _row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
