"""Control groups that limit the processes of a test. They need root and Linux.

A test whose machine has none is skipped with the reason. The group is removed with its context.
"""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SECONDS = 60.0  # time limit of any helper
NOTHING = 65536  # bytes; a limit that a process exceeds with the next page that it touches


@dataclass(frozen=True)
class Group:
    """A control group of this test.

    Attributes:
        events: Name of the file with its count of killed processes.
    """

    folder: Path
    events: str = ""

    def add(self, pid: int) -> None:
        """Move a process into the group, with all its threads. Memory that it uses already is not counted."""
        (self.folder / "cgroup.procs").write_text(f"{pid}\n")

    def kills(self) -> int:
        """Return the number of its processes that the kernel killed because memory ran out."""
        lines = (self.folder / self.events).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _mounts(kind: str, controller: str) -> list[Path]:
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted, _, options = after.split(" ", 2)
        if mounted == kind and (kind == "cgroup2" or controller in options.split(",")):
            found.append(Path(before.split()[4]))
    return found


@contextlib.contextmanager
def control_group(controller: str, limits: Mapping[str, Mapping[str, str]]) -> Iterator[Group]:
    """Create a control group of version 1 or 2, below the root of its hierarchy."""
    why = "there is no control group"
    for kind in ("cgroup", "cgroup2"):
        for mount in _mounts(kind, controller):
            folder = mount / f"tepo-test-{uuid.uuid4().hex}"
            try:
                if kind == "cgroup2" and controller not in (mount / "cgroup.subtree_control").read_text().split():
                    why = f"{mount} has no controller {controller} for its groups"
                    continue
                folder.mkdir()
                for name, text in limits[kind].items():
                    (folder / name).write_text(text)
            except OSError as e:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                why = str(e)
                continue
            try:
                yield Group(folder, "memory.oom_control" if kind == "cgroup" else "memory.events")
            finally:
                _remove(folder)
            return
    pytest.skip(f"no control group for {controller} can be made here: {why}")


def _remove(folder: Path) -> None:
    """Remove the group with the processes in it, which are this test's own; wait for processes that others kill."""
    deadline = time.monotonic() + SECONDS
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            left = [int(line) for line in (folder / "cgroup.procs").read_text().split()]
            assert time.monotonic() < deadline, f"{folder} has processes: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def memory_group(size: int) -> contextlib.AbstractContextManager[Group]:
    """Create a control group whose processes may take `size` bytes together."""
    return control_group("memory", {"cgroup": {"memory.limit_in_bytes": str(size)}, "cgroup2": {"memory.max": str(size)}})
