"""Collectives staged through host memory, without a GPU: every tensor of the caller counts as one that gloo cannot reach."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.platform import gloo
from tests import staged_gloo
from tests.parallel.test_collectives import call_collectives
from tests.worlds import run_world

Found = dict[str, tuple[Tensor, Tensor]]


class Spies:
    """Record the tensors that callers give and those that gloo gets. Both stay alive, so that no address is used twice."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.reached: list[Tensor] = []
        self.names: set[str] = set()
        for name in staged_gloo.COLLECTIVES:
            setattr(dist, name, self._spied(name, getattr(dist.distributed_c10d, name)))
        staged_gloo.redirect(self.staged)
        gloo.add_uneven_collectives()  # as on the platform: above the staged ones

    def staged(self, tensor: Tensor) -> bool:
        self.given.append(tensor)
        return True

    def _spied(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                self.reached += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)]
            self.names.add(name)
            return original(*args, **kwargs)

        return call

    def shared(self) -> int:
        """Number of tensors that gloo got from a caller without a copy."""
        mine = {t.data_ptr() for t in self.given if t.numel()}
        return sum(t.numel() > 0 and t.data_ptr() in mine for t in self.reached)


def staged_collectives(rank: int, size: int, dtype: torch.dtype) -> tuple[Found, int, set[str]]:
    spies = Spies()
    found = call_collectives(rank, size, dtype)
    assert len(spies.given) > 20
    return found, spies.shared(), spies.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_goes_through_host_copies(size: int, dtype: torch.dtype) -> None:
    for rank, (results, shared, names) in enumerate(run_world(size, staged_collectives, size, dtype)):
        wrong = [name for name, (got, expected) in results.items() if not torch.equal(got, expected)]
        assert not wrong, f"rank {rank}: {wrong}"
        assert shared == 0
        assert names >= staged_gloo.COLLECTIVES.keys()


def blocking_and_late(rank: int) -> dict[str, Any]:
    """Send and receive, blocking and not; a handle that is waited for twice; a group of one of the two ranks."""
    spies = Spies()
    dist.init_process_group("gloo")
    seen: dict[str, Any] = {}
    x = torch.full((3,), float(rank))
    if rank == 0:
        dist.barrier(device_ids=[0])
        dist.send(x + 5, dst=1)
        seen["sender"] = None
    else:
        out = torch.zeros(3)
        work = dist.irecv(out, src=0)
        seen["before"], seen["completed"] = out.tolist(), work.is_completed()
        dist.barrier(device_ids=[0])
        work.wait()
        seen["after"] = out.tolist()
        out.zero_()
        work.wait()
        seen["waited for twice"] = out.tolist()
    transposed = torch.arange(6.0).view(2, 3).t()
    dist.all_reduce(transposed)
    seen["not contiguous"] = transposed.tolist()
    alone, outside = dist.new_group([0]), torch.full((2,), 7.0)
    dist.all_reduce(outside, group=alone)
    seen["outside"] = outside.tolist()
    reduced = x.clone()
    dist.reduce(reduced, dst=1)
    if rank == 0:
        dist.send(x, dst=1)
        dist.send(x + 1, dst=1)
    else:
        seen["reduced"] = reduced.tolist()
        seen["from"] = (dist.recv(out, src=0), dist.recv(out), out.tolist())
    seen["shared"] = spies.shared()
    return seen


def test_handles_groups_and_blocking_calls() -> None:
    sender, receiver = run_world(2, blocking_and_late)
    assert receiver["before"] == [0.0] * 3 and not receiver["completed"]
    assert receiver["after"] == [5.0] * 3 and receiver["waited for twice"] == [0.0] * 3
    assert receiver["reduced"] == [1.0] * 3 and receiver["from"] == (0, 0, [1.0] * 3)
    for seen in (sender, receiver):
        assert seen["outside"] == [7.0] * 2 and seen["shared"] == 0
        assert seen["not contiguous"] == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


def test_the_ranks_of_cuda_share_the_first_gpu() -> None:
    code = (
        "import os, torch, torch.distributed as dist; torch.cuda.is_available = lambda: True; plain = dist.all_reduce\n"
        "from tests import staged_gloo\n"
        "platform = staged_gloo.activate_staged('cuda')\n"
        "staged = [staged_gloo.off_host(torch.empty(1, device=d)) for d in ('cpu', 'meta')]\n"
        "print(platform.backend, platform.device(int(os.environ['LOCAL_RANK'])), dist.all_reduce is plain, staged)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LOCAL_RANK": "3"}, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "gloo cuda:0 False [False, True]"
