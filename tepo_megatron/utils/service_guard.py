"""Guard a service that outlives the ranks: it serves one start of them after the other, and ends with their supervisor.

    python -m tepo_megatron.utils.service_guard SUPERVISOR FOLDER LOCK FILES COMMAND...

The first rank 0 starts the guard, and the guard starts the service. So the service survives rank 0, and the kernel ends it
with the guard (PR_SET_PDEATHSIG). The guard ends it with the supervisor, however that ends. A thread of the service could not
do that while the service is stopped or busy. Each rank 0 has the same supervisor, from which the name of the private folder
follows:

    socket   the service listens here; only processes of this user may connect
    pids     the guard's pid and the service's
    status   the service's exit status, once it has ended (negative: a signal)

This module imports nothing heavy, because the guard lives as long as the service.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tepo_megatron.utils import scratch
from tepo_megatron.utils.atomic import replace_file
from tepo_megatron.utils.processes import die_with_parent, read_stat, wait_for_signal
from tepo_megatron.utils.scratch import check_private

# Limit since SIGTERM to the service: it stops its servers, which their guards end in any case; then SIGKILL
GRACE_SECONDS = 10.0
SOCKET, PIDS, STATUS = "socket", "pids", "status"
_POLL_SECONDS = 0.2
_LONGEST_ADDRESS = 107  # bytes of a UNIX socket's address
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_BOOT, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def folder_of(supervisor: int) -> Path:
    """Return the path of the private folder for the service of this supervisor's ranks. It need not exist."""
    stat = read_stat(supervisor)
    if stat is None:
        raise ProcessLookupError(f"process {supervisor} has ended")
    owner = f"{_BOOT.read_text()}/{os.readlink(_PID_NAMESPACE)}/{supervisor}/{stat.started}/{os.geteuid()}"
    name = f"tepo-service-{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}"
    return Path(tempfile.gettempdir()) / name


def claim(folder: Path) -> int:
    """Make the folder, and return the open file that holds its lock. The guard needs it. Raises OSError."""
    _, lock = scratch.claim(folder.parent, folder.name)
    (folder / STATUS).touch(mode=0o600)
    return lock


def listen(folder: Path) -> socket.socket:
    """Return the listening socket of the service."""
    listener = socket.socket(socket.AF_UNIX)
    with _address(folder) as address:
        listener.bind(address)
    listener.listen()
    return listener


def connect(folder: Path) -> socket.socket | None:
    """Return a connection to the living service; None if there is none. Raises ConfigError if the folder is not private."""
    if not folder.exists():
        return None
    check_private(folder)
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _address(folder) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the address of the socket. The path of the folder may be longer than an address may be."""
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield path
        return
    place = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{place}/{SOCKET}"
    finally:
        os.close(place)


def is_held(folder: Path) -> bool:
    """Return whether a guard holds the lock of a folder. An abandoned folder is removed."""
    scratch.sweep(folder.parent)
    return folder.exists()


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a UNIX socket."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def read_pids(folder: Path) -> tuple[int, int] | None:
    """Return the pids of the guard and of the service; None if there are none yet, or no longer."""
    with contextlib.suppress(OSError, ValueError):
        guard, service = json.loads((folder / PIDS).read_text())
        return int(guard), int(service)
    return None


def end(folder: Path, seconds: float) -> None:
    """End the service in this folder, if there is one, and wait until it has ended."""
    pids = read_pids(folder)
    if pids is None:
        return
    try:
        guard = os.pidfd_open(pids[0])
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(guard, number)
            if select.select([guard], [], [], seconds)[0]:
                break
    finally:
        os.close(guard)
    scratch.sweep(folder.parent)  # a killed guard leaves the folder


def start(supervisor: int, folder: Path, lock: int, command: Sequence[str], pass_fds: Sequence[int]) -> int:
    """Start a guard in a session of its own, which starts `command`. Returns its pid."""
    files = ",".join(map(str, pass_fds))
    words = [sys.executable, "-P", "-m", __spec__.name, str(supervisor), str(folder), str(lock), files, *command]
    return subprocess.Popen(words, pass_fds=[lock, *pass_fds], start_new_session=True).pid


def watch(supervisor: int, folder: scratch.PrivateFolder, start_service: Callable[[], int]) -> None:
    """Run the service until it ends, this process gets SIGTERM, or the supervisor is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # `wait_for_signal` receives them instead
    try:
        supervisor_end = os.pidfd_open(supervisor)
    except ProcessLookupError:
        folder.remove()
        return
    service = start_service()
    replace_file(folder.path / PIDS, json.dumps([os.getpid(), service]).encode(), durable=False)
    while (status := _status(service)) is None and not select.select([supervisor_end], [], [], 0)[0]:
        if wait_for_signal(_SIGNALS, _POLL_SECONDS) == signal.SIGTERM:
            break
    deadline = time.monotonic() + GRACE_SECONDS
    if status is None:
        os.kill(service, signal.SIGTERM)
    while status is None:
        if time.monotonic() > deadline:
            os.kill(service, signal.SIGKILL)
        time.sleep(_POLL_SECONDS / 10)
        status = _status(service)
    with contextlib.suppress(OSError):
        (folder.path / STATUS).write_text(str(status))
    folder.remove()


def _status(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def before_service(guard: int) -> None:
    """Prepare a child of the guard, which is to become the service: it dies with the guard and receives all signals."""
    die_with_parent(guard)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _main(supervisor: int, folder: Path, lock: int, files: Sequence[int], command: Sequence[str]) -> None:
    begin = partial(before_service, os.getpid())
    owned = scratch.PrivateFolder(folder, lock)
    watch(supervisor, owned, lambda: subprocess.Popen(command, pass_fds=files, preexec_fn=begin).pid)


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), [int(f) for f in sys.argv[4].split(",")], sys.argv[5:])
