"""The heartbeats of the ranks of one machine: one small file per key in the run's private folder.

A `FileStore` would not do: it appends each `set` for ever, and every rank reads all of it (136 bytes a second and rank, torch
2.13).
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

_BYTES = 1024  # of a file: a set of fewer takes no more space, so that a full disk does not stop the heart
_ATTEMPTS = 100


class HeartbeatFolder:
    """`check`, `get`, `set` and `compare_set` of a torch `Store`, in files of a folder that exists.

    Nothing waits for another process, so a frozen one holds nobody up. Errors of the file system are RuntimeErrors, as those
    of a store are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Return a key's value. Raises RuntimeError where it is missing or damaged."""
        with _as_runtime_error():
            for _ in range(_ATTEMPTS):
                checksum, _, value = self._path(key).read_bytes().rstrip(b" ").partition(b" ")
                if checksum == _checksum(value):
                    return value
                time.sleep(0.001)  # read while it was written
        raise RuntimeError(f"{self._path(key)}: damaged")

    def set(self, key: str, value: str) -> None:
        """Replace a key's value. Only one process sets a given key."""
        with _as_runtime_error():
            file = os.open(self._path(key), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, os.pwrite(file, _record(value), 0))
            finally:
                os.close(file)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that is not there; return what it has then. Only expected="" is supported."""
        assert expected == "", "a heartbeat is never exchanged for another"
        with _as_runtime_error():
            own = self._folder / f".{os.getpid()}"
            own.write_bytes(_record(value))
            with contextlib.suppress(FileExistsError):
                os.link(own, self._path(key))  # whole, and the first alone
            own.unlink()
        return self.get(key)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


def _record(value: str) -> bytes:
    data = value.rstrip(" ").encode()
    return (_checksum(data) + b" " + data).ljust(_BYTES)


def _checksum(data: bytes) -> bytes:
    return b"%08x" % zlib.crc32(data)


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise RuntimeError(str(e)) from None
