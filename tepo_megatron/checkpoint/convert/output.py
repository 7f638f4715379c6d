"""Create an output directory that appears complete or not at all."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tepo_megatron.base.errors import CheckpointError, TepoError
from tepo_megatron.models import hf_io


@contextlib.contextmanager
def new_directory(out: Path, expected_bytes: int) -> Iterator[Path]:
    """Yield a directory `out.partial` to fill. When the block ends without an exception, sync it to disk and rename it to
    `out`.

    What an earlier, killed run left in `out.partial` is replaced. After an exception nothing is left.

    Args:
        expected_bytes: bytes that will be written.
    Raises:
        CheckpointError: `out` exists, its file system has fewer than `expected_bytes` free, another process is filling
            `out.partial`, or the block raises OSError (a full disk).
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: exists already; remove it, or give another --out")
    partial = out.with_name(out.name + ".partial")
    with _own(partial):
        check_space(partial, expected_bytes)
        try:
            yield partial
            hf_io.publish(partial, out)
        except BaseException as e:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(e, OSError) and not isinstance(e, TepoError):
                raise CheckpointError(f"{out}: cannot be written ({e}); {_free(out.parent)} there") from None
            raise


def check_space(directory: Path, wanted: int) -> None:
    """Raise CheckpointError, and remove the directory, when its file system lacks the space.

    Args:
        wanted: bytes that will be written.
    """
    if shutil.disk_usage(directory).free < wanted:
        free = _free(directory)
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(
            f"{directory}: {wanted / 2**30:.2f} GiB are needed, {free}; free some space, or give another --out"
        )


@contextlib.contextmanager
def _own(partial: Path) -> Iterator[None]:
    """Create an empty directory, locked within the block, so that no other conversion takes it for abandoned.

    The lock ends with the process at the latest.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise CheckpointError(f"{partial}: cannot be made ({e}); give another --out") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{partial}: another conversion writes it; wait for it, or give another --out") from None
        except OSError:
            pass  # the file system has no locks
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    finally:
        os.close(handle)


def _free(directory: Path) -> str:
    return f"{shutil.disk_usage(directory).free / 2**30:.2f} GiB are free"
