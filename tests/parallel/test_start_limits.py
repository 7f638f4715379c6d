"""A rank that comes late to the start, because its file system is cold, is waited for longer than training would wait."""

import time

import torch
import torch.distributed as dist

from tepo_megatron.config import ParallelConfig
from tepo_megatron.dist import parallel
from tepo_megatron.dist.platform import activate
from tests.worlds import run_world


def _late(rank: int, seconds: float) -> float:
    cfg = ParallelConfig(dp=2, timeout_seconds=1.0, start_seconds=60.0)
    time.sleep(rank * seconds)  # it imports
    groups = parallel.initialize(cfg, activate("cpu"), 0)
    time.sleep(rank * seconds)  # it loads its weights
    x = torch.ones(1)
    dist.all_reduce(x)
    group = dist.new_group([0, 1], timeout=groups.limit)
    dist.all_reduce(x, group=group)
    parallel.shutdown()
    return float(x)


def test_a_rank_that_starts_late_is_waited_for() -> None:
    assert run_world(2, _late, 2.5) == [4.0, 4.0]
