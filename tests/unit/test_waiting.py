"""An answer that came in time counts, also where this process was stopped or busy when its time limit passed."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from tepo_megatron.grading import sandbox
from tepo_megatron.inference.servers import guard
from tepo_megatron.utils.loop import LATE_SECONDS, time_limit
from tests.waiting import until

LIMIT_SECONDS = 0.05


async def _read(seconds: float, blocked: float) -> bytes:
    """Return what a pipe holds after the event loop was blocked; `TimeoutError` if it holds nothing."""
    reader, writer = os.pipe()
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(reader, arrived.set)

    def block() -> None:
        time.sleep(blocked)
        os.write(writer, b"answer")

    if blocked:
        loop.call_soon(block)
    try:
        async with time_limit(seconds):
            await arrived.wait()
            for _ in range(10):  # turns of the event loop, as an HTTP answer takes
                await asyncio.sleep(0)
        return os.read(reader, 100)
    finally:
        loop.remove_reader(reader)
        os.close(reader)
        os.close(writer)


def test_a_late_event_loop_looks_once_more() -> None:
    assert asyncio.run(_read(LIMIT_SECONDS, blocked=LIMIT_SECONDS + 2 * LATE_SECONDS)) == b"answer"


def test_a_limit_ends_what_does_not_come() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(_read(LIMIT_SECONDS, blocked=0.0))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap (Debian: apt-get install bubblewrap)")
def test_a_program_that_ended_in_time_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the grader, as its clock sees it, from the start of the program until long after its end."""

    def clock() -> Iterator[float]:
        yield time.monotonic()
        while not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children()):
            time.sleep(0.001)
        while True:
            yield time.monotonic() + 1000.0

    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=functools.partial(next, clock())))
    limits = sandbox.Limits(cpu_seconds=4, wall_seconds=10, memory_mib=256, processes=8)
    finished = sandbox.run([sandbox.PROGRAM], {sandbox.PROGRAM: b"print('right')"}, b"", limits)
    assert (finished.why, finished.stdout) == ("exited", b"right\n")


def test_a_guard_that_was_suspended_keeps_its_server() -> None:
    words = [sys.executable, "-P", "-m", guard.__name__, str(os.getpid()), "0", "-", "sleep", "600"]
    with subprocess.Popen(words) as process:
        try:
            until(lambda: [child.name() for child in psutil.Process(process.pid).children()] == ["sleep"])
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * guard.OWNER_CHECK_SECONDS)
            process.send_signal(signal.SIGCONT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2 * guard.OWNER_CHECK_SECONDS)
        finally:
            process.terminate()
