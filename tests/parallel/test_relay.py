"""Weights in the shared memory of several machines, here folders: what servers of each read, and what went between them."""

import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.base.errors import TepoError
from tepo_megatron.sync import stores
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.test_weights import ROUNDS, Keeper, Recorder, push_twice, sync_of, tensors, tiny_moe
from tests.tiny import tiny_qwen3
from tests.worlds import run_world

# layout -> the machine of each rank
MACHINES: dict[str, tuple[str, tuple[int, ...]]] = {
    "TP2, over two": ("TP2", (0, 1)),
    "PP2, one each": ("PP2", (0, 1)),
    "EP2, one each": ("EP2", (0, 1)),
    "TP2 PP2, a stage each": ("TP2 PP2", (0, 0, 1, 1)),
    "TP2 PP2, crosswise": ("TP2 PP2", (0, 1, 1, 0)),
    "TP2 PP2, three": ("TP2 PP2", (0, 0, 1, 2)),
    "TP2 PP2, started as several on one": ("TP2 PP2", (0, 0, 0, 0)),
}


class Counted:
    """torch.distributed with a record of its broadcasts: (sender, members, bytes)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...], int]] = []

    def broadcast(self, row: torch.Tensor, src: int, group: dist.ProcessGroup) -> None:
        self.calls.append((src, tuple(dist.get_process_group_ranks(group)), row.nbytes))
        dist.broadcast(row, src=src, group=group)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def simulated(rank: int, machines: Sequence[int], root: Path, fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """(result of `fn(rank, *args)`, broadcasts) where this rank's machine has a folder of `root` as its shared memory."""
    from tepo_megatron.sync import relay

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    mine = stores.SHARED_MEMORY = memory(root, machines[rank])
    relay.dist = counted = Counted()  # type: ignore[assignment]
    original = Recorder.take

    def take(recorder: Recorder, sources: list[Path]) -> None:
        """Check that all machines hold what rank 0's machine holds, and at most two rounds of it."""
        for machine in set(machines):
            there = {path.name for path in (memory(root, machine) / sources[0].parent.name).glob("v*")}
            assert len({name.split("-")[1] for name in there}) <= 2, there
            for path in sources:
                assert contents(memory(root, machine) / path.relative_to(mine)) == contents(path)
        original(recorder, sources)

    Recorder.take = take  # type: ignore[method-assign, assignment]
    return fn(rank, *args), counted.calls


def memory(root: Path, machine: int) -> Path:
    return root / f"machine{machine}"


def contents(file: Path) -> tuple[Any, bytes]:
    """Return its header and its bytes; the order of the header's entries does not matter."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def left_in(root: Path) -> list[str]:
    """Files and folders on all machines."""
    return sorted(str(path.relative_to(root)) for machine in root.iterdir() for path in machine.rglob("*"))


def world(tmp_path: Path, name: str, **sync: Any) -> tuple[Any, Sequence[int], Path]:
    """(config, machine of each rank, folder of the machines) with a model in `tmp_path / "model"`."""
    layout, machines = MACHINES[name]
    make = tiny_moe if layout == "EP2" else lambda path: tiny_qwen3(path, layers=4, vocab_size=cases.VOCAB)
    make(tmp_path / "model")
    cfg = cases.run_config(tmp_path / "model", ROUNDS[layout])
    root = tmp_path / "machines"
    for machine in set(machines):
        memory(root, machine).mkdir(parents=True)
    return replace(cfg, sync=replace(cfg.sync, bucket_mib=1, **sync)), machines, root


@pytest.mark.parametrize("name", full_but(["PP2, one each"], ["TP2 PP2, crosswise", "EP2, one each"], MACHINES))
def test_every_machine_gets_every_byte_once(tmp_path: Path, name: str) -> None:
    cfg, machines, root = world(tmp_path, name, verify_every=2)
    ranks = run_world(len(machines), simulated, machines, root, push_twice, cfg)
    receiver, model = ranks[0][0], tensors(tmp_path / "model")
    assert receiver.received.keys() == model.keys() and all(torch.equal(receiver.received[k], model[k]) for k in model)
    model_bytes = sum(t.nbytes for t in model.values())
    assert receiver.data == model_bytes and len(receiver.rounds) > 2
    sent = [call for rank, (_, calls) in enumerate(ranks) for call in calls if call[0] == rank]
    if len(set(machines)) == 1:
        assert sent == []
    else:
        assert sum(nbytes for _, _, nbytes in sent) == 2 * model_bytes  # in two pushes
        assert all(sorted(machines[rank] for rank in members) == sorted(set(machines)) for _, members, _ in sent)
    assert left_in(root) == []


def push_and_fail(rank: int, cfg: Any, fault: str, root: Path) -> tuple[str, list[str]]:
    """The error, and what the machines had before any rank closed."""
    from tepo_megatron.sync import relay

    original, writes = stores.save_file, 0

    def save(*args: Any) -> None:
        nonlocal writes
        writes += 1
        if rank == 1 and writes == 3:
            Path(args[1]).write_bytes(b"the beginning of it")
            raise OSError(28, "No space left on device")
        original(*args)

    def broadcast(row: torch.Tensor, src: int, group: dist.ProcessGroup) -> None:
        dist.broadcast(row, src=src, group=group)
        if rank == 1 and src == 0:
            row[5] ^= 1

    if fault == "full":
        stores.save_file = save
    elif fault == "damaged":
        relay.dist.broadcast = broadcast  # type: ignore[attr-defined]
    elif fault == "no memory" and rank == 1:
        stores.SHARED_MEMORY = root / "none"
    elif fault == "read-only" and rank == 1:
        stores.SHARED_MEMORY = Path("/proc")
    try:
        with sync_of(cfg, Keeper() if rank == 0 and fault != "refused" else Recorder(2) if rank == 0 else None) as sync:
            try:
                sync.push(1)
            except TepoError as e:
                dist.barrier()
                left = [path.name for path in root.glob("machine*/*/*")]
                dist.barrier()
                return f"{type(e).__name__}: {e}", left
    except TepoError as e:
        return f"{type(e).__name__}: {e}", []
    raise AssertionError("the push went through")


HERE = f"on {socket.gethostname()}"
FAULTS = {
    "full": rf"CheckpointError: (rank 1: )?{HERE}: .*cannot be written .*No space left on device.*sync\.bucket_mib",
    "damaged": rf"SyncError: (rank 1: )?{HERE}: tensor .* was damaged on its way",
    "refused": r"SyncError: (rank 0: )?the server does not like them",
    "no memory": rf"ConfigError: (rank 1: )?.*/none {HERE}: No such file.*set sync\.transport\.folder",
    "read-only": rf"CheckpointError: (rank 1: )?/proc/tepo-sync-\w+ {HERE}: cannot be made",
}


@pytest.mark.parametrize("fault", full_but(["full"], ["damaged", "no memory"], FAULTS))
def test_a_fault_on_one_machine_ends_the_push_on_all_and_leaves_nothing(tmp_path: Path, fault: str) -> None:
    cfg, machines, root = world(tmp_path, "PP2, one each", verify_every=int(fault == "damaged"))
    ranks = run_world(len(machines), simulated, machines, root, push_and_fail, cfg, fault, root, timeout=120)
    for rank, ((error, left), _) in enumerate(ranks):
        assert re.match(FAULTS[fault], error, re.DOTALL), error
        assert ("rank " in error.split("machine")[0]) == (rank != (0 if fault == "refused" else 1)), error
        assert left == []
    assert left_in(root) == []
