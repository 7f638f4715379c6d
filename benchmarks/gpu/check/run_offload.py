"""Part `offload`: seconds to move an actor with optimizer state off the device and back, and the host memory that it takes."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._ranks import actor_of
from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.model import case_of, config_of
from benchmarks.gpu.check.steps import rollouts
from tepo_megatron.base.types import TrainBatch
from tepo_megatron.doctor.plan.inputs import Workload

GIB = 2**30
ROUNDS = 3  # the first one allocates the host memory


def run(check: Check) -> None:
    """Offload and reload the actor, and compare its state before and after."""
    cfg = config_of(check)
    with actor_of(cfg) as actor:
        _update(check, actor, cfg)
        device, before = actor.groups.device, list(_state(actor))
        full = torch.cuda.memory_allocated() if check.on_gpu else 0
        free, locked = host_available() + memory_elsewhere(), page_locked()
        seconds: dict[str, list[float]] = {"offload": [], "reload": []}
        left = full
        for _ in range(ROUNDS):
            seconds["offload"].append(_timed(device, actor.offload))
            left = torch.cuda.memory_allocated() if check.on_gpu else 0
            seconds["reload"].append(_timed(device, actor.load))
        for name, taken in seconds.items():
            why = f"first {taken[0]:.3g} s, then the median of {ROUNDS - 1}"
            check.report(name, "measured", statistics.median(taken[1:]), "s", why, all=taken)
        used = max(0, free - host_available() - memory_elsewhere())
        if check.on_gpu:
            check.report("bytes that left the device", "measured", (full - left) / GIB, "GiB", f"of {full / GIB:.3g} GiB")
            why = "fall of MemAvailable, less what other processes took"
            check.report("host memory in use afterwards", "measured", used / GIB, "GiB", why)
            why = "of PyTorch's allocator; memory registered with CUDA directly is not in it"
            check.report("page-locked by PyTorch", "measured", (page_locked() - locked) / GIB, "GiB", why)
        else:
            for name in ("bytes that left the device", "host memory in use afterwards", "page-locked by PyTorch"):
                check.report(name, "skipped", why="on a CPU the parts stay where they are")
        equal = all(torch.equal(a, b) for a, b in zip(_state(actor), before, strict=True))  # one at a time
        check.report("state after the round trip", "passed" if equal else "failed", "bit for bit" if equal else "changed")


def _update(check: Check, actor: Any, cfg: Any) -> None:
    """Take one optimizer step, so that the optimizer has moments."""
    from tepo_megatron.losses import build_objective
    from tepo_megatron.losses.advantages import group_advantages

    case = case_of(check)
    objective = build_objective(cfg.objective)
    given = rollouts(cfg, Workload.of(cfg, case.prompt, case.response))[: 2 * cfg.rollout.samples_per_prompt]
    actor.start_step(1)
    batch = actor.attach_old_stats(TrainBatch.build(given, group_advantages(given, objective.advantage)))
    actor.update(batch, objective)
    actor.finish_step()


def _state(actor: Any) -> Iterator[Tensor]:
    """Yield copies of the weights and of the optimizer's state in host memory."""
    from tepo_megatron.checkpoint.optimizer import shards

    masters = [t for shard in shards(actor.optimizer) for t in (shard.weight, *shard.state.values())]
    for tensor in (*(b.parameter for b in actor.bindings), *masters):
        yield tensor.detach().to("cpu", copy=True)


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds of a call, from an idle device to an idle device."""
    torch.cuda.synchronize() if device.type == "cuda" else None
    start = time.perf_counter()
    call()
    torch.cuda.synchronize() if device.type == "cuda" else None
    return time.perf_counter() - start


def host_available() -> int:
    """Return the bytes of memory that are still available (MemAvailable)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def memory_elsewhere() -> int:
    """Return the bytes of anonymous memory of all other processes, because the next tasks start meanwhile."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            total += int(lines.get("RssAnon", "0").split()[0]) * 1024 * (int(lines["Pid"]) != os.getpid())
    return total


def page_locked() -> int:
    """Return the bytes that PyTorch's allocator of page-locked memory holds; 0 if PyTorch does not count them."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return int(stats().get("reserved_bytes.current", stats().get("allocated_bytes.current", 0))) if stats else 0
