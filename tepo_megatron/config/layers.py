"""Merge config files into one tree, and remember which file set which key."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config.server import variant_named_by
from tepo_megatron.config.sync import TRANSPORTS

Key = tuple[Any, ...]
# sections for which a plain string is short for {type: string}
SHORTHANDS: tuple[Key, ...] = (("sync", "transport"), ("objective", "weighting"), ("objective", "correction"))


class Layers:
    """A tree of keys that is built from layers: a base file, the file on top of it, the command line.

    A section is merged key by key. Any other value replaces the one below it, a list as a whole. `null` removes what the layers
    below set for a key or a section, which then has its default; if they set nothing, `null` is a value like any other.

    A section with variants is merged as long as the variant stays the same. A layer that sets another `type` than the layers
    below replaces the section. A layer that sets `urls` or `rendezvous` of rollout.server removes the keys below which servers
    of that kind do not have.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self._setters: dict[Key, str] = {}

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Merge `values` into the tree. Raises ConfigError if a section would be merged into a value."""
        self._merge(self.tree, _written_out(copy.deepcopy(dict(values))), source, ())

    def _merge(self, tree: dict[str, Any], values: Mapping[str, Any], source: str, above: Key) -> None:
        for name, value in values.items():
            key = (*above, name)
            below = tree.get(name)
            if isinstance(value, Mapping) and below is not None:
                if not isinstance(below, dict):
                    what = "list; put [ ] around what replaces it" if isinstance(below, list) else "value, not a section"
                    raise ConfigError(f"{source}: {_dotted(key)} is a {what}")
                self._remove_other_variants(below, value, source, key)
                self._merge(below, value, source, key)
                continue
            if name in tree:
                self._setters = {k: s for k, s in self._setters.items() if k[: len(key)] != key}
            self._setters.pop(key, None)  # of a former null
            if isinstance(value, Mapping) and value:
                tree[name] = {}
                self._merge(tree[name], value, source, key)
            elif value is None and name in tree:
                del tree[name]
                self._setters[key] = source
            else:
                tree[name] = value
                self._setters[key] = source

    def _remove_other_variants(self, below: dict[str, Any], values: Mapping[str, Any], source: str, key: Key) -> None:
        """Remove keys of lower layers that the variant which `values` choose does not have."""
        kept = _kept(below, values, key)
        if kept is None:
            return
        for name in [name for name in below if name not in kept]:
            here = {k: s for k, s in self._setters.items() if k[: len(key) + 1] == (*key, name)}
            if source not in here.values():
                del below[name]
                self._setters = {k: s for k, s in self._setters.items() if k not in here}

    def sources(self, key: Key, message: str) -> list[str]:
        """Return the names of the layers to which an error refers; empty if no layer set the key.

        They are those that set `key`, or else those that set the keys below it that the message names, or all keys below it.
        """
        for length in range(len(key), 0, -1):
            if key[:length] in self._setters:
                return [self._setters[key[:length]]]
        below = {k[len(key) :]: source for k, source in self._setters.items() if k[: len(key)] == key}
        named = [source for k, source in below.items() if re.search(rf"(?<![\w.]){re.escape(_dotted(k))}(?![\w.])", message)]
        return list(dict.fromkeys(named or (below.values() if key else ())))


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def _kept(below: Mapping[str, Any], values: Mapping[str, Any], key: Key) -> frozenset[str] | None:
    """Return the keys of a section that stay when a layer is merged into it; None: all."""
    kind = values.get("type")
    if kind is not None and below.get("type", kind) != kind:
        return frozenset()
    cls: type | None = None
    if key == ("sync", "transport") and isinstance(kind, str):
        cls = TRANSPORTS.get(kind)
    elif key == ("rollout", "server"):
        cls = variant_named_by(values)
    return None if cls is None else frozenset(f.name for f in dataclasses.fields(cls))


def _written_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer in which each section that is given as a plain string is written out as {type: string}."""
    tree = dict(values)
    for *above, leaf in SHORTHANDS:
        section = tree
        for name in above:
            if not isinstance(section.get(name), Mapping):
                break
            section[name] = dict(section[name])
            section = section[name]
        else:
            if isinstance(section.get(leaf), str):
                section[leaf] = {"type": section[leaf]}
    return tree
