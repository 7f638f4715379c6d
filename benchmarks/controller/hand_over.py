"""Measure how a step's rollouts reach the other ranks: CPU seconds of the sender and of a receiver, over gloo on loopback.

python -m benchmarks.controller.hand_over STORE     (the receiver, which the sender starts)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from benchmarks.controller.host_rows import make_rollouts
from benchmarks.controller.measuring import Point, fastest
from benchmarks.results import ROOT
from tepo_megatron.controller.batch_memory import BatchMemory
from tepo_megatron.controller.batch_receiver import read
from tepo_megatron.distributed.objects import broadcast_object
from tepo_megatron.types import Rollout

SECONDS = 300.0  # limit of each collective, and of the receiver's end


def send(rollouts: Sequence[Rollout], group: dist.ProcessGroup) -> None:
    """Hand the rollouts to the other rank of the group, as the rollout service does: a file in memory, and its header."""
    memory = BatchMemory()
    header = memory.write(rollouts, {}, {})
    broadcast_object(header, group)
    dist.barrier(group)
    memory.release(header.path)


def receive(group: dist.ProcessGroup) -> list[Rollout]:
    """Return the rollouts that rank 0 sent."""
    header = broadcast_object(None, group)
    assert header is not None
    rollouts = read(header, header.path, header.experts_path)
    dist.barrier(group)
    return rollouts


def hand_over(sizes: Sequence[float]) -> dict[str, list[Point]]:
    """Measure one step's hand-over at each size. Returns the points of the sender and of the receiver."""
    with tempfile.TemporaryDirectory(prefix="hand-over-") as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "benchmarks.controller.hand_over", str(store), json.dumps(list(sizes))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
            try:
                group = _join(store, 0)
                sent = []
                for size in sizes:
                    rollouts = make_rollouts(size)
                    dist.barrier(group)
                    sent.append(fastest(size, partial(send, rollouts, group)))
                out, _ = other.communicate(timeout=SECONDS)
            except BaseException:
                other.kill()
                raise
        dist.destroy_process_group()
    return {"sender": sent, "receiver": [Point(*point) for point in json.loads(out)]}


def _join(store: Path, rank: int) -> dist.ProcessGroup:
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    return group


def _main(store: Path, sizes: Sequence[float]) -> None:
    group, found = _join(store, 1), []
    for size in sizes:
        dist.barrier(group)
        point = fastest(size, lambda: receive(group))
        found.append((point.size, point.cpu_seconds))
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
