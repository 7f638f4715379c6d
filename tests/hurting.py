"""Machines that fail a run from below: memory groups, small and slow disks, a clock that is set. Each needs root and Linux.

A test whose machine cannot be set up is skipped with the reason. Nothing outlives its context: mounts are in a mount namespace
of their own, which ends with its last process, and groups are removed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 60.0  # time limit of any helper
NOTHING = 65536  # bytes; a limit that a process exceeds with the next page that it touches


@dataclass(frozen=True)
class Group:
    """A control group of this test.

    Attributes:
        folder: Folder of its files.
        events: Name of the file with its count of killed processes.
    """

    folder: Path
    events: str = ""

    def add(self, pid: int) -> None:
        """Move a process into the group, with all its threads. Memory that it uses already is not counted."""
        (self.folder / "cgroup.procs").write_text(f"{pid}\n")

    def exhaust(self, pid: int) -> None:
        """Move a process into the group, and make it need memory now rather than at its next allocation, which may never come.

        A byte of each page of its libraries is written over with itself, which gives the process a copy of the page.
        """
        self.add(pid)
        # writing fails as soon as the kernel has killed it
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                span, permissions, *_, name = line.split()
                if permissions != "r--p" or ".so" not in name:
                    continue
                first, end = (int(address, 16) for address in span.split("-"))
                for address in range(first, end, mmap.PAGESIZE):
                    memory.seek(address)
                    byte = memory.read(1)
                    memory.seek(address)
                    memory.write(byte)

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


@dataclass(frozen=True)
class Disk:
    """A file system that only processes of its own mount namespace see.

    Attributes:
        folder: Mount point in that namespace.
        keeper: Process that holds the namespace.
    """

    folder: Path
    keeper: int

    @property
    def outside(self) -> Path:
        """Path of the folder for this process."""
        return Path(f"/proc/{self.keeper}/root") / self.folder.relative_to("/")

    def by(self, *words: str | Path) -> Sequence[str]:
        """Return the command prefix that runs a command in the namespace, in this checkout."""
        inside = ["nsenter", f"--mount=/proc/{self.keeper}/ns/mnt", "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT)]
        return [*inside, *map(str, words)]

    def do(self, script: str) -> str:
        """Run a shell script in the namespace; return its output."""
        done = subprocess.run(self.by("sh", "-ec", script), capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout

    def device(self) -> str:
        """Return the name of its block device."""
        return Path(self.do(f"findmnt -n -o SOURCE {self.folder}").strip()).name

    def fill(self, name: str = "ballast") -> Path:
        """Write until the disk is full; return the file to remove."""
        path = self.outside / name
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size in (2**20, 4096, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        return path


@contextlib.contextmanager
def disk(folder: Path, mount: str, *tools: str) -> Iterator[Disk]:
    """Mount a disk at `folder`, which is created."""
    folder.mkdir(parents=True)
    missing = [tool for tool in ("unshare", "nsenter", "findmnt", *tools) if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"mounting takes root and {', '.join(missing) or 'nothing else'}")
    script = f"set -e\n{mount}\necho ready\nexec cat"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as keeper:  # fmt: skip
        assert keeper.stdin and keeper.stdout
        try:
            if (said := keeper.stdout.readline()) != "ready\n":
                pytest.skip(f"it cannot be mounted here: {said}{keeper.stdout.read()}")
            yield Disk(folder, keeper.pid)
        finally:
            keeper.stdin.close()
            keeper.wait(SECONDS)
