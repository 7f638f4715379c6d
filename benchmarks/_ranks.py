"""Ranks of one machine in fresh processes, because CUDA does not survive a fork.

They meet at a store on the loopback interface that this process holds. torchrun's `--standalone` would tell them this machine's
name, which nothing resolves on a machine without a network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from benchmarks.results import ROOT
from tepo_megatron.config import Config
from tepo_megatron.dist.platform import activate

if TYPE_CHECKING:  # Megatron-Core is imported after the platform is active
    from tepo_megatron.actor.actor import Actor

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # Gloo would look up this machine's name
POLL_SECONDS = 0.02
STACKS_SECONDS = 0.3  # for a rank to write its stacks
# A rank writes the stacks of its threads on SIGUSR1, also while it hangs in C code. Then it is what it was asked to be.
RANK = """
import faulthandler, runpy, signal, sys
faulthandler.register(signal.SIGUSR1)
kind, code, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(code, run_name="__main__", alter_sys=True) if kind == "-m" else exec(code, {"__name__": "__main__"})
"""
_started: list[Ranks] = []


def world(port: int, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Return the environment that torchrun would set for a rank, with a store that the caller holds."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def store_here() -> dist.TCPStore:
    """Return a store for `world`, on a port that the system picks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def show_stacks() -> None:
    """Show the stacks of all ranks that this process has started."""
    for ranks in list(_started):
        ranks.show_stacks()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Make this process a world of one rank, for code that calls `init_process_group`."""
    store = store_here()
    os.environ.update(LOOPBACK | world(store.port))
    yield
    del store


@contextlib.contextmanager
def actor_of(cfg: Config) -> Iterator[Actor]:
    """Yield the actor of a config in a world of one rank, this process."""
    platform = activate(cfg.platform)
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.dist import parallel

    with one_rank():
        groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
        try:
            yield Actor.open(cfg, groups)
        finally:
            parallel.shutdown()


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Start the ranks of a world on entry; no rank outlives the block.

    The ranks' code has to call `die_with_parent`, so that they do not outlive this process either.
    """

    def __init__(self, size: int, words: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Store what to start, and the file for the output of all ranks. None: that of this process."""
        self._size, self._words, self._log, self._env = size, words, log, dict(env or {})
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._store = store_here()
        threads = {"OMP_NUM_THREADS": "1"} if self._size > 1 else {}
        with contextlib.ExitStack() as files:
            output = files.enter_context(self._log.open("ab")) if self._log else None
            for rank in range(self._size):
                env = LOOPBACK | threads | os.environ | self._env | world(self._store.port, rank, self._size)
                words = [sys.executable, "-c", RANK, *self._words]
                process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                self._processes.append(process)
        _started.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _started.remove(self)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may hold a process that is stuck in it
                process.wait(5)
        del self._store

    def show_stacks(self) -> None:
        """Let each rank that runs write the stacks of its threads, one after the other, into this process's error output."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                continue
            written = self._log.stat().st_size if self._log else 0
            print(f"stacks of rank {rank} of {self._size}:", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_SECONDS)
            if self._log:
                print(self._log.read_bytes()[written:].decode(errors="replace"), file=sys.stderr, flush=True)

    def status(self) -> int | None:
        """Return the exit status of a rank that failed, 0 if all ended well, None while they run."""
        statuses = [process.poll() for process in self._processes]
        failed = [status for status in statuses if status]
        return failed[0] if failed else None if None in statuses else 0

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended well. Raise CalledProcessError if one failed, TimeoutExpired if the time is up."""
        deadline = time.monotonic() + seconds
        while (status := self.status()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self._words), seconds)
            time.sleep(POLL_SECONDS)
        if status:
            raise subprocess.CalledProcessError(status, list(self._words))
