"""The guard of the rollout service: who finds the service, who is refused, and when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tepo_megatron.errors import ConfigError
from tepo_megatron.utils import service_guard
from tests.waiting import lives, until

SERVICE = "import signal, time; signal.signal(signal.SIGTERM, {handler}); print('ready', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def start(supervisor: int, handler: str = "signal.SIG_DFL") -> tuple[Path, int, int]:
    """Start a guard with a service; return its folder and their pids."""
    folder = service_guard.folder_of(supervisor)
    lock, listener = service_guard.claim(folder), service_guard.listen(folder)
    service_guard.start(supervisor, folder, lock, [sys.executable, "-c", SERVICE.format(handler=handler)], [listener.fileno()])
    os.close(lock)
    until(lambda: service_guard.read_pids(folder) is not None)
    pids = service_guard.read_pids(folder)
    assert pids is not None
    return folder, *pids


def test_the_service_is_found_by_its_supervisor_alone(supervisor: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder, guard_pid, service = start(supervisor.pid)
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700 and service_guard.is_held(folder)
    assert (
        service_guard.folder_of(os.getpid()) != folder and service_guard.connect(service_guard.folder_of(os.getpid())) is None
    )
    connection = service_guard.connect(folder)
    assert connection is not None and service_guard.peer_user(connection) == os.geteuid()
    connection.close()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="expected a folder of user"):
        service_guard.connect(folder)
    folder.chmod(0o700)
    service_guard.end(folder, 20.0)
    until(lambda: not lives(service) and not lives(guard_pid))
    assert not folder.exists() and service_guard.connect(folder) is None


@pytest.mark.parametrize("victim", ["supervisor", "guard", "service"])
def test_all_end_together(supervisor: subprocess.Popen[bytes], victim: str) -> None:
    folder, guard_pid, service = start(supervisor.pid)
    os.kill({"supervisor": supervisor.pid, "guard": guard_pid, "service": service}[victim], signal.SIGKILL)
    supervisor.poll()
    until(lambda: not lives(service) and not lives(guard_pid))
    assert not service_guard.is_held(folder)
