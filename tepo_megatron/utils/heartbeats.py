"""A key-value store for the heartbeats of one machine's ranks: one small file per key in the run's private folder.

A torch `FileStore` does not fit: it appends every `set` for ever, and every rank reads all of it (136 bytes per second and
rank, torch 2.13).
"""

import contextlib
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

_BYTES = 1024  # minimum size of a file; rewriting it takes no new space, so that a full disk does not stop the heartbeats
_ATTEMPTS = 100


class HeartbeatFolder:
    """The methods `check`, `get`, `set` and `compare_set` of a torch `Store`, on files in an existing folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Return the value of a key. Raise RuntimeError if it is missing or damaged."""
        with _as_runtime_error():
            for _ in range(_ATTEMPTS):
                checksum, _, value = self._path(key).read_bytes().rstrip(b" ").partition(b" ")
                if checksum == _checksum(value):
                    return value
                time.sleep(0.001)  # it was read during a write
        raise RuntimeError(f"{self._path(key)}: damaged")

    def set(self, key: str, value: str) -> None:
        """Replace the value of a key. Only one process may set a given key."""
        with _as_runtime_error():
            file = os.open(self._path(key), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.ftruncate(file, os.pwrite(file, _record(value), 0))
            finally:
                os.close(file)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key if it does not exist yet. Returns the value that the key has afterwards."""
        assert expected == "", "a heartbeat is never exchanged for another"
        with _as_runtime_error():
            own = self._folder / f".{os.getpid()}"
            own.write_bytes(_record(value))
            with contextlib.suppress(FileExistsError):
                os.link(own, self._path(key))  # the key appears with its full value, and only the first process succeeds
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
