"""The kernel's counts of processes killed for memory, in control groups of both versions and in containers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.base.memory_kills import MemoryKills
from tests.hurting import memory_group as limited

V1 = ("cgroup", "4:memory:{path}\n1:cpu:/\n0::/\n", "memory.oom_control", "memory.limit_in_bytes", "rw,memory")
V2 = ("cgroup2", "0::{path}\n", "memory.events", "memory.max", "rw")


def machine(folder: Path, version: tuple[str, ...], root: str, path: str, below: str) -> tuple[Path, Path]:
    """A /proc, and the group's folder: mounted from `root` of the hierarchy; the process's group is `path`, seen at `below`."""
    kind, lines, events, limit, options = version
    proc, mount = folder / "proc", folder / "mount"
    group = mount / below
    group.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(
        f"31 23 0:28 / /other rw - tmpfs tmpfs rw\n35 31 0:32 {root} {mount} rw,relatime shared:9 - {kind} {kind} {options}\n"
    )
    (proc / "self" / "cgroup").write_text(lines.format(path=path))
    (group / events).write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (group / limit).write_text(f"{3 * 2**30}\n")
    (proc / "vmstat").write_text("nr_free_pages 9\noom_kill 7\n")
    return proc, group


@pytest.mark.parametrize("version", [V1, V2], ids=["version 1", "version 2"])
@pytest.mark.parametrize(
    ("root", "path", "below"),
    [("/", "/slice/job", "slice/job"), ("/docker/abc", "/docker/abc", ""), ("/", "/", "")],
    ids=["host", "container that sees outer names", "container with names of its own"],
)
def test_the_count_of_the_group_explains_a_kill(
    version: tuple[str, ...], root: str, path: str, below: str, tmp_path: Path
) -> None:
    proc, group = machine(tmp_path, version, root, path, below)
    kills = MemoryKills(proc=proc)
    assert not kills.seen() and "somebody sent the signal" in kills.explain()
    (group / version[2]).write_text("oom_kill 3\n")
    assert kills.seen()
    said = kills.explain("buy more")
    assert said.startswith("the kernel killed it for memory: the processes of this job or container may take 3.00 GiB in all")
    assert f"{version[2]}: oom_kill 2 -> 3); buy more" in said
    (group / version[3]).write_text("max\n" if version is V2 else f"{2**63 - 4096}\n")
    assert "may take the limit of a group above it" in kills.explain()


GREEDY = """
import subprocess, sys
sys.stdin.readline()
from tepo_megatron.base.memory_kills import MemoryKills
kills = MemoryKills()
ended = subprocess.run([sys.executable, "-c", "kept = bytes(1) * 2**29"])
print(ended.returncode, kills.explain())
"""


def test_a_process_that_the_kernel_does_kill() -> None:
    """Use a real group, of whichever version this machine has."""
    with limited(128 * 2**20) as group:
        parent = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        group.add(parent.pid)
        out, _ = parent.communicate("go on\n", timeout=120)
        assert group.kills() == 1
    assert out.startswith("-9 the kernel killed it for memory") and "0.12 GiB in all" in out and "oom_kill 0 -> 1" in out, out
