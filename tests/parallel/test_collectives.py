"""Every collective that Megatron-Core calls, over gloo, in fp32 and bf16."""

from __future__ import annotations

import torch.distributed as dist

from tepo_megatron.distributed.objects import broadcast_result
from tepo_megatron.errors import RolloutError
from tests.worlds import run_world


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
