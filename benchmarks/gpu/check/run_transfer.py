"""Part `transfer`: send all weights to another process by CUDA IPC and by shared memory, and compare all checksums there."""

import shutil
import statistics
import time
from typing import Any

import torch

from benchmarks._ranks import actor_of
from benchmarks._receiver import Receiver
from benchmarks._weights import copy_seconds
from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.gpu.check.model import case_of, config_of
from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate

PUSHES = 3  # the first one warms up
SHARED_MEMORY = "/dev/shm"
BUCKET_MIB = {"cpu": 1, "cuda": 512}


def prepare(check: Check) -> Receiver:
    """Start the receiver, which leaves the GPU alone until the first push."""
    return Receiver(check.folder / case_of(check).folder, check.platform)


def run(check: Check, receiver: Receiver) -> None:
    """Push the weights with a transport, then time a plain copy of as many bytes."""
    cfg = config_of(check, sync={"bucket_mib": BUCKET_MIB[check.platform]})
    with receiver, actor_of(cfg) as actor:
        nbytes = sum(b.parameter.nbytes for b in actor.bindings)
        with check.line(check.task):
            _push(check, receiver, actor, cfg, nbytes)
        line = {"ipc": "copy of as many bytes on the device", "shm": "copy of as many bytes to /dev/shm"}[check.task]
        with check.line(line):
            if check.task == "ipc":
                check.report(line, "measured", _copy(nbytes, actor.groups.device), "s")
            else:
                _need(nbytes)
                check.report(line, "measured", copy_seconds(torch.ones(nbytes, dtype=torch.uint8)), "s")


def _push(check: Check, receiver: Receiver, actor: Any, cfg: Config, nbytes: int) -> None:
    """Time pushes to a receiver. The first one is checked: checksums are computed on the host."""
    from tepo_megatron.sync.push import make_weight_sync

    if check.task == "shm":
        _need(2 * BUCKET_MIB[check.platform] * 2**20)
    tree = plain(cfg)
    tree["sync"] |= {"transport": check.task, "verify_every": PUSHES + 1}
    with make_weight_sync(validate(tree).sync, actor.bindings, actor.arch, actor.groups, receiver) as sync:
        taken = []
        for version in range(PUSHES + 1):
            start = time.perf_counter()
            sync.push(version)
            taken.append(time.perf_counter() - start)
    seconds = statistics.median(taken[1:])
    rate = f"{nbytes / 1e9:.3g} GB in {sync.rounds} rounds, {nbytes / seconds / 1e9:.3g} GB/s"
    why = f"{rate}; the checksums of the first push agree"
    check.report(check.task, "measured", seconds, "s", why, bytes=nbytes, all=taken)


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
