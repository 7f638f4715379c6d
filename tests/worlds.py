"""Worlds of several ranks inside a test, in tenths of a second: every rank is a fork of the pytest process.

The pytest process has imported Megatron-Core once and never joins a group itself (a fork would inherit it), so worlds of one
rank are forked too. Forks share the parent's memory: `fn` and its arguments need not be picklable, its result must be.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tepo_megatron.processes import die_with_parent

_POLL_SECONDS = 0.003


def run_world(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `fn(rank, *args)` on `size` ranks and return their results, by rank.

    The ranks see the environment that torchrun sets, so `init_process_group` needs no address. When a rank fails, or `timeout`
    seconds have passed, all are killed, with whatever they started.

    Raises AssertionError with the traceback of the rank that failed first, or, on a timeout, with the stack of each rank.
    """
    # The store lives here, on a port that the kernel chose, and the ranks are its clients: no port is guessed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        pids = {_fork(rank, size, store.port, folder, fn, args): rank for rank in range(size)}
        try:
            failed = _wait(pids, folder, time.monotonic() + timeout, timeout)
        finally:
            _kill(pids)
        if failed is not None:
            raise AssertionError(failed)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(size)]


def _fork(
    rank: int, size: int, port: int, folder: Path, fn: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here and in the child: whoever comes first
        return pid
    _run_rank(rank, size, port, folder, fn, args)


def _run_rank(
    rank: int, size: int, port: int, folder: Path, fn: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    """The child: never returns into pytest."""
    status = 1
    try:
        torch.set_num_threads(1)  # before any operator: the parent's thread pool did not survive the fork
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL)
        faulthandler.register(signal.SIGUSR1, file=_stack(folder, rank).open("w"))
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        _result(folder, rank).write_bytes(pickle.dumps(fn(rank, *args)))
        status = 0
    except BaseException:
        text = traceback.format_exc()
        partial = folder / f"{rank}.partial"
        partial.write_text(text)
        partial.rename(_error(folder, rank))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: dict[int, int], folder: Path, deadline: float, timeout: float) -> str | None:
    """Until every rank has ended well (None), one has failed, or the time is up (what to tell). Reaps and forgets the ended."""
    size = len(pids)
    while pids:
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = pids.pop(pid)
                _kill_group(pid)  # what the rank left behind
                if status:
                    return _first_failure(folder, rank, status, size)
        if time.monotonic() > deadline:
            return _stuck(pids, folder, timeout, size)
        time.sleep(_POLL_SECONDS)
    return None


def _first_failure(folder: Path, rank: int, status: int, size: int) -> str:
    """Peers of a rank that fails often fail with it, in their collectives: the earliest traceback is the cause."""
    errors = sorted((e for r in range(size) if (e := _error(folder, r)).exists()), key=_written)
    if not errors:
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"rank {rank} of {size} {how} without a traceback"
    return f"rank {errors[0].stem} of {size} failed:\n{errors[0].read_text()}"


def _stuck(pids: dict[int, int], folder: Path, timeout: float, size: int) -> str:
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # each writes its stack
    time.sleep(0.2)
    stacks = [f"rank {rank}:\n{_read(_stack(folder, rank))}" for rank in sorted(pids.values())]
    return f"{len(pids)} of {size} ranks still ran after {timeout:g} s\n" + "\n".join(stacks)


def _kill(pids: dict[int, int]) -> None:
    for pid in pids:
        _kill_group(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pickle"


def _error(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.error"


def _stack(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stack"


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "(not started)"
