"""Megatron-Core builds nothing without a mesh: one of a single rank, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from tepo_megatron.config import ParallelConfig
from tepo_megatron.platform import activate

if TYPE_CHECKING:
    from tepo_megatron.parallel import Groups


@contextlib.contextmanager
def world_of_one() -> Iterator[Groups]:
    """The mesh of this process alone, for the time of the block. Needs no network and no free port."""
    platform = activate("cpu")
    from tepo_megatron import parallel  # imports Megatron-Core, which the platform must precede

    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield parallel.initialize(ParallelConfig(), platform, seed=0)
    finally:
        parallel.shutdown()
