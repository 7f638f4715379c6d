"""The ranks of one machine as processes: whose failure is reported, how they end, and where they meet."""

import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.memory_kills import MemoryKills
from tepo_megatron.base.scratch import check_private, make_private_folder
from tepo_megatron.command.ranks import (
    RankFailure,
    RankProcesses,
    RestartPolicy,
    first_failure,
    interrupted_by_signals,
    is_recoverable,
)


def message(text: str, expected: bool, when: float) -> dict[str, object]:
    return {"message": text, "expected": expected, "restarts": not expected, "time": when}


def test_the_failure_that_caused_the_others_is_reported(tmp_path: Path) -> None:
    killed, ended, silent = (
        RankFailure(7, -signal.SIGKILL, None),
        RankFailure(8, -signal.SIGTERM, None),
        RankFailure(9, 3, None),
    )
    late, early = RankFailure(1, 1, message("late", False, 2.0)), RankFailure(2, 1, message("early", False, 1.0))
    ours = RankFailure(3, 1, message("ours", True, 3.0))
    by_us = RankFailure(4, -signal.SIGKILL, None, ended_by_us=True)
    (tmp_path / "vmstat").write_text("oom_kill 0\n")
    kills = MemoryKills(proc=tmp_path)
    assert first_failure({0: late, 1: early, 2: killed, 3: ours, 4: ended}, kills) == "rank 3: ours"
    found = first_failure({0: late, 1: early, 2: killed}, kills)
    assert found.startswith(
        "rank 2 (pid 7) was ended by SIGKILL: the kernel has counted no process killed for memory meanwhile"
    )
    assert first_failure({0: late, 1: early, 2: ended, 3: silent}, kills) == "rank 1: early"
    same = RankFailure(5, 1, message("ours", True, 9.0))  # every rank raises an error of rank 0
    assert first_failure({0: same, 1: late, 3: ours}, kills) == "rank 0: ours"
    assert first_failure({3: silent}, kills) == "rank 3 (pid 9) exited with status 3 without a message"
    assert first_failure({0: by_us, 1: early}, kills) == "rank 1: early"
    (tmp_path / "vmstat").write_text("oom_kill 1\n")
    found = first_failure({0: late, 2: killed, 3: ours, 4: by_us}, kills)
    assert found.startswith("rank 2 (pid 7) was ended by SIGKILL: probably the kernel killed it for memory"), found
    assert first_failure({0: by_us, 3: ours}, kills) == "rank 3: ours"


# Rank 1 fails; rank 0 does not end by itself, nor by SIGTERM.
RANKS = """
import json, os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    open(os.environ["TEPO_ERROR_FILE"], "w").write(json.dumps(
        {"message": "broken", "expected": True, "restarts": False, "time": time.time()}))
    raise SystemExit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def test_ranks_are_restarted_where_they_may_succeed(tmp_path: Path) -> None:
    ours, traceback = RankFailure(3, 1, message("ours", True, 1.0)), RankFailure(2, 1, message("traceback", False, 2.0))
    hang = RankFailure(1, 1, message("hangs", True, 0.0) | {"restarts": True})
    killed, by_us = RankFailure(7, -signal.SIGKILL, None), RankFailure(8, -signal.SIGTERM, None, ended_by_us=True)
    kills = MemoryKills()
    assert not is_recoverable({0: ours, 1: traceback, 2: by_us}, kills)
    for failures in ({1: killed, 0: by_us}, {0: ours, 1: killed}, {0: traceback, 1: by_us}, {0: hang, 1: by_us}):
        assert is_recoverable(failures, kills)
    policy = RestartPolicy(2, tmp_path)
    assert policy.allow({0: ours}, kills) is None
    how = policy.allow({0: killed}, kills)
    assert how is not None and "from the start" in how and "restart 1 of 2 without" in how
    (tmp_path / "step-00000004").mkdir()
    for count in (1, 2):  # a newer checkpoint is progress
        how = policy.allow({0: killed}, kills)
        assert how is not None and f"checkpoint of step 4 (restart {count} of 2 without" in how
    assert policy.allow({0: killed}, kills) is None
    assert RestartPolicy(0, tmp_path).allow({0: killed}, kills) is None


def test_a_failure_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tepo_megatron.command.ranks.GRACE_SECONDS", 0.5)
    with RankProcesses(["-c", RANKS], range(2), 2, tmp_path, {}, []) as ranks:
        ranks.start()
        failures = ranks.wait()
    assert failures[0].status == -signal.SIGKILL and failures[1].status == 1
    assert first_failure(failures, MemoryKills()) == "rank 1: broken" and failures[0].ended_by_us
    for failure in failures.values():
        with pytest.raises(ProcessLookupError):
            os.kill(failure.pid, 0)


def test_a_signal_ends_the_ranks_and_its_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    sleeping = RankProcesses(["-c", "import time; time.sleep(600)"], range(2), 2, tmp_path, {}, [])
    with pytest.raises(KeyboardInterrupt, match="signal SIGTERM"), interrupted_by_signals(), sleeping as ranks:
        ranks.start()
        pids = ranks.pids
        assert len(pids) == 2
        ranks.wait()
    assert signal.getsignal(signal.SIGTERM) is before
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_private_folder_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = make_private_folder("ranks").path
    assert folder.name.startswith("tepo-ranks-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    check_private(folder)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"expected a folder of user .* with mode 0700, found mode 0750"):
        check_private(folder)
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    for other in (link, tmp_path / "gone"):
        with pytest.raises(ConfigError):
            check_private(other)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"TMPDIR=.*: other users can replace"):
        make_private_folder("ranks")
    tmp_path.chmod(0o1777)
    make_private_folder("ranks")
