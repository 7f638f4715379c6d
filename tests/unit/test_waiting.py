"""An answer that came in time counts, also where this process was stopped or busy when its time limit passed."""

import asyncio
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from tepo_megatron.base import loop as event_loop
from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.loop import LATE_SECONDS, LoopThread, time_limit
from tepo_megatron.base.processes import reap
from tepo_megatron.engines.servers import guard
from tepo_megatron.engines.servers.sleep import until
from tepo_megatron.rewards.grading import sandbox
from tests import waiting

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


async def _slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@pytest.mark.slow
def test_a_slow_coroutine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_SECONDS", 2.0)  # within which a busy machine lets the loop make a turn
    thread = LoopThread("grading")
    assert thread.run(_slow(5.0)) == "done"
    thread.stop()


def test_a_blocked_event_loop_is_named_by_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_SECONDS", 0.1)
    thread, released = LoopThread("grading"), threading.Event()

    async def blocking() -> None:
        released.wait(60)

    error = waiting.error_of(lambda: thread.run(blocking()), seconds=10)
    released.set()
    assert error == f"the event loop grading has not run for 0.1 s; {blocking.__qualname__} waits in it"
    monkeypatch.setattr(event_loop, "BLOCKED_SECONDS", 10.0)
    thread.stop()


@pytest.mark.slow
def test_servers_that_do_not_change_are_named() -> None:
    """Each change begins another wait. A busy machine may be 1.5 s late."""

    async def waited(changes: int) -> float:
        changed, begun = asyncio.Condition(), time.monotonic()

        async def change() -> None:
            for _ in range(changes):
                await asyncio.sleep(0.5)
                async with changed:
                    changed.notify_all()

        changing = asyncio.create_task(change())
        with pytest.raises(RolloutError, match=r"servers do not start: nothing has changed for 2 s"):
            await until(changed, lambda: False, 2.0, "servers do not start")
        await changing
        return time.monotonic() - begun

    assert asyncio.run(waited(4)) > 3.9


def test_a_process_that_the_kernel_does_not_end_is_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert reap(process, 0.05) is None
        assert f"pid {process.pid} was killed and has not ended in 0.05 s" in caplog.text
        process.kill()
        assert reap(process) == -9


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap (Debian: apt-get install bubblewrap)")
def test_a_program_that_ended_in_time_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the grader, as its clock sees it, from the start of the program until long after its end."""

    others = psutil.Process().children()  # of other tests in this process, some of which may have ended

    def clock() -> Iterator[float]:
        yield time.monotonic()
        while not any(c.status() == psutil.STATUS_ZOMBIE for c in psutil.Process().children() if c not in others):
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
            waiting.until(lambda: [child.name() for child in psutil.Process(process.pid).children()] == ["sleep"])
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * guard.OWNER_CHECK_SECONDS)
            process.send_signal(signal.SIGCONT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2 * guard.OWNER_CHECK_SECONDS)
        finally:
            process.terminate()
