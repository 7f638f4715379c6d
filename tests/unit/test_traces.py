"""Spans are recorded only while a step is traced, and the merged trace is one that Chrome and Perfetto show."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tepo_megatron.command import parsers
from tepo_megatron.command.trace_request import coverage, read_trace
from tepo_megatron.monitor.hang_watchdog import place_of
from tepo_megatron.monitor.trace_file import TracePart, merge, step_folder, trace_path, write_part
from tepo_megatron.monitor.tracer import SAME, ClockOffset, Recording, Tracer, best_offset
from tepo_megatron.trainer.tracing import traced_collectives
from tests.chrome import named, rows


def ticking(start: int = 0) -> Callable[[], int]:
    """Return a clock that goes on by a microsecond whenever it is read."""
    return itertools.count(start, 1000).__next__


def recorded(tracer: Tracer, work: Callable[[], object]) -> Recording:
    tracer.begin()
    work()
    return tracer.end()


def test_a_trace_of_threads_and_of_an_event_loop_is_valid(tmp_path: Path) -> None:
    tracer = Tracer()

    async def request(prompt: int) -> None:
        made, unit = tracer.clock(), tracer.unit()
        await asyncio.sleep(0.001 * (prompt % 3))
        sent = tracer.clock()
        await asyncio.sleep(0.002)
        ended = tracer.clock()
        tracer.add("generate", "requests", made, ended, unit=unit, process="server 0", flows=[prompt])
        tracer.add("decode", "requests", sent, ended, unit=unit, process="server 0")

    def phase() -> None:
        with tracer.span("outer", size=3), tracer.span("inner", flows=range(5)):
            tracer.instant("weights of version 3", "weights", process="server 0")

    async def all_requests() -> None:
        await asyncio.gather(*map(request, range(8)))

    def work() -> None:
        threads = [threading.Thread(target=phase, name=f"worker {i}") for i in range(3)]
        for thread in threads:
            thread.start()
        asyncio.run(all_requests())
        for thread in threads:
            thread.join()

    tracer.span("before the step").__enter__()
    assert tracer.span("a") is tracer.span("b"), "an inactive tracer makes nothing"
    write_part(tmp_path, TracePart("rollout service", 0, 7, recorded(tracer, work), SAME))
    path, missing = merge(tmp_path, 7, ["rollout service"])
    assert path == trace_path(tmp_path, 7) and not missing and not step_folder(tmp_path, 7).exists()
    trace = read_trace(path)
    found = rows(trace)
    assert sum(len(spans) for (process, _), spans in found.items() if process == "server 0") == 16
    assert {row for process, row in found if process == "rollout service"} == {f"worker {i}" for i in range(3)}
    lanes = [row for process, row in found if row.startswith("requests")]
    assert len(lanes) == 8 and all([s["name"] for s in found["server 0", row]] == ["generate", "decode"] for row in lanes)
    assert len([e for e in trace["traceEvents"] if e["ph"] == "s"]) == 5, "three threads trained on five of the groups"
    assert [e["ph"] for e in trace["traceEvents"] if e["name"].startswith("weights")] == ["i"] * 3


def test_the_offset_of_a_clock_is_off_by_less_than_it_says() -> None:
    for true, there, back in itertools.product((-(10**12), 0, 10**12), (1000, 9000), (1000, 30_000)):
        trips = [(0, true + 50_000, 100_000), (200_000, 200_000 + there + true, 200_000 + there + back)]
        offset = best_offset(trips)
        assert abs(offset.ns - true) <= offset.uncertainty_ns == (there + back) // 2
    assert ClockOffset(5, 2) + ClockOffset(-1, 1) == ClockOffset(4, 3)


def test_parts_of_other_machines_are_merged_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def part(name: str, order: int, shift: int) -> TracePart:
        clock = ticking(10**9 + shift)
        tracer = Tracer(clock)

        def step() -> None:
            with tracer.span("step 4", "step"), tracer.span("update"):
                pass

        return TracePart(name, order, 4, recorded(tracer, step), ClockOffset(-shift, 1500))

    write_part(tmp_path, part("rollout service", 0, 0))
    write_part(tmp_path, part("rank 0", 1, 0))
    names = ["rollout service", "rank 0", "rank 1"]
    assert merge(tmp_path, 4, names)[1] == ["rank 1"] and step_folder(tmp_path, 4).exists()
    write_part(tmp_path, part("rank 1", 2, 10**15))
    assert parsers.main(["trace", str(tmp_path), "--step", "4"]) == 0 and not step_folder(tmp_path, 4).exists()
    said = capsys.readouterr().out.splitlines()
    assert said[2:] == [f"rank {i}: 2 spans, clock +- 0.002 ms, phases cover 33.3% of the step" for i in range(2)]
    trace = read_trace(trace_path(tmp_path, 4))
    assert rows(trace).keys() == {(name, row) for name in names for row in ("step", "main thread")}
    (first,), (second,) = (named(trace, f"rank {i}", "main thread", "update") for i in range(2))
    assert first["ts"] == second["ts"], "both clocks said the same at the same time"
    assert coverage(rows(trace)["rank 1", "step"]) == 0
    assert parsers.main(["trace", str(tmp_path), "--step", "5"]) == 1
    assert "this step was not traced; traces in this folder: step-000004.json.gz" in capsys.readouterr().err
    step_folder(tmp_path, 4).mkdir()
    (step_folder(tmp_path, 4) / "rank-0.part.json").write_text("{}")
    assert (
        parsers.main(["trace", str(tmp_path), "--step", "4"]) == 1 and "rank-0.part.json: not a part" in capsys.readouterr().err
    )


def test_a_rank_that_hangs_in_a_traced_step_is_at_the_caller_of_its_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: places.append(place_of(sys._getframe())))
    with traced_collectives():
        dist.barrier()
    dist.barrier()
    assert places[0] == places[1] and "tracing" not in places[0]
