"""Private temporary folders that are cleaned up even after their owner is killed.

A folder `tepo-PURPOSE-<16 hex digits>` has mode 0700, and its owner holds an flock on it. The kernel releases the lock when the
owner ends, however it ends. Containers that share the file system share the locks, unlike process ids. So a folder whose lock
can be taken is abandoned: any process that creates a folder in the same place, or sweeps, removes it. Folders of other users
and of live runs stay.

This module imports nothing heavy, because guards use it.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.storage import replace_file

SHORT = Path("/tmp")  # the parent of folders with sockets where TMPDIR is too long
WORLD_FOLDER = "TEPO_WORLD_FOLDER"  # environment variable: the folder through which the ranks of a launch connect
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = "shared_memory.json"  # lists the segments to remove with a folder, see `record_segments`
_NAME = re.compile(r"tepo-[a-z]+-[0-9a-f]{16}")
_UNNAMED = ".tepo-"
_ATTEMPTS = 100
Segments = dict[str, int]  # name of a file in /dev/shm -> inode


class PrivateFolder(contextlib.AbstractContextManager["PrivateFolder"]):
    """A folder that this process owns until `remove`, or until the process ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def create(cls, purpose: str, root: Path | None = None) -> Self:
        """Create a folder, after sweeping `root` and shared memory."""
        root = Path(tempfile.gettempdir()) if root is None else root
        sweep(SHARED_MEMORY)
        return cls(*claim(root, new_name(purpose)))

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with its contents. A second call does nothing."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def home() -> Iterator[None]:
    """Where nothing says where the user's home is, have a private one: libraries would make a folder named `~` in this one."""
    if os.path.expanduser("~") != "~":
        yield
        return
    with PrivateFolder.create("home") as folder:
        os.environ["HOME"] = str(folder.path)
        try:
            yield
        finally:
            del os.environ["HOME"]


def new_name(purpose: str) -> str:
    """Return a name that no other folder has, for `purpose` (lower-case letters)."""
    return f"tepo-{purpose}-{secrets.token_hex(8)}"


def claim(root: Path, name: str) -> tuple[Path, int]:
    """Sweep `root`, then create a locked folder in it."""
    sweep(root)
    for _ in range(_ATTEMPTS):
        # lock it before it gets the name by which others would find and remove it; renaming keeps the lock
        unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED, dir=root))
        try:
            lock = _open_locked(unnamed)
        except (BlockingIOError, FileNotFoundError):  # another process swept it between the two calls
            continue
        except OSError:  # the file system has no locks, so nobody can mistake this folder for an abandoned one
            lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return unnamed.rename(root / name), lock
        except FileNotFoundError:
            os.close(lock)
        except OSError:
            os.close(lock)
            unnamed.rmdir()
            raise
    raise OSError(f"{root}: folders that are created here disappear at once")


def sweep(*roots: Path) -> list[Path]:
    """Remove the abandoned folders in `roots` and return their paths. Several processes may sweep at once."""
    removed = []
    for root in roots:
        try:
            folders = list(root.iterdir())
        except OSError:
            continue
        for folder in folders:
            named, unnamed = _NAME.fullmatch(folder.name), folder.name.startswith(_UNNAMED)
            if not (named or unnamed) or not _is_mine(folder):
                continue
            with contextlib.suppress(OSError):  # in use, or already removed
                lock = _open_locked(folder)
                try:
                    if named:
                        _remove(folder)
                        removed.append(folder)
                    else:  # a folder without its final name is empty
                        folder.rmdir()
                finally:
                    os.close(lock)
    return removed


def record_segments(folder: Path, segments: Segments) -> None:
    """Record in a folder which shared-memory segments to remove with it."""
    replace_file(folder / SEGMENTS, json.dumps(segments).encode(), durable=False)


def recorded_segments(folder: Path) -> Segments:
    """Return the segments that are recorded in a folder; none where there is no record, or one that cannot be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        return {str(name): int(inode) for name, inode in json.loads((folder / SEGMENTS).read_text()).items()}
    return {}


def list_segments() -> list[str]:
    """Return the names of all files in /dev/shm, sorted. A semaphore or a segment that is renamed changes the list."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(SHARED_MEMORY))
    return []


def mapped_segments(pids: Iterable[int]) -> Segments:
    """Return the shared-memory files that the processes map, except those in our own private folders, which have owners.

    They are matched by inode, because a semaphore is mapped under the name that it had before its final one.
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
    """Unlink the segments that still have the recorded inode and belong to this user."""
    for name, inode in segments.items():
        path = SHARED_MEMORY / Path(name).name
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_ino == inode and status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
                path.unlink()


def _remove(folder: Path) -> None:
    remove_segments(recorded_segments(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _is_mine(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _open_locked(folder: Path) -> int:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def make_private_folder(purpose: str, longest: int | None = None) -> PrivateFolder:
    """Create an empty folder of mode 0700 in the system's folder for temporary files (TMPDIR)."""
    parent = Path(tempfile.gettempdir())
    where, wanted = f"TMPDIR={parent}", "writable"
    if longest is not None and len(os.fsencode(parent / new_name(purpose))) > longest:
        where, wanted = f"{SHORT} (TMPDIR={parent} is too long for sockets)", "writable and has a shorter path"
        parent = SHORT
    try:
        held = parent.stat()
        replaceable = held.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not held.st_mode & stat.S_ISVTX
        if replaceable or held.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{where}: other users can replace what this run creates there; set TMPDIR to a folder of your "
                "own, or set the folder's sticky bit (chmod +t)"
            )
        return PrivateFolder.create(purpose, parent)
    except OSError as e:
        raise ConfigError(f"{where}: cannot create a folder there ({e}); set TMPDIR to a folder that is {wanted}") from None


def check_private(folder: Path) -> None:
    """Raise ConfigError unless `folder` is a folder of this user that nobody else can enter."""
    try:
        status = folder.lstat()
    except OSError as e:
        raise ConfigError(f"{folder}: the private folder of this run is gone ({e.strerror})") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: expected a folder of user {os.geteuid()} with mode 0700, found mode "
            f"{stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}; what lies in it is not trusted"
        )
