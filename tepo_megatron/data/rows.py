"""The rows of a dataset: counts of those that are used and dropped, for the log of the run, and copies among them.

The first row of each prompt is kept, copies are counted, and rows with contradicting answers are collected.
"""

import hashlib
import json
import marshal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.data.schemas import Messages

_MOST_NAMED = 10  # most rows that one message names


@dataclass
class RowFaults:
    """Rows that cannot be used. They are counted, and without `skip` refused together."""

    skip: bool
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, fault: str, rows: int = 1) -> None:
        self.count += rows
        if len(self.first) < _MOST_NAMED:
            self.first.append(fault)

    def refuse(self) -> None:
        """Raise DataError that names the first rows, unless there are none or they are skipped."""
        if self.count and not self.skip:
            many = f"{self.count} bad rows: " if self.count > 1 else ""
            more = f"; and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
            raise DataError(
                f"{many}{'; '.join(self.first)}{more} (data.skip_bad_rows=true leaves such rows out, and counts them)"
            )


@dataclass
class DatasetReport:
    """Counts of one dataset's rows.

    Attributes:
        also_fit: Schemas that the first row fits, too.
        example: First prompt and its answer, with file and row.
        duplicates: Rows dropped because an earlier row has the same prompt and answer.
        elsewhere: Prompts dropped because an earlier set has them.
        unreadable: Answers that the grader cannot read, each with file and row, whether dropped or not.
        dropped_unreadable: The prompts of `unreadable` were dropped.
        unsettled: Answers for which the grader timed out or died.
        untried: Number of answers that were not tried for lack of time.
        unboxed: Number of prompts that ask for a last line "Answer: ..." and not for a box.
        too_long: Prompts dropped because they exceed `data.max_prompt_tokens`.
    """

    source: str
    schema: str
    faults: RowFaults
    also_fit: list[str] = field(default_factory=list)
    example: str = ""
    rows: int = 0
    duplicates: int = 0
    elsewhere: int = 0
    outside: int = 0
    unreadable: list[str] = field(default_factory=list)
    dropped_unreadable: bool = False
    unsettled: list[str] = field(default_factory=list)
    untried: int = 0
    unboxed: int = 0
    too_long: int = 0
    prompts: int = 0

    def __str__(self) -> str:
        """Return the counts in one line."""
        counts = (
            (self.duplicates, "duplicates"),
            (self.faults.count, "bad rows"),
            (self.outside, "outside the slice"),
            (self.elsewhere, "in an earlier set"),
            (len(self.unreadable) if self.dropped_unreadable else 0, "with answers that the grader cannot read"),
            (self.too_long, "over data.max_prompt_tokens"),
        )
        dropped = ", ".join(f"{count} {what}" for count, what in counts if count) or "none"
        return f"{self.source}: {self.schema}, {self.rows} rows, {self.prompts} prompts; dropped: {dropped}"

    def reading(self) -> str:
        """Return one line: a prompt with its answer, and the other schemas that fit."""
        others = f"; these schemas fit, too, with the same answers: {shorten(self.also_fit)}" if self.also_fit else ""
        return f"{self.source}: {self.example}{others}"

    def details(self) -> list[str]:
        """Return further lines: dropped rows and what to fix."""
        lines = [f"left out: {fault}" for fault in self.faults.first]
        if self.unreadable:
            lines.append(f"{len(self.unreadable)} answers that the grader cannot read: {shorten(self.unreadable)}")
        if self.unsettled:
            lines.append(f"{len(self.unsettled)} answers that the grader did not settle: {shorten(self.unsettled)}")
        if self.untried:
            lines.append(f"{self.untried} answers were not tried on the grader: there was no time for more")
        if self.unboxed:
            lines.append(
                f'warning: {self.unboxed} prompts ask for a last line "Answer: ..." and say nothing of \\boxed{{}}, which is '
                "all that the grader reads: docs/data.md says what to do"
            )
        return [f"{self.source}: {line}" for line in lines]


def shorten(things: list[str]) -> str:
    """Return the first ten things in one string, and how many more there are."""
    more = f", and {len(things) - _MOST_NAMED} more" if len(things) > _MOST_NAMED else ""
    return ", ".join(things[:_MOST_NAMED]) + more


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
