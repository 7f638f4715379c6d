"""The launcher of the worlds: failures are told, bounded, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch.distributed as dist

from tests.worlds import run_world


def misbehave(rank: int, how: str) -> None:
    dist.init_process_group("gloo")
    if rank == 1:
        if how == "raise":
            raise ValueError("rank 1 gives up")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "rank 1 of 3 failed(.|\n)*ValueError: rank 1 gives up"),
        ("die", "rank [012] of 3"),
        ("hang", "3 of 3 ranks"),
    ],
    ids=["raise", "die", "hang"],
)
def test_a_world_that_fails_says_so_and_leaves_nothing(how: str, told: str) -> None:
    children, before = psutil.Process().children(recursive=True), time.monotonic()
    with pytest.raises(AssertionError, match=told):
        run_world(3, misbehave, how, timeout=2.0)
    assert time.monotonic() - before < 10
    assert psutil.Process().children(recursive=True) == children
