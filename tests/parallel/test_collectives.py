"""The collectives that this package replaces or adds on a CPU; and what rank 0 computes, or its error, reaches every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.dist.objects import broadcast_result
from tests.worlds import run_world


def call_collectives(rank: int, size: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each collective of `dist/platform/cpu.py` what came out and what should have."""
    dist.init_process_group("gloo")
    uneven = [n + 1 for n in range(size)]  # rank i owns i + 1 elements
    ranks = torch.arange(size, dtype=dtype)
    owners, steps = ranks.repeat_interleave(torch.tensor(uneven)), ranks.repeat_interleave(2)
    mine, parts = torch.full((2,), float(rank), dtype=dtype), [torch.empty(n, dtype=dtype) for n in uneven]
    gathered, two, average, part = torch.empty_like(steps), mine.clone(), mine.clone(), parts[rank].clone()
    dist.all_gather(parts, mine.new_full((rank + 1,), rank))
    dist.reduce_scatter(part, list(owners.split(uneven)))
    dist.all_gather_into_tensor(gathered, mine)
    dist.reduce_scatter_tensor(two, steps)
    dist.reduce_scatter_tensor(average, steps, op=dist.ReduceOp.AVG)
    return {
        "all_gather uneven": (torch.cat(parts), owners),
        "reduce_scatter uneven": (part, ranks[rank].expand(rank + 1) * size),
        "all_gather_into_tensor": (gathered, steps),
        "reduce_scatter_tensor": (two, mine * size),
        "reduce_scatter_tensor avg": (average, mine),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_that_gloo_lacks_or_need_not_copy(size: int, dtype: torch.dtype) -> None:
    for rank, results in enumerate(run_world(size, call_collectives, size, dtype)):
        assert [name for name, (got, expected) in results.items() if not torch.equal(got, expected)] == [], f"rank {rank}"


def _result_of_rank_0(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []
    assert group is not None
    for calls in ("value", RolloutError("the service is lost"), RuntimeError("a traceback")):

        def make(result: str | Exception = calls) -> str:
            if rank:
                return "of another rank"
            if isinstance(result, Exception):
                raise result
            return result

        try:
            found.append(broadcast_result(make, group))
        except Exception as e:
            found.append(repr(e))
    return found


def test_every_rank_gets_the_result_of_rank_0_or_its_error() -> None:
    for found in run_world(2, _result_of_rank_0):
        assert found == ["value", "RolloutError('the service is lost')", "RuntimeError('a traceback')"]
