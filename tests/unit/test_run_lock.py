"""A run's folder has one owner: a second start is refused and changes nothing, whenever it comes."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError, RunReplacedError
from tepo_megatron.base.run_lock import LOCK_FILE, RunLock
from tepo_megatron.config import LoggingConfig
from tepo_megatron.monitor import run_dir
from tepo_megatron.monitor.sinks import METRICS_FILE, RunLog
from tests.unit.config.test_run_dir import RUN, config, write_run

# Takes the lock again and again; inside it, what no two may do at once.
CONTENDER = """
import os, sys, time
from pathlib import Path
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.run_lock import RunLock

folder, wins = Path(sys.argv[1]), 0
while wins < 100:
    try:
        with RunLock(folder) as lock:
            lock.sign()
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(folder / "inside")
            wins += 1
    except ConfigError as e:
        assert "under way" in str(e), e
    time.sleep(0.0002)
"""


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns) for p in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize("change", [{}, {"overwrite": True}, {"resume": True}])
def test_a_refused_start_changes_nothing(tmp_path: Path, change: dict[str, bool]) -> None:
    run = write_run(tmp_path, *RUN)
    with RunLock(run) as lock:
        lock.sign()
        before = everything(tmp_path)
        with pytest.raises(ConfigError, match=rf"under way in another process \(process {os.getpid()} on .*, since 20"):
            run_dir.claim(config(tmp_path, **change))
        assert everything(tmp_path) == before
    assert not (run / LOCK_FILE).exists()
    if not change:
        before = everything(tmp_path)
        with pytest.raises(ConfigError, match="holds a run already"):
            run_dir.claim(config(tmp_path))
        assert everything(tmp_path) == before


def test_a_lock_that_a_kill_left_behind_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / LOCK_FILE).write_text(json.dumps({"host": "h", "pid": 1, "start": "0", "since": "then"}))
    with run_dir.claim(config(tmp_path)) as lock:
        assert lock.holds() and json.loads((tmp_path / "a" / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_many_contenders_are_never_inside_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started = [subprocess.Popen([sys.executable, "-c", CONTENDER, folder], stderr=subprocess.PIPE) for _ in range(4)]
    errors = [process.communicate(timeout=120)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0] * 4, errors
    assert not list(folder.glob("*"))


def test_without_locks_the_owner_is_looked_for_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    first = RunLock(tmp_path)
    first.sign()
    assert "its file system has no locks (No locks available)" in caplog.text
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()


def test_a_run_notices_that_its_folder_was_replaced(tmp_path: Path) -> None:
    """The run's next record and next checkpoint are refused, and the other run's folder stays as it is."""
    folder = tmp_path / "a"
    with RunLock(folder) as lock, RunLog(folder, LoggingConfig(), steps=3) as log:
        lock.sign()
        log.write(1, {})
        folder.rename(tmp_path / "elsewhere")
        assert not lock.holds()
        for act in (log.sync, lambda: log.write(2, {})):
            with pytest.raises(RunReplacedError, match="was removed or replaced while this run was under way"):
                act()
        folder.mkdir()
        (folder / METRICS_FILE).write_text('{"step": 1}\n')
        (folder / LOCK_FILE).write_text("another's")
        before = everything(folder)
        with pytest.raises(RunReplacedError):
            log.write(2, {})
    assert everything(folder) == before
