"""Read config keys under the names that they had before version 0.1, for one release.

A layer of a config (a file, the command line) is translated before it is merged. Each old key gives a message with the new
name.
"""

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
        old: The old key with dots, such as "rollout.in_flight". A removed key may be one of the sections in a list, such as
            "reward.terms[].attempts".
        new: The new key with dots; None: the key was removed.
        convert: Translates the old value to the new one.
        applies: Tells whether a value at `old` is of the old form. It matters where the new form has the same name.
        constant: The only value that a removed key may still have: the one that is always used now.
        unused: Tells, from the value and the layer, that the old key had no effect in it. It is then dropped.
        why: Why the key was removed, for the message.
        note: Message in place of the usual one, where only a value of the key has another name.
    """

    old: str
    new: str | None
    convert: Callable[[Any], Any] = lambda value: value
    applies: Callable[[Any], bool] = lambda value: True
    constant: Any = _MISSING
    unused: Callable[[Any, Mapping[str, Any]], bool] = lambda value, layer: False
    why: str = ""
    note: str = ""


def translate(values: Mapping[str, Any], source: str, table: Iterable[Renamed]) -> tuple[dict[str, Any], list[str]]:
    """Return a layer with today's keys, and one message for each old key that it had.

    Raises:
        ConfigError: A layer has a key under both names, or sets a removed key to another value than its constant.
    """
    tree = copy.deepcopy(dict(values))
    messages: list[str] = []
    for key in table:
        found = _take_from_list(tree, key) if "[]." in key.old else [_take(tree, key)]
        messages += [_replace(tree, key, value, values, source) for value in found if value is not _MISSING]
    return tree, list(dict.fromkeys(messages))


def _replace(tree: dict[str, Any], key: Renamed, value: Any, layer: Mapping[str, Any], source: str) -> str:
    """Set the new key of an old one and return the message. Raises ConfigError as `translate` does."""
    unused = value is not None and key.unused(value, layer)
    if key.new is None:
        if value is not None and not unused and value != key.constant:
            raise ConfigError(f"{source}: {key.old}={value!r}: this key was removed ({key.why}); remove it")
        return f"{source}: {key.old} was removed ({key.why}); remove it"
    if unused:
        return f"{source}: {key.old} is now {key.new}, which has no effect here; remove it"
    _put(tree, key, None if value is None else _converted(key, value, source), source)
    return f"{source}: {key.note or f'{key.old} is now {key.new}'}; the old name works for one release"


def _converted(key: Renamed, value: Any, source: str) -> Any:
    """Return the new value of an old key. Raises ConfigError if the old value has another type than the key had."""
    try:
        return key.convert(value)
    except (TypeError, ValueError, AttributeError, KeyError):
        raise ConfigError(f"{source}: {key.old}={value!r} is not valid; set its new name {key.new} instead") from None


def _take_from_list(tree: dict[str, Any], key: Renamed) -> list[Any]:
    """Remove an old key from all sections of a list, and return its values there."""
    above, _, leaf = key.old.partition("[].")
    items: Any = tree
    for name in above.split("."):
        items = items.get(name) if isinstance(items, dict) else None
    sections = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return [section.pop(leaf) for section in sections if leaf in section]


def _take(tree: dict[str, Any], key: Renamed) -> Any:
    """Remove an old key and return its value; `_MISSING` if it is not there. Sections left empty are removed."""
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
    there = tree.get(leaf)
    if isinstance(there, dict) and isinstance(value, dict) and not there.keys() & value.keys():
        tree[leaf] = {**there, **value}
    elif there is not None:
        raise ConfigError(f"{source}: {key.old} and its new name {key.new} are both set; remove the first")
    else:
        tree[leaf] = value
