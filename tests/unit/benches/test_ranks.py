"""Ranks in fresh processes: they meet without a name, and none outlives its world."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks._ranks import Ranks
from tepo_megatron.base.processes import read_stat

ROOT = Path(__file__).parents[3]
NAMELESS = ["unshare", "--net", "--uts", "sh", "-c", 'hostname nobody-knows-it && ip link set lo up && exec "$@"', "sh"]
RANK = """
import ipaddress, os, torch, torch.distributed as dist
ipaddress.ip_address(os.environ["MASTER_ADDR"])  # a name would be looked up for minutes
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"of {int(total)} at {os.environ['MASTER_ADDR']}\\n".encode())  # at once: the ranks share the pipe
dist.destroy_process_group()  # else Gloo's threads meet the end of the interpreter, which may abort
"""
WORLD = f"from benchmarks._ranks import Ranks\nwith Ranks(2, ['-c', {RANK!r}]) as ranks: ranks.wait(120)"


@pytest.mark.slow
def test_ranks_meet_where_this_machines_name_does_not_resolve() -> None:
    """In network and UTS namespaces of their own where root can make them; elsewhere only by the address that they get."""
    isolated = shutil.which("unshare") and subprocess.run([*NAMELESS, "true"], capture_output=True).returncode == 0
    words = [*(NAMELESS if isolated else []), sys.executable, "-c", WORLD]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["of 2 at 127.0.0.1"] * 2


def test_no_rank_outlives_a_rank_that_failed(tmp_path: Path) -> None:
    code = "import os, sys, time; print(os.getpid(), flush=True); sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    with pytest.raises(subprocess.CalledProcessError) as error, Ranks(3, ["-c", code], tmp_path / "log") as ranks:
        ranks.wait(120)
    assert error.value.returncode == 3
    assert all(read_stat(int(pid)) is None for pid in (tmp_path / "log").read_text().split())


def test_ranks_that_are_stuck_end_with_their_time(tmp_path: Path) -> None:
    log, code = tmp_path / "log", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired), Ranks(1, ["-c", code], log) as ranks:
        while not log.read_text().endswith("\n"):
            assert ranks.status() is None
            time.sleep(0.01)
        ranks.wait(0.0)
    assert read_stat(int(log.read_text())) is None
