"""Each prompt once: what rows repeat, and where they contradict each other."""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.data.schemas import Messages


@dataclass(frozen=True, slots=True)
class Item:
    """A row of its own. place: in the dataset; key: equal for equal prompts; meta: what else the row holds."""

    place: int
    key: bytes
    prompt: str | Messages
    answer: str
    meta: Mapping[str, Any]


def key_of(prompt: str | Messages) -> bytes:
    """A digest of 128 bits: the prompt need not be kept to know it again."""
    if isinstance(prompt, str):
        text = "s" + prompt
    elif all(message.keys() == {"role", "content"} for message in prompt):
        text = "c" + "".join(f"{len(m['role'])} {len(m['content'])} {m['role']}{m['content']}" for m in prompt)
    else:
        text = "j" + json.dumps(prompt, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def glance_at(values: list[Any]) -> bytes | None:
    """A digest of a row's values as they stand, whatever they mean: copies have the same; None where there is none to take."""
    try:
        data = marshal.dumps(values, 2)  # without references: those would depend on who else holds a string
    except ValueError:  # a date, a decimal
        return None
    return hashlib.blake2b(data, digest_size=16).digest()


class Unique:
    """Takes rows one after the other and keeps the first of each prompt."""

    def __init__(self) -> None:
        self.items: dict[bytes, Item] = {}
        self.duplicates = 0
        self._glances: set[bytes] = set()  # of values that were taken: 1.8 million rows need not be understood one by one
        self._others: dict[bytes, list[tuple[int, str]]] = {}  # of contradicted prompts: the rows with another answer

    def is_copy(self, glance: bytes | None) -> bool:
        """Whether a row with that `glance_at` was taken before; if it was, the row is counted."""
        if glance not in self._glances:
            return False
        self.duplicates += 1
        return True

    def is_new(self, key: bytes, place: int, answer: str, glance: bytes | None) -> bool:
        """Whether the prompt was never seen before; if it was, the row is counted."""
        if glance is not None:
            self._glances.add(glance)
        first = self.items.get(key)
        if first is None:
            return True
        if first.answer == answer:
            self.duplicates += 1
        else:
            self._others.setdefault(key, []).append((place, answer))
        return False

    def take_contradicted(self) -> list[list[tuple[int, str]]]:
        """The rows, as (place, answer), of each prompt that has several answers. All of them leave `items`."""
        found = []
        for key, others in self._others.items():
            first = self.items.pop(key)
            found.append([(first.place, first.answer), *others])
        self._others = {}
        return found
