"""Read files with one JSON object per line, tolerating damage.

Every reader of a run's folder uses this module. A truncated, corrupt, duplicate or missing line affects only its own content,
and is reported. Only the standard library is imported, because launchers read progress with this module.
"""

import codecs
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_megatron.utils.escaping import excerpt

_LOGGER = logging.getLogger(__name__)
LONGEST_LINE = 64 * 2**20  # bytes; this package writes no longer line
_MOST_NAMED = 5  # faults reported individually
_MOST_PIECES = 1000  # maximum records searched for in one line
_WIDE = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

Record = dict[str, Any]


@dataclass(frozen=True)
class JsonLine:
    """One line of a file, or one of several records in the same line.

    Attributes:
        number: Line number in the file, from 1.
        raw: Its bytes without the line break.
        value: The JSON object; None if it cannot be read.
        fault: Why it cannot be read; empty if it can.
    """

    number: int
    raw: bytes
    value: Record | None
    fault: str = ""


@dataclass(frozen=True)
class StepRecords:
    """The step records of a run, sorted.

    Attributes:
        kept: One line per step, ascending.
        later: Lines of steps after the requested last one, in file order.
        rest: Every other line: unreadable, without a step, or an earlier record of a step recorded twice.
        faults: What is wrong with the file, one sentence each.
    """

    kept: list[JsonLine]
    later: list[JsonLine] = field(default_factory=list)
    rest: list[JsonLine] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        """Return the objects of `kept`."""
        return [line.value for line in self.kept if line.value is not None]


def parse_lines(data: bytes, first: str) -> list[JsonLine]:
    """Return the non-blank lines of `data`.

    `data`: UTF-8, with or without a byte order mark, Unix or Windows line breaks; or UTF-16 with a mark.
    """
    data = _utf8(data, first)
    lines: list[JsonLine] = []
    for number, raw in enumerate(data.split(b"\n"), start=1):
        raw = raw.removesuffix(b"\r")
        if raw.strip(b" \t\r"):
            lines += _lines_in(number, raw, first)
    return lines


def read_lines(path: Path, first: str) -> list[JsonLine]:
    """Read a file and return its lines. Raises OSError if the file cannot be read."""
    return parse_lines(path.read_bytes(), first)


def steps_of(lines: Iterable[JsonLine], last: int | None = None) -> StepRecords:
    """Sort the step records: each step once, in order.

    Of two records of the same step the later one in the file is kept, because it comes from the later attempt. `last`: last
    step to keep; a missing step up to it is a fault. None: keep all steps up to the greatest.
    """
    found = StepRecords([])
    by_step: dict[int, JsonLine] = {}
    doubled: list[int] = []
    unreadable: list[tuple[JsonLine, str]] = []
    order: list[int] = []
    for line in lines:
        fault = line.fault or _no_record(line.value)
        if fault:
            unreadable.append((line, fault))
            found.rest.append(line)
            continue
        assert line.value is not None
        step = line.value["step"]
        if last is not None and step > last:
            found.later.append(line)
            continue
        if step in by_step:
            doubled.append(step)
            found.rest.append(by_step[step])
        else:
            order.append(step)
        by_step[step] = line
    found.kept.extend(by_step[step] for step in sorted(by_step))
    found.faults.extend(named_faults(unreadable))
    if doubled:
        twice = _ranges([(step, step) for step in sorted(set(doubled))])
        found.faults.append(f"recorded more than once (the later record counts): {twice}")
    end = (max(by_step) if by_step else 0) if last is None else last
    if missing := _gaps(by_step, end):
        found.faults.append(f"no record of {_ranges(missing)}, and what is lost cannot be made again")
    if order != sorted(order):
        found.faults.append("its records were not in the order of their steps")
    return found


def named_faults(unreadable: Sequence[tuple[JsonLine, str]]) -> list[str]:
    """Return one sentence for each of the first unreadable lines, and one for all the others together."""
    said = [f"line {line.number} cannot be read: {fault}" for line, fault in unreadable[:_MOST_NAMED]]
    if len(unreadable) > _MOST_NAMED:
        said.append(f"{len(unreadable) - _MOST_NAMED} further lines cannot be read")
    return said


def report(path: Path, faults: Iterable[str]) -> None:
    """Warn about the faults of a file, in the run's log if one is open, else on stderr."""
    for fault in faults:
        _LOGGER.warning("%s: %s", path, fault)


def read_rows(path: Path, first: str, take: Callable[[Record], Any]) -> tuple[list[Any], list[str]]:
    """Convert every object of a file.

    Returns the converted objects, and the faults of the file, one sentence each. Raises OSError if the file cannot be read.
    """
    made: list[Any] = []
    unreadable: list[tuple[JsonLine, str]] = []
    for line in read_lines(path, first):
        if line.value is None:
            unreadable.append((line, line.fault))
            continue
        try:
            made.append(take(line.value))
        except (ValueError, TypeError, KeyError, OverflowError) as e:
            unreadable.append((line, excerpt(f"{type(e).__name__}: {e}")))
    return made, named_faults(unreadable)


def _record_start(first: str) -> bytes:
    return b'{"' + first.encode() + b'":'


def _utf8(data: bytes, first: str) -> bytes:
    is_wide = _record_start(first) not in data  # else the mark is damage in front of records that can be read
    for mark, encoding in _WIDE.items():
        if is_wide and data.startswith(mark):
            try:
                return data[: len(data) // 2 * 2].decode(encoding).encode(errors="surrogatepass")
            except UnicodeError:
                return data
    return data.removeprefix(codecs.BOM_UTF8)


def _lines_in(number: int, raw: bytes, first: str) -> list[JsonLine]:
    """Return the records of one physical line, usually one."""
    whole = _object(number, raw)
    if whole.value is not None or len(raw) > LONGEST_LINE:
        return [whole]
    begins = [match.start() for match in re.finditer(re.escape(_record_start(first)), raw)][:_MOST_PIECES]
    if not begins or (begins == [0] and _ended(raw) is None):
        return [whole]
    ends = [*begins[1:], len(raw)]
    found = [JsonLine(number, raw[: begins[0]], None, "text before a record")] if raw[: begins[0]].strip() else []
    for begin, end in zip(begins, ends, strict=True):
        piece = raw[begin:end].rstrip()
        size = _ended(piece)
        if size is None:
            found.append(_object(number, piece))
            continue
        found.append(_object(number, piece[:size]))
        if piece[size:].strip():
            found.append(JsonLine(number, piece[size:], None, "text after a record"))
    return found


def _ended(raw: bytes) -> int | None:
    """Return the size in bytes of the complete object at the start of `raw`; None if there is none."""
    try:
        text = raw.decode("utf-8", "surrogateescape")
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return len(text[:end].encode("utf-8", "surrogateescape"))


def _object(number: int, raw: bytes) -> JsonLine:
    if len(raw) > LONGEST_LINE:
        return JsonLine(number, raw, None, f"it has {len(raw)} bytes")
    try:
        value = json.loads(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return JsonLine(number, raw, None, f"not UTF-8 ({len(raw)} bytes)")
    except (ValueError, RecursionError) as e:
        why = getattr(e, "msg", None) or excerpt(str(e), 60)
        return JsonLine(number, raw, None, f"not valid JSON ({why}; {len(raw)} bytes)")
    if not isinstance(value, dict):
        return JsonLine(number, raw, None, "not an object")
    return JsonLine(number, raw, value)


def _no_record(value: Record | None) -> str:
    """Return why an object is not a step record; empty if it is one."""
    step = None if value is None else value.get("step")
    if value is None or isinstance(step, bool) or not isinstance(step, int):
        return 'not an object with an integer "step"'
    if not 1 <= step < 2**53:
        return f"no run has a step {excerpt(str(step), 20)}"
    for key, number in value.items():
        if number is not None and not _is_number(number):
            return f"its {excerpt(repr(key), 40)} is no number"
    return ""


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False


def _gaps(present: Iterable[int], end: int) -> list[tuple[int, int]]:
    """Return the missing steps from 1 to `end` as inclusive ranges. The steps are not enumerated, because `end` may be huge."""
    gaps, expected = [], 1
    for step in [*sorted(present), end + 1]:
        if step > expected:
            gaps.append((expected, step - 1))
        expected = max(expected, step + 1)
    return gaps


def _ranges(gaps: Sequence[tuple[int, int]]) -> str:
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in gaps[:_MOST_NAMED]]
    more = f" and {len(gaps) - _MOST_NAMED} further ranges" if len(gaps) > _MOST_NAMED else ""
    plural = "s" if len(gaps) > 1 or gaps[0][0] != gaps[0][1] else ""
    return f"step{plural} {', '.join(shown)}{more}"
