"""Deduplicate prompts: keep the first row of each, count copies, collect rows with contradicting answers."""

import hashlib
import json
import marshal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.data.schemas import Messages


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """The first row of a prompt.

    Attributes:
        place: Place of the row in the dataset, from 0.
        key: Digest of the prompt (`key_of`), equal for equal prompts.
        prompt: Prompt, not tokenized.
    """

    place: int
    key: bytes
    prompt: str | Messages
    answer: str
    meta: Mapping[str, Any]


def key_of(prompt: str | Messages) -> bytes:
    """Return a 128-bit digest of the prompt, so that the prompt need not be kept to be recognized."""
    if isinstance(prompt, str):
        text = "s" + prompt
    elif all(message.keys() == {"role", "content"} for message in prompt):
        text = "c" + "".join(f"{len(m['role'])} {len(m['content'])} {m['role']}{m['content']}" for m in prompt)
    else:
        text = "j" + json.dumps(prompt, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def raw_digest(values: list[Any]) -> bytes | None:
    """Return a digest of a row's raw values, equal for copies; None if the values cannot be serialized."""
    try:
        data = marshal.dumps(values, 2)  # version 2 has no references, which would depend on who else holds a string
    except ValueError:  # a date, a decimal
        return None
    return hashlib.blake2b(data, digest_size=16).digest()


class Deduplicator:
    """Registers rows one after the other and keeps the first of each prompt."""

    def __init__(self) -> None:
        self.items: dict[bytes, DatasetRow] = {}
        self.duplicates = 0
        self._glances: set[bytes] = set()  # of rows registered before, so that copies (1.8 million rows) need no parsing
        self._others: dict[bytes, list[tuple[int, str]]] = {}  # rows with another answer than the first, by prompt

    def is_copy(self, glance: bytes | None) -> bool:
        """Return whether a row with this `raw_digest` was registered before; count the row if so."""
        if glance not in self._glances:
            return False
        self.duplicates += 1
        return True

    def is_new(self, key: bytes, place: int, answer: str, glance: bytes | None) -> bool:
        """Return whether the prompt was never seen before. If it was, the row is counted as a duplicate or a contradiction."""
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
        """Return, for each prompt with several answers, its rows as (place, answer), and remove these prompts from `items`.

        Rows that were counted as duplicates are not listed.
        """
        contradicted = []
        for key, others in self._others.items():
            first = self.items.pop(key)
            contradicted.append([(first.place, first.answer), *others])
        self._others = {}
        return contradicted
