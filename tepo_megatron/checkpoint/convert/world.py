"""Create a mesh of a single rank on the CPU, which Megatron-Core needs to build anything."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from tepo_megatron.config import ParallelConfig
from tepo_megatron.dist.platform import activate

if TYPE_CHECKING:
    from tepo_megatron.dist.parallel import ParallelDims


@contextlib.contextmanager
def world_of_one() -> "Iterator[ParallelDims]":
    """Yield a mesh of this process alone, which lasts as long as the block. It needs no network and no free port."""
    platform = activate("cpu")
    from tepo_megatron.dist import parallel  # imports Megatron-Core, which the platform must precede

    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=parallel.HOST_LIMIT)
    try:
        yield parallel.initialize(ParallelConfig(), platform, seed=0)
    finally:
        parallel.shutdown()
