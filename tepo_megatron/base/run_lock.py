"""The lock of a run's folder.

The launcher (of the first machine) holds it from before the folder is touched until the run ends. It is a kernel lock (flock,
which Linux's NFS client turns into a lock of the server) on a file that names its holder.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.storage import disk_fault, writing

LOCK_FILE = "run.lock"
_ATTEMPTS = 1000  # to win against others that remove and create the folder; some file systems never make one
_log = logging.getLogger(__name__)


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """The exclusive right to write in one run's folder; a context manager that releases it on exit.

    Ranks that inherit `file` keep the lock if the launcher dies. The lock is free once all of them have ended too.
    """

    def __init__(self, run_dir: Path, what: str = "this run") -> None:
        """Take the lock, creating the folder if it is missing. A refusal leaves everything as it was."""
        self._path, self._is_new, self._what = run_dir / LOCK_FILE, False, what
        self._made = _missing(run_dir)
        self.file = -1
        try:
            for _ in range(_ATTEMPTS):
                self.file = self._attempt()
                if self.file >= 0:
                    return
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir))
        except OSError as e:
            self._remove_made()
            fault = disk_fault(e, run_dir, written=False) or f"{run_dir} cannot be written ({e}); choose another `output`"
            raise ConfigError(fault) from None

    def _attempt(self) -> int:
        """Return the open, locked file; -1 if its former owner removed the folder or the file in the meantime."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._is_new = not self._path.exists()
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return -1
        except FileExistsError:  # mkdir found a file, or a folder that others remove and create
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(folder.stat().st_mode):
                    raise
            return -1
        try:
            self._lock(file)
        except BaseException:
            os.close(file)
            raise
        if _is_at(file, self._path):
            return file
        os.close(file)
        return -1

    def sign(self) -> None:
        """Write the holder into the lock file; a start that is refused shows it to its user. Raise StorageError."""
        with writing(self._path):
            os.ftruncate(self.file, os.pwrite(self.file, json.dumps(_myself()).encode() + b"\n", 0))
        self._is_new = True

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(file) from None
        except OSError as e:
            self._without_locks(file, e)

    def _refusal(self, file: int) -> ConfigError:
        owner = _read(file)
        who = "" if owner is None else f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
        text = f"{self._what} is under way in another process{who}; wait for its end, or choose another `name`"
        return ConfigError(f"{self._path.parent}: {text}")

    def _without_locks(self, file: int, error: OSError) -> None:
        """Without locks in the file system, only check whether the last owner still runs on this machine, and warn."""
        owner = _read(file)
        if owner is not None and owner["host"] == socket.gethostname() and owner["start"] == _start_of(owner["pid"]):
            raise self._refusal(file) from None
        _log.warning(
            f"{self._path.parent}: its file system has no locks ({error.strerror}): a start of the same run on another machine "
            "will not be noticed; mount it with locks, or choose another `output`"
        )

    def holds(self) -> bool:
        """Return whether the folder is still the locked one, not removed, moved or replaced."""
        return _is_at(self.file, self._path)

    def release(self) -> None:
        """Release the lock and remove its file, if it is ours. A second call does nothing."""
        if self.file < 0:
            return
        if self._is_new and self.holds():
            with contextlib.suppress(OSError):  # the file system has become read-only; a leftover file is harmless
                self._path.unlink()  # while locked, so that a process that opened it meanwhile notices that it is gone
        os.close(self.file)
        self.file = -1
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


def is_under_way(run_dir: Path) -> bool:
    """Return whether a process holds the lock of a run's folder."""
    try:
        RunLock(run_dir).release()
    except ConfigError:
        return True
    return False


def is_gone(run_dir: Path) -> bool:
    """Return whether the launcher of a run is gone. Takes no lock, so a start is not refused meanwhile.

    False if it is on another machine, which cannot be seen from here.
    """
    try:
        file = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return not (run_dir / LOCK_FILE).exists()
    try:
        owner = _read(file)
    finally:
        os.close(file)
    return owner is not None and owner["host"] == socket.gethostname() and owner["start"] != _start_of(owner["pid"])


class FolderIdentity:
    """The folder that a run began in, held open to detect its replacement. An open inode is never reused for another folder."""

    def __init__(self, run_dir: Path) -> None:
        """Open the folder and its lock file. If the folder does not exist, `is_in_place` always returns True."""
        self._kept: list[tuple[int, Path]] = []
        for path in (run_dir, run_dir / LOCK_FILE):
            with contextlib.suppress(OSError):
                self._kept.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), path))

    def is_in_place(self) -> bool:
        """Return whether the path still leads to that folder, and its lock file is still that run's."""
        return all(_is_at(file, path) for file, path in self._kept)

    def close(self) -> None:
        """Close the files. A second call does nothing. Afterwards `is_in_place` always returns True."""
        for file, _ in self._kept:
            os.close(file)
        self._kept = []


def _missing(folder: Path) -> list[Path]:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    return missing


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _myself() -> dict[str, str | int]:
    pid = os.getpid()
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"host": socket.gethostname(), "pid": pid, "start": _start_of(pid), "since": since}


def _start_of(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, which identifies it along with its pid. Empty: it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _read(file: int) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads(os.pread(file, 4096, 0))
        if isinstance(owner, dict) and {"host", "pid", "start", "since"} <= owner.keys() and isinstance(owner["pid"], int):
            return owner
    return None
