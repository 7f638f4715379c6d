"""The ranks of one machine share its cores as threads, or those that its control group allows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.base.memory_kills import usable_cores
from tepo_megatron.command.launcher import threads_of_rank
from tests.hurting import control_group

CORES = len(os.sched_getaffinity(0))
V1 = ("cgroup", "3:cpuset:/\n2:cpu,cpuacct:{path}\n0::/\n", "rw,cpu,cpuacct")
V2 = ("cgroup2", "0::{path}\n", "rw")


def test_ranks_share_the_cores_and_each_has_a_thread() -> None:
    cores = usable_cores()
    assert cores <= CORES
    assert threads_of_rank(1) == cores
    assert threads_of_rank(2) == max(1, cores // 2)
    assert threads_of_rank(2 * cores) == 1


@pytest.mark.parametrize("version", [V1, V2], ids=["version 1", "version 2"])
@pytest.mark.parametrize(
    ("root", "path", "limited"),
    [("/", "/slice/job", "slice/job"), ("/", "/slice/job", "slice"), ("/docker/abc", "/docker/abc", ""), ("/", "/", "")],
    ids=["own group", "group above it", "container that sees outer names", "container with names of its own"],
)
@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("100000", 1), ("100000000", CORES), ("max", CORES)])
def test_a_quota_counts_in_whole_cores(
    version: tuple[str, ...], root: str, path: str, limited: str, quota: str, cores: int, tmp_path: Path
) -> None:
    kind, lines, options = version
    mount = tmp_path / "mount"
    (mount / limited).mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(f"35 31 0:32 {root} {mount} rw,relatime shared:9 - {kind} {kind} {options}\n")
    (tmp_path / "cgroup").write_text(lines.format(path=path))
    if kind == "cgroup2":
        (mount / limited / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (mount / limited / "cpu.cfs_quota_us").write_text(f"{-1 if quota == 'max' else quota}\n")
        (mount / limited / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_a_real_quota_is_seen() -> None:
    limits = {"cgroup": {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}, "cgroup2": {"cpu.max": "100000 100000"}}
    code = "input(); from tepo_megatron.base.memory_kills import usable_cores; print(usable_cores())"
    with control_group("cpu", limits) as group:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        group.add(child.pid)
        assert child.communicate("\n")[0] == "1\n"
