"""The lock of a run's folder: held by the launcher, or by rank 0 under torchrun, from before the folder is touched to the end.

The lock is the kernel's (flock, which Linux's NFS client turns into a lock of the server), on a file that says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from tepo_megatron.errors import ConfigError
from tepo_megatron.storage import disk_fault, writing

LOCK_FILE = "run.lock"
_log = logging.getLogger(__name__)


class RunLock:
    """The exclusive right to write in one run's folder; a context manager, which gives it back.

    Ranks that inherit `file` hold the lock on when the launcher dies: it is free once all of them have ended too.
    """

    def __init__(self, run_dir: Path) -> None:
        """Take the lock, and create the folder where it is missing.

        Raises ConfigError where another process holds it, naming it, or where the folder cannot be written. A refusal leaves
        everything as it was.
        """
        self._path, self._is_new = run_dir / LOCK_FILE, False
        self._made = _missing(run_dir)
        self.file = -1
        try:
            while self.file < 0:
                self.file = self._attempt()
        except OSError as e:
            self._remove_made()
            fault = disk_fault(e, run_dir, written=False) or f"{run_dir} cannot be written ({e}); choose another `output`"
            raise ConfigError(fault) from None

    def _attempt(self) -> int:
        """The open and locked file; -1 where the folder or the file went with its former owner meanwhile."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._is_new = not self._path.exists()
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return -1
        except FileExistsError:  # by mkdir, which found a folder that is gone now; or a file
            if folder.exists():
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
        """Write into the lock's file who holds it: what a start that is refused tells its user. Raises StorageError."""
        with writing(self._path):
            os.ftruncate(self.file, os.pwrite(self.file, json.dumps(_myself()).encode() + b"\n", 0))
        self._is_new = True

    def _lock(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._path.parent}: this run is under way in another process{_who(file)}; wait for its end, or choose "
                f"another `name`"
            ) from None
        except OSError as e:
            self._without_locks(file, e)

    def _without_locks(self, file: int, error: OSError) -> None:
        """What can be known of a file system without locks: whether the last owner still runs on this machine."""
        owner = _read(file)
        if owner is not None and owner["host"] == socket.gethostname() and owner["start"] == _start_of(owner["pid"]):
            raise ConfigError(
                f"{self._path.parent}: this run is under way in another process{_who(file)}; wait for its end, or choose "
                f"another `name`"
            ) from None
        _log.warning(
            "%s: its file system has no locks (%s): a start of the same run on another machine will not be noticed; mount it "
            "with locks, or choose another `output`",
            self._path.parent,
            error.strerror,
        )

    def holds(self) -> bool:
        """Return whether the folder is still the one that was locked: not removed, moved or replaced."""
        return _is_at(self.file, self._path)

    def release(self) -> None:
        """Give the lock back and remove its file, if it is ours. A second call does nothing."""
        if self.file < 0:
            return
        if self._is_new and self.holds():
            with contextlib.suppress(OSError):  # its file system has become read-only; a file that is left is harmless
                self._path.unlink()  # while it is locked: who opened it meanwhile finds that it is gone
        os.close(self.file)
        self.file = -1
        self._remove_made()

    def _remove_made(self) -> None:
        """The folders that this lock made, where nothing was put into them."""
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class FolderIdentity:
    """The folder that a run began in, kept open: an inode that is open is given to no other folder.

    A run may be replaced by hand while it is under way. Then the path leads to another run's folder, or the folder holds
    another run's lock.
    """

    def __init__(self, run_dir: Path) -> None:
        """Keep what is there now: nothing where the folder does not exist, which `is_in_place` then cannot tell."""
        self._kept: list[tuple[int, Path]] = []
        for path in (run_dir, run_dir / LOCK_FILE):
            with contextlib.suppress(OSError):
                self._kept.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), path))

    def is_in_place(self) -> bool:
        """Return whether the path still leads to that folder, and the lock in it is still that run's."""
        return all(_is_at(file, path) for file, path in self._kept)

    def close(self) -> None:
        """Give the files back. A second call does nothing; afterwards `is_in_place` cannot tell any more."""
        for file, _ in self._kept:
            os.close(file)
        self._kept = []


def _missing(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist, from the bottom up."""
    found = []
    while not folder.exists():
        found.append(folder)
        folder = folder.parent
    return found


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
    """When a process started, in clock ticks since boot: no other process has the same number and start. Empty: it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _read(file: int) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads(os.pread(file, 4096, 0))
        if isinstance(owner, dict) and {"host", "pid", "start", "since"} <= owner.keys() and isinstance(owner["pid"], int):
            return owner
    return None


def _who(file: int) -> str:
    owner = _read(file)
    return "" if owner is None else f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
