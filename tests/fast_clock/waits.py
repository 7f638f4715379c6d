"""The self-test of the fast clock, run under it: `python waits.py SPEED`. It names each wait that the clock does not scale."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import uvloop
import zmq
from torch import zeros

SECONDS = 20.0  # of each wait; all wait at once
LIMIT = 60.0  # real seconds, of a busy machine


def real_time() -> float:
    """Return seconds of the kernel's clock, which nothing can preload."""
    return float(Path("/proc/uptime").read_text().split()[0])


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire(timeout=SECONDS)


def get() -> None:
    with contextlib.suppress(queue.Empty):
        queue.Queue[None]().get(timeout=SECONDS)


async def nothing() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            await asyncio.Event().wait()


def child() -> None:
    with subprocess.Popen(["sleep", "infinity"], env={}) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        process.kill()


def epoll() -> None:
    with select.epoll() as nobody:
        nobody.poll(SECONDS)


def gloo() -> None:
    """Wait for a message that does not come, from a peer that is a thread of this process."""
    store, joined = dist.HashStore(), threading.Barrier(2)

    def join(rank: int) -> dist.ProcessGroupGloo:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1000))
        joined.wait()
        return group

    peers: list[dist.ProcessGroupGloo] = []
    peer = threading.Thread(target=lambda: peers.append(join(1)))
    peer.start()
    group = join(0)
    peer.join()
    with contextlib.suppress(RuntimeError):
        group.recv([zeros(1)], 1, 0).wait(timedelta(seconds=SECONDS))


def store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.suppress(dist.DistStoreError):
        server.wait(["nobody sets it"], timedelta(seconds=SECONDS))


WAITS: dict[str, Callable[[], object]] = {
    "time.sleep": lambda: time.sleep(SECONDS),
    "Lock.acquire": lock,
    "Event.wait": lambda: threading.Event().wait(SECONDS),
    "Queue.get": get,
    "asyncio": lambda: asyncio.run(nothing()),
    "uvloop": lambda: uvloop.run(nothing()),
    "Popen.wait": child,
    "select": lambda: select.select([], [], [], SECONDS),
    "poll": lambda: select.poll().poll(SECONDS * 1000),
    "epoll": epoll,
    "zmq": lambda: zmq.Context.instance().socket(zmq.PULL).poll(int(SECONDS * 1000)),
    "gloo": gloo,
    "TCPStore": store,
}


def main(speed: float) -> int:
    """Return the exit status, 1 if a wait of SECONDS of the fast clock was not one of SECONDS / `speed`.

    A busy machine makes a wait longer, never shorter.
    """
    seconds: dict[str, float] = {}

    def measure(name: str) -> None:
        begun = real_time()
        WAITS[name]()
        seconds[name] = real_time() - begun

    threads = [threading.Thread(target=measure, args=(name,), daemon=True) for name in WAITS]
    end = real_time() + LIMIT
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
