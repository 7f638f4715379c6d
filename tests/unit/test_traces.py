"""Spans are recorded only while a step is traced, and the merged trace is one that Chrome and Perfetto show."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb

import pytest
import torch.distributed as dist

from tepo_megatron import cli
from tepo_megatron.controller.service_trace import ServiceTrace
from tepo_megatron.distributed.collective_spans import traced_collectives
from tepo_megatron.inference import request_spans
from tepo_megatron.inference.partial import GenerationRequest
from tepo_megatron.inference.request_spans import add_generation, server_times
from tepo_megatron.launcher.trace_request import coverage, read_trace
from tepo_megatron.observability.hang_watchdog import place_of
from tepo_megatron.observability.trace_file import TracePart, chrome_trace, merge, step_folder, trace_path, write_part
from tepo_megatron.observability.tracer import SAME, ClockOffset, Recording, Tracer, best_offset
from tepo_megatron.types import Prompt, SamplingParams
from tepo_megatron.utils.run_lock import RunLock
from tepo_megatron.utils.save_requests import TRACE, TRACED, TraceRequest, answer_trace, ask_trace, take_trace
from tepo_megatron.weight_sync.receiver.binary_answer import CONTENT_TYPE, TIMED, BinaryAnswers, current
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


def test_spans_end_with_the_step_and_there_are_not_too_many() -> None:
    tracer = Tracer(ticking(), most=3)

    def work() -> None:
        tracer.span("open").__enter__()
        for _ in range(5):
            with tracer.span("short"):
                pass

    recording = recorded(tracer, work)
    assert [span.name for span in recording.spans] == ["short"] * 3 + ["open"] and recording.dropped == 2
    assert recording.spans[-1].end == recording.ended and recording.spans[-1].args == {"unfinished": True}
    with tracer.span("after"):
        tracer.instant("after", "row")
        tracer.add("after", "row", 0, 1)
    assert recorded(tracer, lambda: None).spans == []
    tracer.begin()
    tracer.add("begun before the step", "requests", 5, 10**6)
    (early,) = tracer.end().spans
    trace = chrome_trace([TracePart("rollout service", 0, 7, Recording(10**6, 10**7, [early]), SAME)])
    assert [span["ts"] for span in rows(trace)["rollout service", "requests"]] == [0.0]
    tracer.begin()
    span = tracer.span("of the step before")
    with span:
        tracer.begin()
    assert tracer.end().spans == [], "a span that a new step has cut does not come back"


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
    assert cli.main(["trace", str(tmp_path), "--step", "4"]) == 0 and not step_folder(tmp_path, 4).exists()
    said = capsys.readouterr().out.splitlines()
    assert said[2:] == [f"rank {i}: 2 spans, clock +- 0.002 ms, phases cover 33.3% of the step" for i in range(2)]
    trace = read_trace(trace_path(tmp_path, 4))
    assert rows(trace).keys() == {(name, row) for name in names for row in ("step", "main thread")}
    (first,), (second,) = (named(trace, f"rank {i}", "main thread", "update") for i in range(2))
    assert first["ts"] == second["ts"], "both clocks said the same at the same time"
    assert coverage(rows(trace)["rank 1", "step"]) == 0
    assert cli.main(["trace", str(tmp_path), "--step", "5"]) == 1
    assert "this step was not traced; traces in this folder: step-000004.json.gz" in capsys.readouterr().err
    step_folder(tmp_path, 4).mkdir()
    (step_folder(tmp_path, 4) / "rank-0.part.json").write_text("{}")
    assert cli.main(["trace", str(tmp_path), "--step", "4"]) == 1 and "rank-0.part.json: not a part" in capsys.readouterr().err


def test_requests_for_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path)
    assert take_trace(tmp_path) is None and cli.main(["trace", run]) == 1 and "no config.yaml" in capsys.readouterr().err
    tree = {"name": "a", "model": {"path": "m"}, "data": {"train": "t"}, "parallel": {"dp": 2}}
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    for words, message in (
        ([], "no run is under way in this folder"),
        (["--steps", "0"], "--steps 0: a positive number"),
        (["--profile", "2"], "--profile 2: the run has 2 ranks; give one of 0 to 1"),
        (["--wait", "0"], "--wait 0: a positive number"),
        (["--step", "3", "--profile", "1"], "--step describes a step that was traced"),
    ):
        assert cli.main(["trace", run, *words]) == 1 and message in capsys.readouterr().err
    assert not (tmp_path / TRACE).exists()
    with RunLock(tmp_path) as lock:
        lock.sign()
        assert cli.main(["trace", run, "--wait", "0.2"]) == 1 and "no answer within 0.2 s" in capsys.readouterr().err
        assert take_trace(tmp_path) == TraceRequest() and take_trace(tmp_path) is None
        answering = threading.Timer(0.3, answer_trace, (tmp_path, "trace of step 3: here"))
        answering.start()
        assert cli.main(["trace", run, "--steps", "2", "--profile", "1"]) == 0
        assert capsys.readouterr().out == "trace of step 3: here\n"
        assert take_trace(tmp_path) == TraceRequest(2, 1)
    for text in ("[]", "{", '{"steps": 0}', '{"profile": -1}', '{"profile": true}', '{"other": 1}', '{"steps": "1"}'):
        (tmp_path / TRACE).write_text(text)
        assert take_trace(tmp_path) is None and (tmp_path / TRACED).read_text().startswith("refused: trace.request must hold")
    ask_trace(tmp_path, TraceRequest())
    assert not (tmp_path / TRACED).exists(), "an old answer is not the new one"


def test_a_request_whose_ranks_are_gone_is_answered(tmp_path: Path) -> None:
    service = ServiceTrace(tmp_path, print)
    service.lost()
    assert service.take_request() is None and not (tmp_path / TRACED).exists()
    ask_trace(tmp_path, TraceRequest(3))
    assert service.take_request() == TraceRequest(3)
    service.begin()
    service.lost()
    assert (tmp_path / TRACED).read_text().startswith("refused: the ranks were restarted")


def test_a_hang_in_a_traced_collective_is_reported_at_its_caller() -> None:
    before = dist.barrier
    with traced_collectives(), pytest.raises(ValueError, match="process group") as raised:
        dist.barrier()
    innermost = list(walk_tb(raised.value.__traceback__))[-1][0]
    place = place_of(innermost)
    assert ", in barrier" in place and "collective_spans" not in place and dist.barrier is before


def test_only_times_of_a_server_that_make_sense_are_used() -> None:
    assert server_times("first;dur=1.500, total;dur=2.000") == (1_500_000, 2_000_000)
    for odd in (None, "", "first;dur=3, total;dur=2", "first;dur=1.2.3, total;dur=9", "first;dur=., total;dur=1", "miss"):
        assert server_times(odd) is None
    assert server_times("first;dur=1, total;dur=99999999999999") is None


def test_the_times_of_a_server_end_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server read the request 2 us after it was sent; durations longer than the request itself are cut."""
    ask = GenerationRequest(Prompt(id=7, token_ids=(4, 5), answer="9"), SamplingParams(samples=2), seed=0)
    monkeypatch.setattr(request_spans, "tracer", tracer := Tracer(lambda: 10_000))
    tracer.begin()
    add_generation("server", ask, 3, 0, "first;dur=0.003, total;dur=0.008")
    add_generation("server", ask, 3, 9_000, "first;dur=5.000, total;dur=8.000")
    add_generation("server", ask, 3, 0, None)
    spans = [(span.name, span.start, span.end) for span in tracer.end().spans]
    parts = ("until it is read", "queue and prefill", "decode")
    assert spans == [
        ("generate", 0, 10_000), *zip(parts, (0, 2000, 5000), (2000, 5000, 10_000), strict=True),
        ("generate", 9000, 10_000), *zip(parts, (9000, 9000, 10_000), (9000, 10_000, 10_000), strict=True),
        ("generate", 0, 10_000),
    ]  # fmt: skip


def test_a_server_tells_its_times_to_those_who_ask() -> None:
    """The first token comes 5 ms after the request, and the end 5 ms later."""

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        exchange = current.get()
        assert exchange is not None
        await asyncio.sleep(0.005)
        exchange.first = time.monotonic()
        await asyncio.sleep(0.005)
        exchange.body = b"body"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"json"})

    async def answer(accept: str) -> dict[bytes, bytes]:
        sent = []

        async def send(message):  # type: ignore[no-untyped-def]
            sent.append(message)

        scope = {"type": "http", "headers": [(b"accept", accept.encode())]}
        await BinaryAnswers(app)(scope, None, send)  # type: ignore[arg-type]
        assert sent[1]["body"] == b"body"
        return dict(sent[0]["headers"])

    assert b"server-timing" not in asyncio.run(answer(CONTENT_TYPE))
    times = server_times(asyncio.run(answer(CONTENT_TYPE + TIMED))[b"server-timing"].decode())
    assert times is not None and 5e6 <= times[0] <= times[1] - 5e6
