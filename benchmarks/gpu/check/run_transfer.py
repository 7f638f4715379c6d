"""Part `transfer`: send all weights to another process by CUDA IPC and by shared memory, and compare all checksums there."""

from __future__ import annotations

import shutil
import statistics
import time

import torch

from benchmarks._receiver import Receiver
from benchmarks._weights import copy_seconds
from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.model import random_model
from benchmarks.gpu.check.one_rank import actor_of
from tepo_megatron.config.io import plain, validate

PUSHES = 3  # the first one warms up
SHARED_MEMORY = "/dev/shm"
BUCKET_MIB = {"cpu": 1, "cuda": 512}


def run(check: Check) -> None:
    """Push the weights with each transport, and time plain copies of as many bytes."""
    model = random_model(check)
    with actor_of(check, sync={"bucket_mib": BUCKET_MIB[check.platform]}) as (actor, cfg):
        from tepo_megatron.weight_sync.sync import make_weight_sync

        nbytes = sum(b.parameter.nbytes for b in actor.bindings)
        for transport in ("ipc", "shm"):
            with check.line(transport):
                if transport == "shm":
                    _need(2 * BUCKET_MIB[check.platform] * 2**20)
                tree = plain(cfg)
                tree["sync"] |= {"transport": transport}
                # the first push is checked: checksums are computed on the host
                sync_cfg = validate(tree | {"sync": tree["sync"] | {"verify_every": PUSHES + 1}}).sync
                with (
                    Receiver(model, check.platform) as receiver,
                    make_weight_sync(sync_cfg, actor.bindings, actor.arch, actor.groups, receiver) as sync,
                ):
                    taken = []
                    for version in range(PUSHES + 1):
                        start = time.perf_counter()
                        sync.push(version)
                        taken.append(time.perf_counter() - start)
                seconds = statistics.median(taken[1:])
                rate = f"{nbytes / 1e9:.3g} GB in {sync.rounds} rounds, {nbytes / seconds / 1e9:.3g} GB/s"
                why = f"{rate}; the checksums of the first push agree"
                check.report(transport, "measured", seconds, "s", why, bytes=nbytes, all=taken)
        with check.line("copy of as many bytes on the device"):
            check.report("copy of as many bytes on the device", "measured", _copy(nbytes, actor.groups.device), "s")
        with check.line("copy of as many bytes to /dev/shm"):
            _need(nbytes)
            check.report(
                "copy of as many bytes to /dev/shm", "measured", copy_seconds(torch.ones(nbytes, dtype=torch.uint8)), "s"
            )


def _need(nbytes: int) -> None:
    """Raise Skip if shared memory has less free space: containers often have only 64 MB of it."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < 1.1 * nbytes:
        raise Skip(f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, and {1.1 * nbytes / 2**20:.0f} MiB are needed")


def _copy(nbytes: int, device: torch.device) -> float:
    """Return the median seconds of copying that many bytes on the device."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize() if device.type == "cuda" else None
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
