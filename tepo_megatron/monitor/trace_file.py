"""The trace of a step: one file for each process while the step is written, merged into one for Perfetto.

    traces/step-000012/PROCESS.part.json   what a process recorded; removed once all are merged
    traces/step-000012.json.gz             the trace in the Trace Event Format of Chrome, for ui.perfetto.dev
    traces/step-000012-rank0-profile.json.gz   what torch's profiler recorded on a rank, in the same format

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON object form; times in us).
All times of the trace are those of the rollout service's clock, from the first start of a span.
"""

import gzip
import json
import os
import shutil
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.storage import replace_file
from tepo_megatron.monitor.tracer import ClockOffset, Recording, Span

TRACES = "traces"  # folder in that of a run
SERVICE = "rollout service"
_PART = ".part.json"
_COMPRESSION = 3  # of gzip; 9 takes four times the processor time for files that are 10 % smaller


@dataclass
class TracePart:
    """The recording of a step by one process, with its clock and its place."""

    process: str
    order: int
    step: int
    recording: Recording
    offset: ClockOffset
    host: str = ""  # set when it is written
    pid: int = 0


_PART_FORMAT: TypeAdapter[TracePart] = TypeAdapter(TracePart)


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the files of a step that are not merged yet."""
    return run_dir / TRACES / f"step-{step:06d}"


def trace_path(run_dir: Path, step: int) -> Path:
    """Return the path of the trace of a step."""
    return run_dir / TRACES / f"step-{step:06d}.json.gz"


def profile_path(run_dir: Path, step: int, rank: int) -> Path:
    """Return the path of what torch's profiler recorded of a step on a rank."""
    return run_dir / TRACES / f"step-{step:06d}-rank{rank}-profile.json.gz"


def rank_name(rank: int) -> str:
    """Return the name of a rank's process in the trace."""
    return f"rank {rank}"


def write_part(run_dir: Path, part: TracePart) -> None:
    """Write what a process recorded."""
    folder = step_folder(run_dir, part.step)
    folder.mkdir(parents=True, exist_ok=True)
    placed = replace(part, host=socket.gethostname(), pid=os.getpid())
    content = _PART_FORMAT.dump_json(placed, exclude_defaults=True)  # most spans have no more than a name, a row and times
    replace_file(folder / _file_name(part.process), content, durable=False)


def part_paths(run_dir: Path, step: int, expected: Sequence[str]) -> set[Path]:
    """Return the files of a step that are not merged yet."""
    folder = step_folder(run_dir, step)
    named = {path for name in expected if (path := folder / _file_name(name)).exists()}
    return named | set(folder.glob(f"*{_PART}"))


def _file_name(process: str) -> str:
    return f"{process.replace(' ', '-')}{_PART}"


def read_parts(run_dir: Path, step: int, expected: Sequence[str] = ()) -> list[TracePart]:
    """Return what the processes recorded of a step, in their order. Raises DataError if a file is damaged, or none is there."""
    parts = []
    for path in sorted(part_paths(run_dir, step, expected)):
        try:
            parts.append(_PART_FORMAT.validate_json(path.read_bytes(), strict=True))
        except ValidationError as e:
            raise DataError(f"{path}: not a part of a trace ({e!r}); remove it to merge the others") from None
    if not parts:
        raise DataError(f"{step_folder(run_dir, step)}: no process has left its part of a trace; trace another step")
    return sorted(parts, key=lambda part: part.order)


def merge(run_dir: Path, step: int, expected: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Merge what the processes recorded of a step. Return the path of the trace, and the processes that are missing."""
    parts, path = read_parts(run_dir, step, expected), trace_path(run_dir, step)
    missing = [name for name in expected if name not in {part.process for part in parts}]
    content = json.dumps(chrome_trace(parts), separators=(",", ":")).encode()
    replace_file(path, gzip.compress(content, _COMPRESSION), durable=False)
    if not missing:
        shutil.rmtree(step_folder(run_dir, step))
    return path, missing


def chrome_trace(parts: Sequence[TracePart]) -> dict[str, Any]:
    """Return the trace in Chrome's format."""
    zero = min(part.offset.ns + min([part.recording.begun, *(span.start for span in part.recording.spans)]) for part in parts)
    names = dict.fromkeys(part.process for part in parts)
    names |= dict.fromkeys(sorted({span.process for part in parts for span in part.recording.spans if span.process}))
    pids = {name: number for number, name in enumerate(names, start=1)}
    labels = {part.process: f"{part.host}, pid {part.pid}" for part in parts}
    events: list[dict[str, Any]] = []
    for name, pid in pids.items():
        events += [
            _metadata("process_name", pid, {"name": name}),
            _metadata("process_sort_index", pid, {"sort_index": pid}),
            *([_metadata("process_labels", pid, {"labels": labels[name]})] if name in labels else []),
        ]
    placed = _Placed(pids, zero)
    for part in parts:
        placed.add(part)
    return {
        "traceEvents": [*events, *placed.thread_names(), *placed.events(), *placed.arrows()],
        "displayTimeUnit": "ms",
        "metadata": {
            "step": parts[0].step,
            "clock": f"monotonic clock of the {SERVICE}",
            "processes": {
                part.process: {
                    "host": part.host,
                    "pid": part.pid,
                    "clock_offset_ns": part.offset.ns,
                    "clock_uncertainty_ns": part.offset.uncertainty_ns,
                    "dropped_spans": part.recording.dropped,
                }
                for part in parts
            },
        },
    }


class _Placed:
    def __init__(self, pids: dict[str, int], zero: int) -> None:
        self._pids, self._zero = pids, zero
        self._spans: list[tuple[int, int, int, Span]] = []  # (start in the trace, pid, tid, span)
        self._threads: dict[tuple[int, str, int], int] = {}  # (pid, row, lane) -> tid
        self._flows: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)  # key -> (start, pid, tid, duration)

    def add(self, part: TracePart) -> None:
        shift, rows = part.offset.ns - self._zero, defaultdict[tuple[int, str], list[Span]](list)
        for span in part.recording.spans:
            rows[self._pids[span.process or part.process], span.row].append(span)
        for (pid, row), spans in sorted(rows.items()):
            for lane, span in in_lanes(spans):
                tid = self._threads.setdefault((pid, row, lane), len(self._threads) + 1)
                self._spans.append((span.start + shift, pid, tid, span))
                for key in span.flows:
                    self._flows[key].append((span.start + shift, pid, tid, (span.end or span.start) - span.start))

    def thread_names(self) -> Iterator[dict[str, Any]]:
        for (pid, row, lane), tid in self._threads.items():
            yield _metadata("thread_name", pid, {"name": row if lane == 0 else f"{row} {lane + 1}"}, tid)
            yield _metadata("thread_sort_index", pid, {"sort_index": tid}, tid)

    def events(self) -> Iterator[dict[str, Any]]:
        for start, pid, tid, span in sorted(self._spans, key=lambda each: (each[0], each[0] - _duration(each[3]))):
            event = {"name": span.name, "cat": span.row, "pid": pid, "tid": tid, "ts": start / 1000, "args": span.args}
            if span.end is None:
                yield event | {"ph": "i", "s": "p"}
            else:
                yield event | {"ph": "X", "dur": (span.end - span.start) / 1000}

    def arrows(self) -> Iterator[dict[str, Any]]:
        for number, (key, places) in enumerate(sorted(self._flows.items()), start=1):
            places.sort()
            for index, (start, pid, tid, duration) in enumerate(places if len(places) > 1 else ()):
                phase = "s" if index == 0 else "f" if index == len(places) - 1 else "t"
                inside = start + min(1, duration)  # an arrow belongs to the span that is open at its time
                where = {"pid": pid, "tid": tid, "ts": inside / 1000}
                yield {"ph": phase, "bp": "e", "id": number, "name": f"group {key}", "cat": "group", **where}


def in_lanes(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """Return the spans of a row, each with a number of the lane in which it is nested or alone. The order is that of time.

    Spans of one `unit` share a lane. Two units share one if the first has ended before the second begins.
    """
    units: dict[object, list[Span]] = defaultdict(list)
    for span in spans:
        units[("alone", id(span)) if span.unit is None else span.unit].append(span)
    ordered = sorted(units.values(), key=lambda unit: (_start(unit), -_end(unit)))
    lanes: list[list[tuple[int, bool]]] = []  # of each lane: the spans that are open, each with its end and whether it nests
    placed = []
    for unit in ordered:
        start, end, nests = _start(unit), _end(unit), unit[0].unit is None
        place = None
        for number, lane in enumerate(lanes):
            while lane and lane[-1][0] <= start:
                lane.pop()
            if not lane or (nests and lane[-1][1] and end <= lane[-1][0]):
                place = number
                break
        if place is None:
            place = len(lanes)
            lanes.append([])
        lanes[place].append((end, nests))
        placed += [(place, span) for span in sorted(unit, key=lambda s: (s.start, -_duration(s)))]
    return sorted(placed, key=lambda each: (each[1].start, -_duration(each[1])))


def _start(unit: Sequence[Span]) -> int:
    return min(span.start for span in unit)


def _end(unit: Sequence[Span]) -> int:
    return max(span.start + _duration(span) for span in unit)


def _duration(span: Span) -> int:
    return 0 if span.end is None else span.end - span.start


def _metadata(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
