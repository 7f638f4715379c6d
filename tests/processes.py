"""Worlds of fresh processes, for ranks that cannot be forked: CUDA does not survive a fork."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.platform import activate
from tepo_megatron.utils.processes import die_with_parent

ROOT = Path(__file__).parents[1]


def run_processes(size: int, fn: Callable[..., Any], *args: Any, folder: Path, timeout: float = 300.0) -> list[Any]:
    """Run `fn(rank, *args)` on `size` ranks under torchrun and return their results, by rank, as `worlds.run_world` does.

    Args:
        size: Number of ranks.
        fn: Function of a module.
        args: Further arguments of `fn`.
        folder: An empty folder for arguments and results.
        timeout: Seconds until the ranks are killed.

    Raises:
        AssertionError: A rank failed. The message holds the end of the ranks' output.
    """
    words = command(size, fn, *args, folder=folder)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def command(size: int, fn: Callable[..., Any], *args: Any, folder: Path) -> list[str]:
    """Return the command that starts the ranks of `run_processes`, for a caller that does not wait for their end.

    Args:
        size: Number of ranks.
        fn: Function of a module.
        args: Further arguments of `fn`.
        folder: An empty folder for arguments and results.
    """
    (folder / "call").write_bytes(pickle.dumps((fn.__module__, fn.__qualname__, args)))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [sys.executable, *start, "-m", __name__, str(folder)]


def main() -> None:
    """Run one rank, on a GPU where the machine has one."""
    die_with_parent(os.getppid(), signal.SIGKILL)  # torchrun may be killed
    activate("cuda" if torch.cuda.is_available() else "cpu")  # before Megatron-Core is imported
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    module, name, args = pickle.loads((folder / "call").read_bytes())
    found = getattr(importlib.import_module(module), name)(rank, *args)
    (folder / str(rank)).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
