"""Every collective that Megatron-Core calls, over gloo, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.distributed.objects import broadcast_result
from tepo_megatron.errors import RolloutError
from tests.worlds import run_world


def call_collectives(rank: int, size: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Every collective that Megatron-Core calls -> (what came out, what should have), on this rank."""
    dist.init_process_group("gloo")
    ranks, ops = torch.arange(size, dtype=dtype), dist.ReduceOp
    total = ranks.sum()

    def mine(n: int = 2) -> Tensor:
        return torch.full((n,), float(rank), dtype=dtype)

    def empty(n: int) -> Tensor:
        return torch.full((n,), -1.0, dtype=dtype)

    def in_place(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        call(x)
        return x

    def into(call: Callable[[Tensor], Any], n: int) -> Tensor:
        work = call(out := empty(n))
        if work is not None:
            work.wait()
        return out

    def into_list(call: Callable[[list[Tensor]], Any], sizes: list[int]) -> Tensor:
        call(out := [empty(n) for n in sizes])
        return torch.cat(out)

    def coalesced(call: Callable[[Tensor], Any], n: int) -> Tensor:
        out = [empty(n), empty(n)]
        with dist.distributed_c10d._coalescing_manager(None, async_ops=True) as manager:
            for x in out:
                call(x)
        manager.wait()
        return torch.cat(out)

    def exchange(out: Tensor) -> None:
        ops = [dist.P2POp(dist.isend, mine(), (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    uneven = [n + 1 for n in range(size)]  # rank i owns i + 1 elements
    own = ranks[rank].expand(2)
    steps = torch.cat([torch.full((2,), float(i), dtype=dtype) for i in range(size)])
    owners = ranks.repeat_interleave(torch.tensor(uneven))
    return {
        "all_reduce": (in_place(dist.all_reduce, mine()), total.expand(2)),
        "all_reduce avg": (in_place(lambda x: dist.all_reduce(x, op=ops.AVG), mine()), (total / size).expand(2)),
        "all_reduce max": (in_place(lambda x: dist.all_reduce(x, op=ops.MAX), mine()), ranks[-1].expand(2)),
        "broadcast": (in_place(lambda x: dist.broadcast(x, src=size - 1), mine()), ranks[-1].expand(2)),
        "all_gather_into_tensor": (into(lambda o: dist.all_gather_into_tensor(o, mine()), 2 * size), steps),
        "all_gather_into_tensor async": (
            into(lambda o: dist.all_gather_into_tensor(o, mine(), async_op=True), 2 * size),
            steps,
        ),
        "all_gather_into_tensor coalesced": (
            coalesced(lambda o: dist.all_gather_into_tensor(o, mine(), async_op=True), 2 * size),
            steps.repeat(2),
        ),
        "reduce_scatter_tensor": (into(lambda o: dist.reduce_scatter_tensor(o, steps), 2), own * size),
        "reduce_scatter_tensor avg": (into(lambda o: dist.reduce_scatter_tensor(o, steps, op=ops.AVG), 2), own),
        "reduce_scatter_tensor async": (into(lambda o: dist.reduce_scatter_tensor(o, steps, async_op=True), 2), own * size),
        "reduce_scatter_tensor coalesced": (
            coalesced(lambda o: dist.reduce_scatter_tensor(o, steps, async_op=True), 2),
            own.repeat(2) * size,
        ),
        "all_gather": (into_list(lambda o: dist.all_gather(o, mine()), [2] * size), steps),
        "all_gather uneven": (into_list(lambda o: dist.all_gather(o, mine(rank + 1)), uneven), owners),
        "reduce_scatter": (into(lambda o: dist.reduce_scatter(o, list(steps.split(2))), 2), own * size),
        "reduce_scatter uneven": (
            into(lambda o: dist.reduce_scatter(o, list(owners.split(uneven))), rank + 1),
            ranks[rank].expand(rank + 1) * size,
        ),
        "all_to_all_single": (into(lambda o: dist.all_to_all_single(o, mine(size)), size), ranks),
        "all_to_all_single uneven": (
            into(lambda o: dist.all_to_all_single(o, owners, [rank + 1] * size, uneven), (rank + 1) * size),
            ranks[rank].expand((rank + 1) * size),
        ),
        "gather": (
            into_list(lambda o: dist.gather(mine(), o if rank == 0 else None, dst=0), [2] * size),
            steps if rank == 0 else empty(2 * size),
        ),
        "scatter": (into(lambda o: dist.scatter(o, list(steps.split(2)) if rank == 0 else None, src=0), 2), own),
    } | ({"batch_isend_irecv": (into(exchange, 2), ranks[rank - 1].expand(2))} if size > 1 else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_has_every_collective_of_megatron(size: int, dtype: torch.dtype) -> None:
    for rank, results in enumerate(run_world(size, call_collectives, size, dtype)):
        wrong = [name for name, (got, expected) in results.items() if not torch.equal(got, expected)]
        assert not wrong, f"rank {rank}: {wrong}"


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
