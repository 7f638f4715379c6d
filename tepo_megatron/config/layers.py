"""Merge config files into one tree, and remember which file set which key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tepo_megatron.config.renamed import translate, written_out
from tepo_megatron.config.renamed_keys import RENAMED, SHORTHANDS
from tepo_megatron.errors import ConfigError

Key = tuple[Any, ...]


class Layers:
    """A tree of keys that is built from layers: a base file, the file on top of it, the command line.

    A section is merged key by key, but one of another `type` replaces the section below it. Any other value replaces the one
    below it, a list as a whole. `null` removes what the layers below set for a key or a section, which then has its default; if
    they set nothing, `null` is a value like any other.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.messages: list[str] = []  # one for each key that a layer sets under its old name
        self._setters: dict[Key, str] = {}

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Merge `values` into the tree. Raises ConfigError if a section would be merged into a value.

        Args:
            values: The layer.
            source: The layer's name in errors.
        """
        values, messages = translate(written_out(values, SHORTHANDS), source, RENAMED)
        self.messages += messages
        self._merge(self.tree, values, source, ())

    def _merge(self, tree: dict[str, Any], values: Mapping[str, Any], source: str, above: Key) -> None:
        for name, value in values.items():
            key = (*above, name)
            below = tree.get(name)
            if isinstance(value, Mapping) and below is not None:
                if not isinstance(below, dict):
                    raise ConfigError(f"{source}: {_dotted(key)} is a value, not a section")
                if not (
                    _dotted(key) in SHORTHANDS and {"type"} <= below.keys() & value.keys() and below["type"] != value["type"]
                ):
                    self._merge(below, value, source, key)
                    continue
            self._setters = {k: s for k, s in self._setters.items() if k[: len(key)] != key}
            if isinstance(value, Mapping) and value:
                tree[name] = {}
                self._merge(tree[name], value, source, key)
            elif value is None and name in tree:
                del tree[name]
                self._setters[key] = source
            else:
                tree[name] = value
                self._setters[key] = source

    def sources(self, key: Key, message: str) -> list[str]:
        """Return the names of the layers to which an error refers; empty if no layer set the key.

        They are those that set `key`, or else those that set the keys below it that the message names, or all keys below it.

        Args:
            key: The key that the error is about; () for the whole tree.
            message: The error's message.
        """
        for length in range(len(key), 0, -1):
            if key[:length] in self._setters:
                return [self._setters[key[:length]]]
        below = {k[len(key) :]: source for k, source in self._setters.items() if k[: len(key)] == key}
        named = [source for k, source in below.items() if re.search(rf"(?<![\w.]){re.escape(_dotted(k))}(?![\w.])", message)]
        return list(dict.fromkeys(named or (below.values() if key else ())))


def _is_another_type(key: str, below: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Return whether both sections have a `type`, and not the same one, where the key is of a section with a type.

    Args:
        key: The section's key with dots.
        below: The section of the layers below.
        value: The section of the layer that is added.
    """
    return key in SHORTHANDS and "type" in below and "type" in value and below["type"] != value["type"]


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))
