"""Write to disks: explain their errors (which file, why, and how to fix it), and replace files atomically.

A file is replaced in four steps: write a temporary file, sync it, rename it, sync the folder.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tepo_megatron.base.errors import StorageError, TepoError

# errors of the disk, not of the program -> meaning and fix
_MEANINGS = {
    errno.ENOSPC: ("the disk is full", "free some space there"),
    errno.EDQUOT: ("the quota of this user is used up", "free some space there, or have the quota raised"),
    errno.EROFS: (
        "its file system is read-only, which the kernel makes it after an error of the disk",
        "see `dmesg`, and mount it for writing again",
    ),
    errno.EIO: ("the disk failed", "see `dmesg`, and repair or replace the disk"),
    errno.ESTALE: ("its file server has lost it", "mount the file system again"),
    errno.ENOTCONN: ("its file server is gone", "mount the file system again"),
    errno.EACCES: ("it may not be written", "give this user the right to write there"),
    errno.EPERM: ("it may not be written", "give this user the right to write there"),
}
# errors that only writing raises
_OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_IN_TEXT = re.compile(r"\(os error (\d+)\)")  # safetensors errors have no errno


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk error inside the block into a StorageError that names the file, the reason and the fix."""
    try:
        yield
    except TepoError:
        raise
    except Exception as e:
        if (fault := disk_fault(e, path)) is None:
            raise
        raise StorageError(fault) from None


def disk_fault(error: BaseException, path: Path, written: bool = True) -> str | None:
    """Return the message for a disk error; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _IN_TEXT.search(str(error))):
        number = int(match[1])
    if number is None or number not in (_MEANINGS if written else _OF_WRITING):
        return None
    if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
        path = Path(os.fspath(error.filename))
    meaning, fix = _MEANINGS[number]
    free = _free(path) if number in (errno.ENOSPC, errno.EDQUOT) else ""
    return (
        f"{path}: cannot be written: {meaning} ({os.strerror(number)}{free}); {fix}, then start again (tepo resume goes on "
        "from the last checkpoint)"
    )


def _free(path: Path) -> str:
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f", {shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    return ""


PARTIAL = ".partial"  # added to the name of a file or folder while it is written


def partial_of(path: Path) -> Path:
    """Return the temporary name under which `path` is written. It is on the same file system."""
    return path.with_name(path.name + PARTIAL)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write; when the block ends without an exception, the file takes the place of `path`.

    Other processes see the old file or all of the new one, never a part. After an exception the temporary file stays; the next
    write overwrites it. `temporary`: the temporary path, in the same folder; None: `partial_of(path)`.
    """
    unfinished = partial_of(path) if temporary is None else temporary
    yield unfinished
    if durable:
        sync(unfinished)
    os.replace(unfinished, path)
    if durable:
        with contextlib.suppress(OSError):  # some file systems cannot sync folders
            sync(path.parent)


def replace_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file atomically. See `replacing`."""
    with replacing(path, durable) as unfinished:
        unfinished.write_bytes(data)


def sync(path: Path) -> None:
    """Sync a file's data, or a folder's entries (new files, new names), to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
