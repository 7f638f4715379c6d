"""Explain disk errors: which file could not be written, why, and how to fix it."""

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
