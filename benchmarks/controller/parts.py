"""The parts of the table, each measured in a process of its own: rows that grow with the step, and single figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.controller.measuring import Point, power_law
from benchmarks.results import Target

LARGEST = 67.0  # millions of tokens of a step, which cheap parts measure and others are extrapolated to
DATA_PARALLEL = (1, 4, 16, 64)
REQUESTS, POOL_SERVERS, HARD_LIMIT = 1200, 64, 1024
CONVERSATIONS, SLOTS_OF_A_SERVER = 8192, 64
COUNTED_CONVERSATIONS = 1024  # with wake-ups counted, which costs time
EXPONENT, CPU_JSON, CPU_BINARY = 1.1, 0.5, 0.15  # targets


@dataclass(frozen=True)
class GrowthRow:
    """One row that grows with the step.

    Attributes:
        target: Bound on the CPU seconds per million tokens at the largest measured size. None: there is none.
    """

    title: str
    points: Sequence[Point]
    target: float | None = None

    def as_object(self) -> dict[str, Any]:
        """Return the row as it is written to JSON, with exponent, value at LARGEST and outcome."""
        exponent, factor = power_law(self.points)
        last = self.points[-1]
        measured = last.size > LARGEST / 2
        per_million = last.cpu_seconds / last.size
        return {
            "title": self.title, "points": [asdict(point) for point in self.points], "exponent": exponent,
            "at_largest": last.cpu_seconds if measured else factor * LARGEST**exponent, "extrapolated": not measured,
            "cpu_seconds_per_million": per_million, "target": self.target,
            "met": exponent <= EXPONENT and (self.target is None or per_million <= self.target),
        }  # fmt: skip


@dataclass(frozen=True)
class SingleFigure:
    """One number.

    Attributes:
        value: The number. None: what was to be measured did not run.
        unit: Its unit; "" for a count or a ratio.
    """

    title: str
    value: float | None
    unit: str = ""
    target: Target | None = None
    note: str = ""

    def as_object(self) -> dict[str, Any]:
        """Return the figure as it is written to JSON, with its outcome."""
        values = {} if self.value is None else {"value": self.value}
        met = None if self.target is None else bool(self.target.met(values))
        return asdict(self) | {"target": str(self.target) if self.target else None, "met": met}


Found = list[GrowthRow | SingleFigure]


def _at_most(bound: float) -> Target:
    return Target("value", "<=", bound)


def _intake(sizes: Sequence[float], answer_format: str, target: float) -> Found:
    from benchmarks.controller.engine_rows import intake

    name = {"json": "JSON"}.get(answer_format, answer_format)
    return [GrowthRow(f"intake, {name} answers: receive, decode, check", intake(sizes, answer_format), target)]


def _collect(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.engine_rows import collect

    return [GrowthRow("intake and grading, in the process that collects", collect(sizes, "binary"))]


def _grading(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.host_rows import grading

    return [GrowthRow("grading, in the process that collects (decode, last box)", grading(sizes))]


def _recording(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.host_rows import recording

    found = recording(sizes)
    return [GrowthRow("recording: write", found["write"]), GrowthRow("recording: read for a replay", found["read"])]


def _hand_over(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.hand_over import hand_over

    return [GrowthRow(f"hand-over to the ranks: {who}", points) for who, points in hand_over(sizes).items()]


def _ranks(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.host_rows import select_and_pack, weighting

    return [
        GrowthRow("every rank: flatten, select, pack one of 8 shares", select_and_pack(sizes)),
        GrowthRow("weighting objectives: keys and hashes, per epoch", weighting(sizes)),
    ]


def _planning(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.host_rows import plan

    found: Found = [GrowthRow(f"planning, pp 8, dp {dp}", plan(sizes, dp)) for dp in DATA_PARALLEL]
    return [*found, GrowthRow("planning, shared prompts, pp 4, dp 1", plan(sizes, 1, shared=True))]


def _take(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.host_rows import DATASET, SMALL_DATASET, take

    points, (few,) = take(sizes, DATASET), take([12.0], SMALL_DATASET)
    (many,) = take([12.0], DATASET)
    title = "time to take 512 returned prompts of 1M, in times of that to take 512 of 100k"
    return [
        GrowthRow("PromptStream.take of returned prompts of 1M (at 12M: 512)", points),
        SingleFigure(title, many.cpu_seconds / few.cpu_seconds, "times", note="a cache misses more often in a larger dataset"),
    ]


def _conversations(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.engine_rows import conversations

    found = conversations(CONVERSATIONS, POOL_SERVERS, SLOTS_OF_A_SERVER)
    title = f"{CONVERSATIONS} samples x 4 turns, {POOL_SERVERS} servers, {POOL_SERVERS * SLOTS_OF_A_SERVER} slots"
    if not found["complete"]:
        state = f"stopped after {found['requests']} of {found['asked']} requests and {found['wall_seconds']:.0f} s"
        note = f"{state}, of {found['cpu_seconds']:.0f} CPU s"
        return [SingleFigure(title, None, "CPU s", _at_most(60), note)]
    opened = f"binary answers; {found['opened']} connections opened per server"
    return [SingleFigure(title, found["cpu_seconds"], "CPU s", _at_most(60), opened)]


def _wakeups(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.engine_rows import conversations

    concurrency = 8
    found = conversations(COUNTED_CONVERSATIONS, POOL_SERVERS, concurrency, counts_wakeups=True)
    load = f"{COUNTED_CONVERSATIONS} samples x 4 turns, {POOL_SERVERS} servers, {POOL_SERVERS * concurrency} slots"
    note = "" if found["complete"] else f"stopped after {found['requests']} of {found['asked']} requests"
    return [
        SingleFigure(f"wake-ups per request outside of requests: {load}", found["wakeups_per_request"], "", _at_most(2), note),
        SingleFigure("the same: connections that a server had at once", found["at_once"], "", _at_most(concurrency + 1), note),
        SingleFigure("the same: connections opened per server", found["opened"], "", _at_most(concurrency + 1), note),
        SingleFigure("the same: CPU seconds per 1,000 requests", found["cpu_seconds"] / max(1, found["requests"]) * 1e3, "s"),
    ]


def _open_files(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.single_figures import open_files

    found: Found = []
    for hard, words in ((None, "soft limit"), (HARD_LIMIT, "soft and hard limit")):
        result = open_files(REQUESTS, POOL_SERVERS, hard)
        title = f"{REQUESTS} concurrent requests, {POOL_SERVERS} servers, {words} of 1,024 open files: runs"
        target = Target("value", ">=", 1) if hard is None else None
        found.append(SingleFigure(title, float(result["runs"]), "", target, result["error"]))
    return found


def _slow_down(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.slow_down import slow_down

    found = slow_down()
    note = ", ".join(f"{name} {value:.4g} steps/s" for name, value in found.items() if name != "slow-down")
    return [SingleFigure("slow-down of a rank while tokens arrive", found["slow-down"], "times", _at_most(1.05), note)]


def _tail(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.fake_pool import BINARY
    from benchmarks.controller.single_figures import tail

    rows: Found = []
    for name in (BINARY, "json"):
        title = f"tail after the last token of 16 x 20k, {name} answers, without the server's own part and the hand-over"
        target = _at_most(1) if name == BINARY else None
        try:
            found = tail(name)
        except RuntimeError as e:
            rows.append(SingleFigure(title, None, "s", target, str(e).partition(";")[0][:300]))
            continue
        note = f"intake {found['intake']:.2f} s, grading {found['grading']:.2f} s"
        rows.append(SingleFigure(title, found["tail"], "s", target, note))
    return rows


def _counts(sizes: Sequence[float]) -> Found:
    from benchmarks.controller.engine_rows import counted
    from benchmarks.controller.fake_pool import BINARY

    found: Found = []
    for name, bound in [("json", None), (BINARY, 12.0)]:
        value = counted(answer_format=name)["bytes per token"]
        found.append(SingleFigure(f"bytes per token of {name} answers", value, "B", _at_most(bound) if bound else None))
    return found


PARTS: Mapping[str, Callable[[Sequence[float]], Found]] = {
    "intake-json": partial(_intake, answer_format="json", target=CPU_JSON),
    "intake-binary": partial(_intake, answer_format="binary", target=CPU_BINARY),
    "collect": _collect,
    "grading": _grading,
    "recording": _recording,
    "hand-over": _hand_over,
    "ranks": _ranks,
    "planning": _planning,
    "take": _take,
    "conversations": _conversations,
    "wake-ups": _wakeups,
    "open-files": _open_files,
    "slow-down": _slow_down,
    "tail": _tail,
    "counts": _counts,
}
