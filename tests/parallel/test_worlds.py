"""The launcher of the worlds reports failures, has time limits, and leaves nothing behind."""

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message", "timeout"),
    [
        ("raise", "rank 1 of 3 failed(.|\n)*ValueError: rank 1 gives up", 50.0),
        ("die", "rank [012] of 3", 50.0),
        ("hang", "3 of 3 ranks(.|\n)*rank 1, process(.|\n)*misbehave", 2.0),
    ],
    ids=["raise", "die", "hang"],
)
def test_a_world_that_fails_says_so_and_leaves_nothing(how: str, message: str, timeout: float) -> None:
    children, before = psutil.Process().children(recursive=True), time.monotonic()
    with pytest.raises(AssertionError, match=message):
        run_world(3, misbehave, how, timeout=timeout)
    assert time.monotonic() - before < 40  # rank 1 sleeps for a minute
    assert psutil.Process().children(recursive=True) == children
