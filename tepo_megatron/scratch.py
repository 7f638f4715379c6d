"""Private temporary folders that no kill leaves behind for long.

A folder `tepo-PURPOSE-<16 hex digits>` has mode 0700 and an flock on itself that its owner holds. The kernel drops the lock
with the owner, however it ends, and containers that share the file system share the locks, unlike process ids. So a folder
whose lock can be taken is abandoned: whoever makes a folder there, or sweeps, removes it. Those of other users and of live runs
stay.

Imports nothing heavy: guards use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "shared_memory.json"  # in a folder: the segments that die with it, see `record_segments`
_NAME = re.compile(r"tepo-[a-z]+-[0-9a-f]{16}")
_UNNAMED = ".tepo-"
_ATTEMPTS = 100
Segments = dict[str, int]  # name of a file in /dev/shm -> inode


class PrivateFolder:
    """A folder that this process owns until `remove`, or until it ends."""

    def __init__(self, purpose: str, root: Path | None = None) -> None:
        """Make it in `root` (None: where temporary files go), after sweeping there and in shared memory. Raises OSError.

        Args:
            purpose: lower-case letters, part of the name.
            root: an existing folder.
        """
        root = Path(tempfile.gettempdir()) if root is None else root
        sweep(SHARED_MEMORY)
        self.path, self._lock = claim(root, new_name(purpose))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all it holds. A second call does nothing."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def new_name(purpose: str) -> str:
    """Return a name that no other folder has."""
    return f"tepo-{purpose}-{secrets.token_hex(8)}"


def claim(root: Path, name: str) -> tuple[Path, int]:
    """Make the folder `name` in `root`; return it with its open lock. Sweeps `root` first. Raises OSError.

    name: of `new_name`.
    """
    sweep(root)
    for _ in range(_ATTEMPTS):
        # locked before it gets the name by which others would find and remove it; the lock stays with the folder
        unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED, dir=root))
        try:
            lock = _open_locked(unnamed)
        except (BlockingIOError, FileNotFoundError):  # somebody swept it between the two calls
            continue
        except OSError:  # the file system has no locks: nobody can take this folder for an abandoned one
            lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return unnamed.rename(root / name), lock
        except FileNotFoundError:
            os.close(lock)
        except OSError:
            os.close(lock)
            unnamed.rmdir()
            raise
    raise OSError(f"{root}: no folder made here stays")


def sweep(*roots: Path) -> list[Path]:
    """Remove the abandoned folders in `roots`; return those. Several processes may do so at once."""
    removed = []
    for root in roots:
        try:
            found = list(root.iterdir())
        except OSError:
            continue
        for folder in found:
            named, unnamed = _NAME.fullmatch(folder.name), folder.name.startswith(_UNNAMED)
            if not (named or unnamed) or not _is_mine(folder):
                continue
            with contextlib.suppress(OSError):  # in use, or removed meanwhile
                lock = _open_locked(folder)
                try:
                    if named:
                        _remove(folder)
                        removed.append(folder)
                    else:  # it has its name before it holds anything
                        folder.rmdir()
                finally:
                    os.close(lock)
    return removed


def record_segments(folder: Path, segments: Segments) -> None:
    """Note in a folder which segments of shared memory are to be removed with it. Raises OSError."""
    part = folder / f"{SEGMENTS}.part"
    part.write_text(json.dumps(segments))
    part.replace(folder / SEGMENTS)


def mapped_segments(pids: Iterable[int]) -> Segments:
    """Return the files of shared memory that the processes map, but those in folders of ours, which have owners.

    By inode: a semaphore is mapped under a name that it had before it got its own.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended, or another user's
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    inodes.add(int(fields[4]))
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.inode() in inodes}
    return {}


def remove_segments(segments: Segments) -> None:
    """Unlink those that are still the same files and this user's."""
    for name, inode in segments.items():
        path = SHARED_MEMORY / Path(name).name
        with contextlib.suppress(OSError):
            there = path.lstat()
            if there.st_ino == inode and there.st_uid == os.geteuid() and stat.S_ISREG(there.st_mode):
                path.unlink()


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # most have none
        remove_segments({str(name): int(inode) for name, inode in json.loads((folder / SEGMENTS).read_text()).items()})
    shutil.rmtree(folder, ignore_errors=True)


def _is_mine(folder: Path) -> bool:
    try:
        there = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()


def _open_locked(folder: Path) -> int:
    """Lock a folder without waiting; return the file to keep open. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
