"""Read files with one JSON object per line, which this package alone writes.

A kill may cut the last line, and a disk may damage others: a line that cannot be read affects only its own content, and is
reported. Only the standard library is imported, because launchers read progress with this module.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import excerpt

_LOGGER = logging.getLogger(__name__)
_MOST_NAMED = 5  # faults reported individually
EVALUATION = "evaluation/"  # first part of the keys of an evaluation's record

Record = dict[str, Any]


@dataclass(frozen=True)
class JsonLine:
    """One line of a file."""

    number: int
    raw: bytes
    value: Record | None
    fault: str = ""

    @property
    def step(self) -> int:
        """Return the step of a record."""
        assert self.value is not None
        return int(self.value["step"])


@dataclass(frozen=True)
class StepRecords:
    """The records of a run's steps and evaluations, each sorted by step."""

    kept: list[JsonLine]
    kept_evaluations: list[JsonLine] = field(default_factory=list)  # see `is_evaluation`
    later: list[JsonLine] = field(default_factory=list)  # lines of steps after the requested last one, in file order
    # Every other line: unreadable, without a step, or an earlier record of a step or an evaluation recorded twice
    rest: list[JsonLine] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        """Return the objects of `kept`."""
        return [line.value for line in self.kept if line.value is not None]

    @property
    def evaluations(self) -> list[Record]:
        """Return the objects of `kept_evaluations`."""
        return [line.value for line in self.kept_evaluations if line.value is not None]


def parse_lines(data: bytes) -> list[JsonLine]:
    """Return the lines of `data` that are not blank."""
    return [_line(number, raw) for number, raw in enumerate(data.split(b"\n"), start=1) if raw.strip()]


def read_lines(path: Path) -> list[JsonLine]:
    """Read a file and return its lines. Raises OSError if the file cannot be read."""
    return parse_lines(path.read_bytes())


def steps_of(lines: Iterable[JsonLine], last: int | None = None, last_evaluation: float | None = None) -> StepRecords:
    """Sort the records: each step and each step's evaluation once, in order.

    Of two records of the same step the later one in the file is kept, because it comes from the later attempt. `last`: last
    step to keep; a missing step up to it is a fault. None: keep all steps up to the greatest. `last_evaluation`: last step
    whose evaluation is kept; None: `last`.
    """
    steps = StepRecords([])
    by_step: dict[int, JsonLine] = {}
    evaluations: dict[int, JsonLine] = {}
    last_evaluation = last if last_evaluation is None else last_evaluation
    doubled: set[int] = set()
    unreadable: list[tuple[JsonLine, str]] = []
    for line in lines:
        fault = line.fault or _no_record(line.value)
        if fault:
            unreadable.append((line, fault))
            steps.rest.append(line)
            continue
        step, evaluates = line.step, is_evaluation(line.value or {})
        kind, end = (evaluations, last_evaluation) if evaluates else (by_step, last)
        if end is not None and step > end:
            steps.later.append(line)
            continue
        if step in kind:
            doubled |= set() if evaluates else {step}
            steps.rest.append(kind[step])
        kind[step] = line
    steps.kept.extend(by_step[step] for step in sorted(by_step))
    steps.kept_evaluations.extend(evaluations[step] for step in sorted(evaluations))
    steps.faults.extend(named_faults(unreadable))
    if doubled:
        steps.faults.append(f"recorded more than once (the later record counts): {_named([(s, s) for s in sorted(doubled)])}")
    if missing := _gaps(by_step, max(by_step, default=0) if last is None else last):
        steps.faults.append(f"no record of {_named(missing)}, and what is lost cannot be made again")
    return steps


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of an evaluation of the weights of its step, which may be 0."""
    keys = record.keys() - {"step"}
    return bool(keys) and all(key.startswith(EVALUATION) for key in keys)


def named_faults(unreadable: Sequence[tuple[JsonLine, str]]) -> list[str]:
    """Return one sentence for each of the first unreadable lines, and one for all the others together."""
    faults = [f"line {line.number} cannot be read: {fault}" for line, fault in unreadable[:_MOST_NAMED]]
    if len(unreadable) > _MOST_NAMED:
        faults.append(f"{len(unreadable) - _MOST_NAMED} further lines cannot be read")
    return faults


def report(path: Path, faults: Iterable[str]) -> None:
    """Warn about the faults of a file, in the run's log if one is open, else on stderr."""
    for fault in faults:
        _LOGGER.warning("%s: %s", path, fault)


def read_rows(path: Path, take: Callable[[Record], Any]) -> tuple[list[Any], list[str]]:
    """Return what `take` makes of every object of a file, and the faults of the file. Raises OSError."""
    rows: list[Any] = []
    unreadable: list[tuple[JsonLine, str]] = []
    for line in read_lines(path):
        if line.value is None:
            unreadable.append((line, line.fault))
            continue
        try:
            rows.append(take(line.value))
        except (ValueError, TypeError, KeyError, OverflowError) as e:
            unreadable.append((line, excerpt(f"{type(e).__name__}: {e}")))
    return rows, named_faults(unreadable)


def _line(number: int, raw: bytes) -> JsonLine:
    try:
        value = json.loads(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return JsonLine(number, raw, None, f"not UTF-8 ({len(raw)} bytes)")
    except (ValueError, RecursionError) as e:
        why = getattr(e, "msg", None) or excerpt(str(e), 60)
        return JsonLine(number, raw, None, f"not valid JSON ({why}; {len(raw)} bytes)")
    return JsonLine(number, raw, value) if isinstance(value, dict) else JsonLine(number, raw, None, "not an object")


def _no_record(value: Record | None) -> str:
    """Return why an object is not a step record; empty if it is one."""
    step = None if value is None else value.get("step")
    if value is None or isinstance(step, bool) or not isinstance(step, int) or step < (0 if is_evaluation(value) else 1):
        return 'not an object with an integer "step"'
    for key, number in value.items():
        if number is not None and not (isinstance(number, int | float) and math.isfinite(number)):
            return f"its {excerpt(repr(key), 40)} is no number"
    return ""


def _gaps(present: Iterable[int], end: int) -> list[tuple[int, int]]:
    """Return the missing steps from 1 to `end` as inclusive ranges."""
    gaps, expected = [], 1
    for step in [*sorted(present), end + 1]:
        if step > expected:
            gaps.append((expected, step - 1))
        expected = max(expected, step + 1)
    return gaps


def _named(ranges: Sequence[tuple[int, int]]) -> str:
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:_MOST_NAMED]]
    more = f" and {len(ranges) - _MOST_NAMED} further ranges" if len(ranges) > _MOST_NAMED else ""
    return f"step{'s' if shown != [str(ranges[0][0])] else ''} {', '.join(shown)}{more}"
