"""Config files laid over each other, and which of them set which key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tepo_megatron.errors import ConfigError

Key = tuple[Any, ...]


class Layers:
    """A tree of keys that grows by layers: a base file, the file that builds on it, the command line.

    A section is merged key by key; anything else replaces what was there, a list as a whole. `null` takes back what the layers
    below said of a key or of a section, which then has its default; over nothing it is a value like any other.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self._setters: dict[Key, str] = {}

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Lay `values` over the tree; source: what errors call this layer.

        Raises ConfigError where a section is laid over a value.
        """
        self._merge(self.tree, values, source, ())

    def _merge(self, tree: dict[str, Any], values: Mapping[str, Any], source: str, above: Key) -> None:
        for name, value in values.items():
            key = (*above, name)
            below = tree.get(name)
            if isinstance(value, Mapping) and below is not None:
                if not isinstance(below, dict):
                    raise ConfigError(f"{source}: {_dotted(key)} is a value, not a section")
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
        """The layers that set what an error complains of: `key`, or the keys below it that its message names, or all of them.

        Empty for a key that no layer set.
        """
        for length in range(len(key), 0, -1):
            if key[:length] in self._setters:
                return [self._setters[key[:length]]]
        below = {k[len(key) :]: source for k, source in self._setters.items() if k[: len(key)] == key}
        named = [source for k, source in below.items() if re.search(rf"(?<![\w.]){re.escape(_dotted(k))}(?![\w.])", message)]
        return list(dict.fromkeys(named or (below.values() if key else ())))


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))
