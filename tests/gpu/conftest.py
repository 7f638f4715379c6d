"""Tests on a GPU, in a process of their own: `python -m pytest tests/gpu --confcutdir=tests/gpu`.

The other tests' conftest hides GPUs from its process, so nothing here is collected together with them, nor where there is no
GPU. Without one the kernels run in Triton's interpreter: tests/unit/ops/test_triton_interpreter.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks._ranks import one_rank

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """Initialize this process as a world of one rank."""
    from tepo_megatron.config import ParallelConfig
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    with one_rank():
        yield parallel.initialize(ParallelConfig(), activate("cuda"), 0)
        parallel.shutdown()
