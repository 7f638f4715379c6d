"""A directory that appears complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tepo_megatron.errors import CheckpointError, TepoError
from tepo_megatron.weights import hf_io


@contextlib.contextmanager
def new_directory(out: Path, expected_bytes: int) -> Iterator[Path]:
    """A directory `out.partial` to fill, renamed to `out` (after a sync to disk) when the block ends without an exception.

    What an earlier, killed run left in `out.partial` is replaced; after an exception nothing is left. Raises CheckpointError
    when `out` exists, when the file system lacks `expected_bytes`, when another process fills `out.partial` at this moment,
    or for an OSError of the block (a full disk).
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
    """Raise CheckpointError when the file system of `directory` has fewer than `wanted` bytes free; then remove it."""
    if shutil.disk_usage(directory).free < wanted:
        free = _free(directory)
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(
            f"{directory}: {wanted / 2**30:.2f} GiB are needed, {free}; free some space, or give another --out"
        )


@contextlib.contextmanager
def _own(partial: Path) -> Iterator[None]:
    """An empty directory that no other conversion takes for abandoned: locked while this process lives."""
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
            pass  # a file system without locks
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    finally:
        os.close(handle)


def _free(directory: Path) -> str:
    return f"{shutil.disk_usage(directory).free / 2**30:.2f} GiB are free"
