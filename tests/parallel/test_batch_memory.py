"""A batch arrives bit for bit on every rank, on one machine and on several, and leaves nothing behind."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.base.types import Rollout, SamplingMask, TrainBatch
from tepo_megatron.config import ParallelConfig
from tepo_megatron.service.batch_memory import BatchHeader, BatchMemory
from tepo_megatron.trainer import batch_receiver
from tepo_megatron.trainer.batch_receiver import BatchReceiver, read
from tests.marks import full_but
from tests.worlds import run_world

SECONDS = {"rollout": 1.5, "reward": 0.25}
METRICS = {"reward/mean": (3.0, 4.0), "rollout/stale_groups": (0.0, 1.0)}


def rollouts(count: int, experts: tuple[int, int] | None = None, masked: bool = False) -> list[Rollout]:
    generator = torch.Generator().manual_seed(count)
    made = []
    for i in range(count):
        prompt, response = 1 + i % 3, 2 + 5 * i
        length = prompt + response
        mask = torch.arange(length) >= prompt
        mask[-1] = i % 2 == 0  # a tool's token at the end
        experts_LKT = torch.randint(-1, 60, (length, *experts), generator=generator, dtype=torch.int16) if experts else None
        counts_N = torch.randint(1, 5, (int(mask.sum()),), generator=generator, dtype=torch.int32)
        ids_M = torch.randint(0, 150_000, (int(counts_N.sum()),), generator=generator, dtype=torch.int32)
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
                sampling_mask=SamplingMask(ids_M, counts_N) if masked else None,
            )
        )
    return made


def same(a: Rollout, b: Rollout) -> bool:
    for name, x in vars(a).items():
        y = getattr(b, name)
        if name == "prompt_experts":
            continue
        if isinstance(x, SamplingMask) and isinstance(y, SamplingMask):
            if not torch.equal(x.ids_M, y.ids_M) or not torch.equal(x.counts_N, y.counts_N):
                return False
            continue
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
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.objects import broadcast_object
    from tepo_megatron.dist.platform import activate

    groups = parallel.initialize(ParallelConfig(dp=sum(map(len, machines))), activate("cpu"), 0)
    receiver = BatchReceiver.open(groups, next(i for i, ranks in enumerate(machines) if rank in ranks))
    memory, before, equal = BatchMemory(), _descriptors(), []
    for size in sizes:
        expected = rollouts(size, experts, masked=size > 4)
        header = broadcast_object(memory.write(expected, METRICS, SECONDS) if rank == 0 else None, groups.host)
        found, rollout = receiver.receive(header), None
        if rank == 0:
            memory.release(header.path)
            memory.release(header.path)
        assert header.metrics == METRICS and header.seconds == SECONDS
        assert header.tokens == sum(r.token_ids_L.numel() for r in expected)
        receiver.fetch_experts([range(size)] * groups.dp.size)
        equal += [len(found) == size, *(same(a, b) for a, b in zip(found, expected, strict=True))]
        for rollout in found:
            rollout.rollout_logprobs_L.zero_()  # private: no other rank sees it
        receiver.release()
        del found, rollout, header
    left = max(0, _descriptors() - before)  # a connection of the process groups may have been closed meanwhile
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
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.objects import broadcast_object
    from tepo_megatron.dist.platform import activate

    groups = parallel.initialize(ParallelConfig(dp=2), activate("cpu"), 0)
    receiver, memory, equal = BatchReceiver.open(groups, "one machine"), BatchMemory(), []

    def late(header: BatchHeader, path: str, experts_path: str) -> list[Rollout]:
        time.sleep(0.3 * rank)
        return read(header, path, experts_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_receiver, "read", late)
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
    found = read(header, header.path, header.experts_path)
    memory.release(header.path)
    assert not Path(header.path).exists()
    assert all(same(replace(a, answer=""), b) for a, b in zip(rollouts(5), found, strict=True))  # mapped files outlive the path


EXPERTS = (3, 2)
# sequences that each of four data-parallel ranks packs in each pass; ranks 0 and 1 share the machine of the service
PASSES = [
    [[0, 1], [2, 3], [4, 5], [6]],
    [[6, 5], [4], [3], [2]],  # other ranks pack them
    [[0, 1], [2, 3], [4, 5], [6]],  # all are there
]


def _fetches(rank: int, machines: list[list[int]]) -> dict[str, Any]:
    """Return the bytes of experts that this rank's machine was sent in each pass, and the sequences whose experts it has."""
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.objects import broadcast_object
    from tepo_megatron.dist.platform import activate

    groups = parallel.initialize(ParallelConfig(dp=4), activate("cpu"), 0)
    receiver = BatchReceiver.open(groups, next(i for i, ranks in enumerate(machines) if rank in ranks))
    memory, expected = BatchMemory(), rollouts(7, EXPERTS)
    header = broadcast_object(memory.write(expected, METRICS, SECONDS) if rank == 0 else None, groups.host)
    found, sent, there = receiver.receive(header), [], []
    if rank == 0:
        memory.release(header.path)
    for needed in PASSES:
        receiver.fetch_experts(needed)
        sent.append(receiver.expert_bytes)
        there.append([i for i in range(7) if torch.equal(found[i].experts_LKT, expected[i].experts_LKT)])  # type: ignore[arg-type]
        dist.barrier(groups.host)  # before the next pass writes into the same file
    parallel.shutdown()
    return {"sent": sent, "there": there, "digests": [r.prompt_experts for r in found]}


@pytest.mark.parametrize("machines", [[[0, 1], [2, 3]], [[0, 1, 2], [3]]], ids=str)
def test_a_machine_gets_the_experts_of_the_sequences_that_it_packs_and_each_once(
    machines: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_receiver, "MESSAGE_BYTES", 300)  # several messages, one of a single sequence that is larger
    sizes = [r.token_ids_L.numel() * 3 * 2 * 2 for r in rollouts(7)]  # int16
    for rank, found in enumerate(run_world(4, _fetches, machines)):
        mine = next(ranks for ranks in machines if rank in ranks)
        seen: set[int] = set()
        for needed, sent, there in zip(PASSES, found["sent"], found["there"], strict=True):
            seen |= {i for dp in mine for i in needed[dp]}
            if 0 in mine:  # the machine of the service
                assert sent == 0 and there == list(range(7))
            else:
                assert sent == sum(sizes[i] for i in seen) < sum(sizes) and there == sorted(seen)
        assert len(set(found["digests"])) == 7


def test_prompts_are_equal_if_their_tokens_and_experts_are(tmp_path: Path) -> None:
    """A rank knows that without the experts, which may not be there yet."""
    memory, first = BatchMemory(), rollouts(4, EXPERTS)[3]
    assert first.experts_LKT is not None and first.prompt_length == 1
    other_response, other_prompt = first.experts_LKT.clone(), first.experts_LKT.clone()
    other_response[first.prompt_length] += 1
    other_prompt[0] += 1
    given = [first, replace(first, experts_LKT=other_response), replace(first, experts_LKT=other_prompt)]
    header = memory.write(given, {}, {})
    found = read(header, header.path, header.experts_path)
    for rollout in found:
        assert rollout.experts_LKT is not None
        rollout.experts_LKT.zero_()
    for batch in (given, found):
        assert TrainBatch.build(batch, torch.zeros(3)).prompt_ids == [0, 0, 1]
    memory.release(header.path)
