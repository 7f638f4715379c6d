"""Replace files atomically: write a temporary file, sync it, rename it, sync the folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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
