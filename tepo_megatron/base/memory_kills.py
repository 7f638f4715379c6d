"""Find the control groups (cgroups) that bound this process's memory and cores, and detect kills for lack of memory.

The kernel sends SIGKILL and leaves nothing but a counter.

This module imports nothing heavy, because the parents of graders and the launchers use it.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FIX = (
    "give the job or the container more memory, or make the run use less (`tepo plan` predicts it), then start again "
    "(tepo resume goes on from the last checkpoint)"
)
_GIB = 2**30
_ONE_THREAD_BYTES = 64 * 2**20  # of a model
_UNLIMITED = 2**60  # bytes; cgroup v1 writes a number near 2**63 for "no limit"
SELF = Path("/proc/self")


def group_folders(process: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield (whether it is of version 2, folder) of each control group that may bound a process, the innermost ones first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        mounts = (process / "mountinfo").read_text().splitlines()
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers != "" and controller not in controllers.split(","):
                continue
            for root, mount in _mounts(mounts, controllers and controller):
                for below in (path, path.removeprefix(root)):
                    inner = mount / below.strip("/")
                    yield from ((controllers == "", group) for group in (inner, *inner.parents) if mount in group.parents)
                yield controllers == "", mount


def _mounts(mounts: list[str], controller: str) -> Iterator[tuple[str, Path]]:
    """Yield (root in the hierarchy, mount point) of the mounts with a controller of version 1; "": of version 2."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if (kind == "cgroup2") if controller == "" else (kind == "cgroup" and controller in options.split(",")):
            yield fields[3], Path(fields[4])


def usable_cores(process: Path = SELF) -> int:
    """Return how many cores this process may use: those of its affinity, or its CPU quota (`docker --cpus`) if less."""
    cores = len(os.sched_getaffinity(0))
    quotas = [_quota(version_2, group) for version_2, group in group_folders(process, "cpu")]
    return max(1, math.ceil(min([cores, *quotas])))


def cpu_threads(model: Path, processes: int) -> int:
    """Return the threads of one of `processes` processes that compute with a model on CPUs: an equal share of the cores.

    One for a small model: with 0.6 M parameters a second thread only costs, with 135 M two are faster.
    """
    small = sum(file.stat().st_size for file in model.glob("*.safetensors")) < _ONE_THREAD_BYTES
    return 1 if small else max(1, usable_cores() // processes)


def _quota(version_2: bool, group: Path) -> float:
    """Return the cores whose time the processes of a group may use together; infinity without a limit."""
    try:
        if version_2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = float(quota) / float(period)
    except (OSError, ValueError):  # "max", or there is no such group
        return math.inf
    return cores if cores > 0 else math.inf


@dataclass(frozen=True)
class MemoryGroup:
    """The control group (cgroup) that bounds the memory of a process."""

    events: Path
    limit: Path

    def kills(self) -> int | None:
        """Return how many processes of the group the kernel has killed so far; None if the kernel does not report it."""
        return _count(self.events)

    def limit_in_words(self) -> str:
        """Return the limit as text for a message."""
        with contextlib.suppress(OSError, ValueError):
            size = int(self.limit.read_text())
            if size < _UNLIMITED:
                return f"{size / _GIB:.2f} GiB in all"
        return "the limit of a group above it"


class MemoryKills:
    """Change in the kernel's counts of out-of-memory kills since this object was created."""

    def __init__(self, process: str = "self", proc: Path = Path("/proc")) -> None:
        """Read the counts of the process's control group and of the machine. Missing counts raise nothing."""
        self._group = memory_group(proc / process)
        self._machine = proc / "vmstat"
        self._before = self._counts()

    def _counts(self) -> tuple[int | None, int | None]:
        return (None if self._group is None else self._group.kills()), _count(self._machine)

    def seen(self) -> bool:
        """Return whether the kernel has since killed any process of the group or of the machine."""
        counts = zip(self._before, self._counts(), strict=True)
        return any(before is not None and now is not None and now > before for before, now in counts)

    def explain(self, fix: str = _FIX) -> str:
        """Return text for a message about a process that ended by SIGKILL: whether the cause was lack of memory."""
        in_group, on_machine = self._counts()
        if self._group is not None and (self._before[0] or 0) < (in_group or 0):
            return (
                f"the kernel killed it for memory: the processes of this job or container may take "
                f"{self._group.limit_in_words()} ({self._group.events}: oom_kill {self._before[0]} -> {in_group}); {fix}"
            )
        if self.seen():
            return (
                f"probably the kernel killed it for memory: it has killed a process for that meanwhile ({self._machine}: "
                f"oom_kill {self._before[1]} -> {on_machine}); {fix}"
            )
        if in_group is None and on_machine is None:
            return f"the machine may be out of memory; {fix}"
        return (
            "the kernel has counted no process killed for memory meanwhile, so somebody sent the signal: a person, the job's "
            "scheduler, or a watchdog of memory in user space"
        )

    def hint(self, fix: str = _FIX) -> str:
        """Return a sentence which says that the kernel has killed a process for lack of memory, perhaps one of this job."""
        if not self.seen():
            return ""
        counted = zip((self._group.events if self._group else None, self._machine), self._before, self._counts(), strict=True)
        where, before, now = next((path, old, new) for path, old, new in counted if (new or 0) > (old or 0))
        return (
            f"the kernel has killed a process for memory since this was started, perhaps one of it "
            f"({where}: oom_kill {before} -> {now}); if so, {fix}"
        )


def memory_group(process: Path) -> MemoryGroup | None:
    """Return the control group (version 1 or 2) that bounds a process's memory; None if none is visible."""
    for version_2, folder in group_folders(process, "memory"):
        names = ("memory.events", "memory.max") if version_2 else ("memory.oom_control", "memory.limit_in_bytes")
        group = MemoryGroup(*(folder / name for name in names))
        if group.kills() is not None:
            return group
    return None


def _count(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else None
    return None
