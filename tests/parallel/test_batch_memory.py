"""A batch arrives bit for bit on every rank, on one machine and on several, and leaves nothing behind."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import ParallelConfig
from tepo_megatron.controller import batch_memory
from tepo_megatron.controller.batch_memory import BatchHeader, BatchMemory, BatchReceiver, read
from tepo_megatron.types import Rollout
from tests.marks import full_but
from tests.worlds import run_world

SECONDS = {"rollout": 1.5, "reward": 0.25}
METRICS = {"reward/mean": (3.0, 4.0), "rollout/stale_groups": (0.0, 1.0)}


def rollouts(count: int, experts: tuple[int, int] | None = None) -> list[Rollout]:
    generator = torch.Generator().manual_seed(count)
    made = []
    for i in range(count):
        prompt, response = 1 + i % 3, 2 + 5 * i
        length = prompt + response
        mask = torch.arange(length) >= prompt
        mask[-1] = i % 2 == 0  # a tool's token at the end
        experts_LKT = torch.randint(-1, 60, (length, *experts), generator=generator, dtype=torch.int16) if experts else None
        made.append(
            Rollout(
                prompt_id=i // 2,
                token_ids_L=torch.randint(0, 150_000, (length,), generator=generator),
                response_mask_L=mask,
                rollout_logprobs_L=torch.where(mask, -torch.rand(length, generator=generator), 0.0),
                policy_version=i,
                stop_reason=("stop", "length")[i % 2],
                reward=i / 3,
                score=float(i % 2),
                status=("exact", "wrong")[i % 2],
                later_versions=((prompt + 1, i + 1),) if i % 2 else (),
                servers=((0, f"server {i}"),),
                experts_LKT=experts_LKT,
            )
        )
    return made


def same(a: Rollout, b: Rollout) -> bool:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if isinstance(x, torch.Tensor):
            if not isinstance(y, torch.Tensor) or x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif x != y:
            return False
    return True


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _rank(rank: int, machines: list[list[int]], sizes: list[int], experts: tuple[int, int] | None) -> dict[str, Any]:
    """Rank 0 is the service, too: its file is found below /proc all the same."""
    from tepo_megatron.distributed import parallel
    from tepo_megatron.distributed.objects import broadcast_object
    from tepo_megatron.platform import activate

    groups = parallel.initialize(ParallelConfig(dp=sum(map(len, machines))), activate("cpu"), 0)
    receiver = BatchReceiver.open(groups, next(i for i, ranks in enumerate(machines) if rank in ranks))
    memory, before, equal = BatchMemory(), _descriptors(), []
    for size in sizes:
        expected = rollouts(size, experts)
        header = broadcast_object(memory.write(expected, METRICS, SECONDS) if rank == 0 else None, groups.host)
        found, rollout = receiver.receive(header), None
        if rank == 0:
            memory.release(header.path)
            memory.release(header.path)
        assert header.metrics == METRICS and header.seconds == SECONDS
        assert header.tokens == sum(r.token_ids_L.numel() for r in expected)
        equal += [len(found) == size, *(same(a, b) for a, b in zip(found, expected, strict=True))]
        for rollout in found:
            rollout.rollout_logprobs_L.zero_()  # private: no other rank sees it
        del found, rollout, header
    left = _descriptors() - before
    parallel.shutdown()
    return {"equal": all(equal), "compared": len(equal), "left": left}


WORLDS = [[[0]], [[0, 1]], [[0], [1]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]]


@pytest.mark.parametrize("experts", [None, (3, 2)], ids=["dense", "experts"])
@pytest.mark.parametrize("machines", full_but([[[0, 1]], [[0, 2], [1, 3]]], [], WORLDS), ids=str)
def test_every_rank_gets_every_bit(machines: list[list[int]], experts: tuple[int, int] | None) -> None:
    sizes = [4, 0, 7]
    for found in run_world(sum(map(len, machines)), _rank, machines, sizes, experts):
        assert found == {"equal": True, "compared": len(sizes) + sum(sizes), "left": 0}


def _late_reader(rank: int) -> list[bool]:
    """Rank 1 comes late to each file; rank 0 releases one as soon as it has its own batch, and then writes the next."""
    from tepo_megatron.distributed import parallel
    from tepo_megatron.distributed.objects import broadcast_object
    from tepo_megatron.platform import activate

    groups = parallel.initialize(ParallelConfig(dp=2), activate("cpu"), 0)
    receiver, memory, equal = BatchReceiver.open(groups, "one machine"), BatchMemory(), []

    def late(header: BatchHeader, path: str) -> list[Rollout]:
        time.sleep(0.3 * rank)
        return read(header, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_memory, "read", late)
        headers = [memory.write(rollouts(4), {}, {})] if rank == 0 else []
        for size in (4, 5):
            header = broadcast_object(headers[-1] if rank == 0 else None, groups.host)
            found = receiver.receive(header)
            if rank == 0:
                memory.release(header.path)
                headers.append(memory.write(rollouts(5), {}, {}))
            equal.append(all(same(a, b) for a, b in zip(found, rollouts(size), strict=True)))
    parallel.shutdown()
    return equal


def test_a_file_is_there_until_the_last_rank_has_mapped_it() -> None:
    assert run_world(2, _late_reader) == [[True, True]] * 2


def test_a_token_takes_nine_bytes_and_nothing_is_left(tmp_path: Path) -> None:
    memory = BatchMemory()
    header = memory.write(rollouts(5), {}, {})
    assert header.nbytes == 9 * header.tokens == os.path.getsize(header.path)
    found = read(header, header.path)
    memory.release(header.path)
    assert not Path(header.path).exists()
    assert all(same(replace(a, answer=""), b) for a, b in zip(rollouts(5), found, strict=True))  # mapped files outlive the path


def test_experts_of_some_sequences_only_are_left_out() -> None:
    memory = BatchMemory()
    mixed = [*rollouts(2, (3, 2)), *rollouts(2)]
    header: BatchHeader = memory.write(mixed, {}, {})
    assert header.experts is None and [r.experts_LKT for r in read(header, header.path)] == [None] * 4
    memory.release(header.path)
