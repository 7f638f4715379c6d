"""Find the control groups (cgroups, version 1 or 2) that bound this process's memory and cores. Imports nothing heavy."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

SELF = Path("/proc/self")


def group_folders(process: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield (whether it is of version 2, folder) of each control group that may bound a process, the innermost ones first.

    A container sees its own group at the root of the mount, whatever its name outside. The folders need not exist.
    """
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
