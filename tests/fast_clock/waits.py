"""The self-test of the fast clock, run under it: `python waits.py SPEED`. It names each wait that the clock does not scale."""

import asyncio
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import uvloop
import zmq
from torch import zeros

SECONDS = 20.0  # of each wait; all wait at once
HELD = threading.Lock()
LIMIT = 60.0  # real seconds, of a busy machine


def get() -> None:
    with suppress(queue.Empty):
        queue.Queue[None]().get(timeout=SECONDS)


async def nothing() -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            await asyncio.Event().wait()


def child() -> None:
    with subprocess.Popen(["sleep", "infinity"], env={}) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        process.kill()


def gloo() -> None:
    """Wait for a message of a peer, which is a thread of this process and sends none."""
    store, groups = dist.HashStore(), dict[int, dist.ProcessGroupGloo]()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1000))

    peer = threading.Thread(target=join, args=(1,))
    peer.start()
    join(0)
    peer.join()
    with suppress(RuntimeError):
        groups[0].recv([zeros(1)], 1, 0).wait(timedelta(seconds=SECONDS))


WAITS: dict[str, Callable[[], object]] = {
    "time.sleep": lambda: time.sleep(SECONDS),
    "Lock.acquire": lambda: HELD.acquire() and HELD.acquire(timeout=SECONDS),
    "Event.wait": lambda: threading.Event().wait(SECONDS),
    "Queue.get": get,
    "asyncio": lambda: asyncio.run(nothing()),
    "uvloop": lambda: uvloop.run(nothing()),
    "Popen.wait": child,
    "select": lambda: select.select([], [], [], SECONDS),
    "poll": lambda: select.poll().poll(SECONDS * 1000),
    "epoll": lambda: select.epoll().poll(SECONDS),
    "zmq": lambda: zmq.Context.instance().socket(zmq.PULL).poll(int(SECONDS * 1000)),
    "gloo": gloo,
}


def real_time() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])  # no library can change it


def main(speed: float) -> int:
    """Return the exit status: 1 if a wait was not one of SECONDS / `speed`. A busy machine makes it longer, never shorter."""
    seconds: dict[str, float] = {}

    def measure(name: str) -> None:
        begun = real_time()
        WAITS[name]()
        seconds[name] = real_time() - begun

    end = real_time() + LIMIT
    threads = [threading.Thread(target=measure, args=(name,), daemon=True) for name in WAITS]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and real_time() < end:
        time.sleep(0.1)
    wrong = [name for name in WAITS if not 0.9 * SECONDS / speed <= seconds.get(name, LIMIT) < SECONDS / 2]
    for name in wrong:
        took = f"took {seconds[name]:.2f} s" if name in seconds else f"has not ended after {LIMIT:g} s"
        print(f"the fast clock does not scale {name}: {SECONDS:g} s at x{speed:g} {took}", file=sys.stderr, flush=True)
    return bool(wrong)


if __name__ == "__main__":
    os._exit(main(float(sys.argv[1])))  # a thread that still waits does not hold it up
