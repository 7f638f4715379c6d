"""Worlds of several ranks inside a test, in tenths of a second: every rank is a fork of the pytest process.

The pytest process has imported Megatron-Core once and never joins a group itself (a fork would inherit it), so worlds of one
rank are forked too. Forks share the parent's memory: `fn` and its arguments need not be picklable, its result must be.
"""

import contextlib
import ctypes
import gc
import io
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import tepo_megatron.actor.actor  # noqa: F401  imported here, else again by every rank
from tepo_megatron.base.processes import die_with_parent
from tests.running.guard import stack

_LIBC = ctypes.CDLL(None)
_END_SECONDS = 5.0  # for processes that were killed to be gone


def run_world(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """Run `fn(rank, *args)` on `size` ranks and return their results, by rank.

    The ranks see the environment that torchrun sets, so `init_process_group` needs no address. No rank ends before all have
    returned. Then, or when one fails, or after `timeout` seconds, all are killed, with every process that they started.

    Raises:
        AssertionError: A rank failed, or the time is up. The message holds the traceback of the rank that failed first, or, on
            a timeout, the stack of each rank.
    """
    done, write_end = os.pipe()  # gets a byte from each rank that has a result
    with (
        os.fdopen(done, "rb", buffering=0),
        os.fdopen(write_end, "wb", buffering=0) as finished,
        tempfile.TemporaryDirectory(prefix="world-") as name,
        socket.create_server(("127.0.0.1", 0)) as door,
    ):
        folder, deadline = Path(name), time.monotonic() + timeout
        sys.stdout.flush()
        sys.stderr.flush()
        _LIBC.malloc_trim(0)  # a fork takes time for each page, and most pages of a long session are free
        pids: dict[int, int] = {}  # rank of each process
        try:
            for rank in range(size):
                pids[_fork(rank, size, door, folder, finished, fn, args)] = rank
            failure = _wait(pids, folder, done, deadline)
        finally:
            _kill(pids)
        if failure is not None:
            raise AssertionError(failure)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(size)]


def _fork(
    rank: int, size: int, door: socket.socket, folder: Path, finished: io.FileIO, fn: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here and in the child: whoever comes first
        return pid
    try:
        gc.freeze()  # what the parent made is never garbage here: to look through it would copy its pages, a tenth of a world
        torch.set_num_threads(1)  # before any operator: the parent's thread pool did not survive the fork
        os.setpgid(0, 0)
        die_with_parent(parent, signal.SIGKILL)
        store = _join_rendezvous(rank, size, door)
        _write(_result(folder, rank), pickle.dumps(fn(rank, *args)))
        finished.write(b".")
        _wait_for_the_end(store)
    except BaseException:
        _write(_error(folder, rank), traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _join_rendezvous(rank: int, size: int, door: socket.socket) -> dist.TCPStore | None:
    """Set the variables by which torchrun describes the world to its ranks. Rank 0's store is behind them; the caller keeps it.

    Its port was open before the ranks existed, so nobody guesses one. The store cannot live in the pytest process: its event
    loop loses messages when the process forks (torch 2.13; one world of four ranks in ten then waited forever).
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(door.getsockname()[1]),
        TORCHELASTIC_USE_AGENT_STORE="True",  # all ranks are clients of a store that is there already
    )
    if rank:
        door.close()
        return None
    return dist.TCPStore(
        "127.0.0.1", door.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
    )


def _wait_for_the_end(store: dist.TCPStore | None) -> NoReturn:
    """Wait until every rank is done. An earlier exit would break connections that others still open, and end rank 0's store."""
    while True:
        signal.pause()


def _wait(pids: dict[int, int], folder: Path, done: int, deadline: float) -> str | None:
    """Wait until every rank has left a result (None), one has ended without a result, or the time is up (then: the message)."""
    with contextlib.ExitStack() as stack:
        ends = {stack.enter_context(os.fdopen(os.pidfd_open(pid))).fileno(): pid for pid in pids}
        poll = select.poll()
        for descriptor in (done, *ends):
            poll.register(descriptor, select.POLLIN)
        results = 0
        while results < len(pids):
            ready = [descriptor for descriptor, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))]
            if not ready:
                return _stuck(pids, folder)
            for pid in (ends[descriptor] for descriptor in ready if descriptor != done):
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # left to be reaped by _kill
                if ended is not None:
                    return _first_failure(folder, pids[pid], ended, len(pids))
            if done in ready:
                results += len(os.read(done, len(pids)))
    return None


def _first_failure(folder: Path, rank: int, ended: os.waitid_result, size: int) -> str:
    """Return the earliest traceback. Peers often fail with a failed rank, in their collectives; the earliest is the cause."""
    errors = [error for r in range(size) if (error := _error(folder, r)).exists()]
    if not errors:
        by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        how = signal.Signals(ended.si_status).name if by_signal else f"exit status {ended.si_status}"
        return f"rank {rank} of {size} ended with {how} and no traceback"
    first = min(errors, key=lambda error: error.stat().st_mtime_ns)
    return f"rank {first.stem} of {size} failed:\n{first.read_text()}"


def _stuck(pids: dict[int, int], folder: Path) -> str:
    missing = sum(not _result(folder, rank).exists() for rank in pids.values())
    stacks = [f"rank {rank}, {stack(pid)}" for pid, rank in pids.items()]
    return "\n".join([f"{missing} of {len(pids)} ranks did not return in time", *stacks])


def _kill(pids: dict[int, int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
        deadline = time.monotonic() + _END_SECONDS
        while _lives(pid) and time.monotonic() < deadline:  # what a rank started may hold files a moment longer
            time.sleep(0.005)


def _lives(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return False


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.result"


def _error(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.error"
