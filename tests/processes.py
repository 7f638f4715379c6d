"""Worlds of fresh processes, for ranks that cannot be forked: CUDA does not survive a fork."""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._ranks import POLL_SECONDS, Ranks
from tepo_megatron.base.processes import die_with_parent
from tepo_megatron.dist.platform import activate
from tests.staged_gloo import activate_staged, requested


def run_processes(size: int, fn: Callable[..., Any], *args: Any, folder: Path, timeout: float = 300.0) -> list[Any]:
    """Run `fn(rank, *args)` on `size` ranks and return their results, by rank, as `worlds.run_world` does.

    Raises:
        AssertionError: A rank failed, or the time is up. The message holds the end of the ranks' output.
    """
    log = folder / "log"
    with ranks(size, fn, *args, folder=folder) as started:
        try:
            started.wait(timeout)
        except subprocess.SubprocessError as e:
            raise AssertionError(f"{e}\n{log.read_text(errors='replace')[-6000:]}") from None
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def ranks(size: int, fn: Callable[..., Any], *args: Any, folder: Path, **env: str) -> Ranks:
    """Return the ranks of `run_processes`, whose output is in the file `log` of the folder, for a caller that does not wait."""
    call(folder, fn, *args)
    return waiting_ranks(size, folder=folder, **env)


def waiting_ranks(size: int, imports: Sequence[str] = (), *, folder: Path, **env: str) -> Ranks:
    """Return ranks that import these modules and then wait until `call` says what to run."""
    return Ranks(size, ["-m", __name__, str(os.getpid()), str(folder), *imports], folder / "log", env)


def call(folder: Path, fn: Callable[..., Any], *args: Any) -> None:
    """Let the ranks of a folder run `fn(rank, *args)`."""
    partial = folder / "call.partial"
    partial.write_bytes(pickle.dumps((fn.__module__, fn.__qualname__, args)))
    partial.rename(folder / "call")


def main() -> None:
    """Run one rank, on a GPU where the machine has one. The arguments are the caller's process id, the folder, and imports."""
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    activated = activate_staged if requested() else activate
    activated("cuda" if torch.cuda.is_available() else "cpu")  # before Megatron-Core is imported
    folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
    for name in sys.argv[3:]:
        importlib.import_module(name)
    while not (folder / "call").exists():
        time.sleep(POLL_SECONDS)
    module, name, args = pickle.loads((folder / "call").read_bytes())
    result = getattr(importlib.import_module(module), name)(rank, *args)
    (folder / str(rank)).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
