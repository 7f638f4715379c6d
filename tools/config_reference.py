"""Write docs/configuration.md and a table of docs/objectives.md from the config: `python -m tools.config_reference`.

The meaning of a key comes from the docstring of its section ("key: meaning; ..."), the comment above the key and the comment on
its line. A section with variants has a subsection for each; their common keys come first.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from tepo_megatron.config import AnyTermConfig, Config, MegatronConfig, ObjectiveConfig
from tepo_megatron.config.megatron import CHECKED
from tepo_megatron.config.objective import PARTS
from tools.nested_keys import nested_keys

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration reference

Made by `python -m tools.config_reference` from `tepo_megatron/config/`; a test compares. This page lists <count> keys.

A config is a YAML file of sections. `rollout.server.tp` is the key `tp` in `server` in `rollout`; on the command line it is
`--rollout.server.tp 2` or `--rollout.server.tp=2`, read as YAML, and wins over the file. `base: other.yaml` (a path relative
to the file itself) lays a file over another one: sections are merged key by key, lists and values are replaced, `null` takes
a key back to its default. A section with a `type` is replaced by one with another `type`. An unknown key is an error that
names the nearest known one. Values that contradict each other, the model or the objective are refused before anything starts,
with the keys and the fix.
"""
NAMES = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null", Any: "anything"}
OF_A_TERM = {"type": "which term it is", "weight": "of its value in the reward"}
TERMS = """## `reward.terms[]`

Every term has `type`, its kind, and `weight` (number, default `1.0`), the factor of its value in the reward. Below each kind
are its other keys.

| kind, keys | type | default | meaning |
|---|---|---|---|"""
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


@dataclass(frozen=True)
class Section:
    """A section of the config.

    Attributes:
        name: the section as its heading shows it; "" for the top level.
        variants: all types that the section can have, if there are several, and `cls` is one of them.
    """

    name: str
    cls: type
    variants: tuple[type, ...] = ()

    @property
    def prefix(self) -> str:
        """Return what precedes the name of a key."""
        return f"{self.name}." if self.name else ""


def sections(cls: type = Config, name: str = "") -> Iterator[Section]:
    """Yield all sections of the config, each before the sections inside it."""
    yield Section(name, cls)
    for field, hint in typing.get_type_hints(cls).items():
        key = f"{name}.{field}" if name else field
        if dataclasses.is_dataclass(hint):
            yield from sections(typing.cast(type, hint), key)
        elif variants := variants_of(hint):
            yield from (Section(key, variant, variants) for variant in variants)
        else:
            for inner in _dataclasses_in(hint):
                yield from sections(inner, f"{key}[]")


def all_keys() -> Iterator[str]:
    """Yield every key with dots, sections included: `rollout.server.tp`, `reward.terms[].weight`."""
    for section in sections():
        for name in fields_of(section.cls):
            yield section.prefix + name


def variants_of(hint: Any) -> tuple[type, ...]:
    """Return the section types among which the value of a key is chosen; empty if it is no section, or always the same one."""
    plain = [_bare(arg) for arg in typing.get_args(_bare(hint))] if typing.get_origin(hint) is not list else []
    return tuple(plain) if len(plain) > 1 and all(isinstance(x, type) and dataclasses.is_dataclass(x) for x in plain) else ()


def page() -> str:
    """Return the whole reference page."""
    parts = [HEAD]
    for section in sections():
        if section.cls not in typing.get_args(AnyTermConfig):
            parts.append(_variant(section) if section.variants else _section(section))
        elif TERMS not in parts[-1]:
            parts.append("\n".join([TERMS, *_terms()]) + "\n")
    text = "\n".join(parts)
    return text.replace("<count>", str(count(text)))


def count(text: str) -> int:
    """Return the number of different keys in the tables of a page, without keys of list items."""
    return len({row[1] for row in re.finditer(r"^\| `([\w.]+)` \| ", text, re.M)})


def meanings(cls: type) -> tuple[str, dict[str, str]]:
    """Return the description of a section, and the meaning of each of its keys."""
    of_key = {name: comment for base in reversed(cls.__mro__[:-1]) for name, comment in comments(base).items()}
    if cls in typing.get_args(AnyTermConfig):
        of_key = OF_A_TERM | of_key
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split()), of_key


def _section(section: Section) -> str:
    """Return the part of the page for one section."""
    cls = section.cls
    intro = meanings(cls)[0]
    lines = [f"## `{section.name}`" if section.name else "## The top", "", *([prose(intro), ""] if intro else [])]
    return "\n".join([*lines, *_table(section, list(fields_of(cls))), *_checked_fields(cls)]).rstrip() + "\n"


def _terms() -> Iterator[str]:
    """Yield the rows of the reward's terms: for each kind its description, then its keys."""
    for section in sections():
        if section.cls in typing.get_args(AnyTermConfig):
            kind, meaning = type_of(typing.get_type_hints(section.cls)["type"]), prose(meanings(section.cls)[0])
            yield f"| **{kind}** |  |  | {meaning} |".replace("|y|", r"\|y\|")
            yield from _table(section, [name for name in fields_of(section.cls) if name not in OF_A_TERM])[2:]


def _checked_fields(cls: type) -> list[str]:
    """Return the table of the fields of Megatron-Core's configs that this project checks; empty for other sections."""
    lines = ["", "Fields that this project checks, or for which it has a default of its own:", ""]
    lines += ["| in | field | type | default | meaning |", "|---|---|---|---|---|"]
    for name, fields in CHECKED.items():
        lines += [f"| `{name}` {row}" for row in _table(Section("", fields), list(fields_of(fields)))[2:]]
    return lines if cls is MegatronConfig else []


def _variant(section: Section) -> str:
    """Return the part of the page for one variant of a section; the first one has the section's heading and the common keys."""
    cls, variants = section.cls, section.variants
    common = [name for name in fields_of(cls) if all(name in fields_of(x) for x in variants) and name != "type"]
    before = {name for x in variants[: variants.index(cls)] for name in fields_of(x)}
    lines = []
    if cls is variants[0]:
        lines += [f"## `{section.name}`", "", f"A section in one of these variants: {'; '.join(map(_named, variants))}.", ""]
        if common:
            lines += [*_table(section, common), ""]
    lines += [f"### `{section.name}`: {_named(cls)}", "", prose(meanings(cls)[0])]
    special = [name for name in fields_of(cls) if name not in (*common, "type")]
    if own := [name for name in special if name not in before]:
        lines += ["", *_table(section, own)]
    if again := [name for name in special if name in before]:
        lines += ["", "Also: " + ", ".join(f"`{name}`" for name in again) + "."]
    return "\n".join(lines) + "\n"


def _named(cls: type) -> str:
    """Return what distinguishes a variant: its `type`, or the key that only it requires."""
    if "type" in fields_of(cls):
        return f"`type: {_kind(cls)}`"
    required = [name for name, field in fields_of(cls).items() if default_of(field) == "**required**"]
    return f"with `{required[0]}`" if required else "by default"


def _kind(cls: type) -> str:
    """Return the `type` of a variant."""
    return str(typing.get_args(typing.get_type_hints(cls)["type"])[0])


def _table(section: Section, names: list[str]) -> list[str]:
    """Return the lines of a table of keys."""
    of_key, fields = meanings(section.cls)[1], fields_of(section.cls)
    hints = typing.get_type_hints(section.cls, include_extras=True)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        key, link = f"`{section.prefix}{name}`", f"[section](#{re.sub('[^a-z_]', '', section.prefix + name)})"
        variants = variants_of(hints[name])
        typed = bool(variants) and all("type" in fields_of(x) for x in variants)
        if dataclasses.is_dataclass(hints[name]) or (variants and not typed):
            continue  # it has a heading of its own
        words = ", ".join(f"`{_kind(x)}`" for x in variants) + f", or a {link}" if typed else type_of(hints[name])
        cells = [key, words, default_of(fields[name]), prose(of_key.get(name, ""))]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


@functools.cache
def _dotted() -> re.Pattern[str]:
    """Return a pattern of all keys with a dot."""
    keys = [re.escape(key) for key in (*all_keys(), *nested_keys()) if "." in key]
    return re.compile(rf"(?<![\w.])(?:{'|'.join(keys)})(?![\w.]\w)")


def prose(text: str) -> str:
    """Return text with keys as code, and with the special characters of Markdown escaped outside of code."""
    parts = re.split(r"(`[^`]+`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = _dotted().sub(lambda key: f"`{key[0]}`", re.sub(r"([*<_\\])", r"\\\1", parts[i]).replace("\\_", "_"))
    return "".join(parts)


def fields_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the keys of a section. The parts of an objective are in a table of their own."""
    hidden = PARTS.keys() if cls is ObjectiveConfig else ()
    return {f.name: f for f in dataclasses.fields(cls) if f.name not in hidden}


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a key as code."""
    value = field.default
    if isinstance(value, FieldInfo):
        value = value.get_default(call_default_factory=True, validated_data={})
    elif value is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            return "**required**"
        value = field.default_factory()
    kind = getattr(value, "type", None)
    return f"`{json.dumps(kind or value, default=_shortest)}`"


def _shortest(value: Any) -> dict[str, Any]:
    """Return a section as a mapping without the keys that have their defaults."""
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default}


def type_of(hint: Any, bounds: tuple[Any, ...] = ()) -> str:
    """Return the type of a key in words, with its bounds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        metadata = [x for extra in args[1:] for x in (extra.metadata if isinstance(extra, FieldInfo) else (extra,))]
        return type_of(args[0], tuple(x for x in metadata if type(x) in SIGNS))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        plain = [a for a in args if a is not type(None)]
        if all(dataclasses.is_dataclass(_bare(a)) for a in plain):
            plain = plain[:1]  # each of them has a section of its own
        words = [type_of(a) for a in plain] + ["`null`"] * (type(None) in args)
        return " or ".join(words)
    if origin is list:
        return "list of " + type_of(args[0])
    if origin is dict:
        return "mapping"
    if dataclasses.is_dataclass(hint):
        return "sections"
    limits = " and ".join(f"{SIGNS[type(b)]} {next(iter(dataclasses.astuple(b))):g}" for b in bounds)
    return f"{NAMES[hint]} {limits}".strip()


def _bare(hint: Any) -> Any:
    """Return a type without its annotations."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _dataclasses_in(hint: Any) -> list[type]:
    """Return all dataclasses inside a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [inner for arg in typing.get_args(hint) for inner in _dataclasses_in(arg)]


def _tree(cls: type) -> ast.Module:
    """Return the syntax tree of a class."""
    return ast.parse(textwrap.dedent(inspect.getsource(cls)))


def comments(cls: type) -> dict[str, str]:
    """Return the comment lines above each field, joined with the comment on the field's line."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines, found = source.splitlines(), {}
    for node in next(iter(_tree(cls).body)).body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        words, at = list[str](), node.lineno - 2
        while lines[at].strip().startswith("#"):
            words.insert(0, lines[at].strip().removeprefix("#").strip())
            at -= 1
        comment = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
        above = re.sub(r"(^| )Limit since .*", "", " ".join(words))  # which tools/limits_reference.py reads
        if meaning := "; ".join(x for x in (above, comment[1] if comment else "") if x):
            found[node.target.id] = meaning
    return found


if __name__ == "__main__":
    from tools import objective_parts

    PAGE.write_text(page())
    objective_parts.PAGE.write_text(objective_parts.with_section(objective_parts.PAGE.read_text()))
    print("written:", PAGE, objective_parts.PAGE)
