"""Read config keys under the names that they had before version 0.1, for one release.

A layer of a config (a file, the command line) is translated before it is merged. Each old key gives a message with the
new name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.errors import ConfigError

_MISSING = object()


@dataclass(frozen=True)
class Renamed:
    """An old key and what became of it.

    Attributes:
        old: The old key with dots, such as "rollout.in_flight".
        new: The new key with dots; None: the key was removed.
        convert: Translates the old value to the new one.
        applies: Tells whether a value at `old` is of the old form. It matters where the new form has the same name.
        constant: The only value that a removed key may still have: the one that is always used now.
        why: Why the key was removed, for the message.
    """

    old: str
    new: str | None
    convert: Callable[[Any], Any] = lambda value: value
    applies: Callable[[Any], bool] = lambda value: True
    constant: Any = _MISSING
    why: str = ""


def written_out(values: Mapping[str, Any], shorthands: Iterable[str]) -> dict[str, Any]:
    """Return a layer in which each of these sections is a mapping, `{type: tis}` where it was the text `tis`."""
    tree = copy.deepcopy(dict(values))
    for key in shorthands:
        *above, leaf = key.split(".")
        section: Any = tree
        for name in above:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(leaf), str):
            section[leaf] = {"type": section[leaf]}
    return tree


def translate(values: Mapping[str, Any], source: str, table: Iterable[Renamed]) -> tuple[dict[str, Any], list[str]]:
    """Return a layer with today's keys, and one message for each old key that it had.

    Args:
        values: The layer. It is not changed.
        source: The layer's name, for messages.
        table: The renamed keys.

    Raises:
        ConfigError: A layer has a key under both names, or sets a removed key to another value than its constant.
    """
    tree = copy.deepcopy(dict(values))
    messages = []
    for key in table:
        value = _take(tree, key)
        if value is _MISSING:
            continue
        if key.new is None:
            if value is not None and value != key.constant:
                raise ConfigError(f"{source}: {key.old}={value!r}: this key was removed ({key.why}); remove it")
            messages.append(f"{source}: {key.old} was removed ({key.why}); remove it")
            continue
        _put(tree, key, None if value is None else key.convert(value), source)
        messages.append(f"{source}: {key.old} is now {key.new}; the old name works for one release")
    return tree, messages


def _take(tree: dict[str, Any], key: Renamed) -> Any:
    """Remove an old key from the tree and return its value; `_MISSING` if it is not there. Sections left empty are removed."""
    *above, leaf = key.old.split(".")
    sections: list[dict[str, Any]] = [tree]
    for name in above:
        child = sections[-1].get(name)
        if not isinstance(child, dict):
            return _MISSING
        sections.append(child)
    if leaf not in sections[-1] or not key.applies(sections[-1][leaf]):
        return _MISSING
    value = sections[-1].pop(leaf)
    for section, name in zip(reversed(sections[:-1]), reversed(above), strict=True):
        if not section[name]:
            del section[name]
    return value


def _put(tree: dict[str, Any], key: Renamed, value: Any, source: str) -> None:
    """Set the new key. Raises ConfigError if the layer sets it already."""
    *above, leaf = str(key.new).split(".")
    for name in above:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"{source}: {key.old} is now {key.new}, and {name} is a value here, not a section; write the new key"
            )
        tree = child
    if leaf in tree and not (isinstance(tree[leaf], dict) and isinstance(value, dict) and not tree[leaf].keys() & value.keys()):
        raise ConfigError(f"{source}: {key.old} and its new name {key.new} are both set; remove the first")
    tree[leaf] = {**tree[leaf], **value} if leaf in tree else value
