"""A file that is on the disk when it is closed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Bytes after which the kernel is told to start writing to the disk: left to itself it would start when the file is synced, at
# the end, and the disk would have been idle until then.
_START_BYTES = 32 * 2**20
# Bytes of one write. Larger ones make the page cache ask for large pages, which took up to five times as long where the host
# of a virtual machine takes back free ones (Linux 6.18, ext4).
_WRITE_BYTES = 256 * 2**10
_SYNC_FILE_RANGE_WRITE = 2


class Sink:
    """A new file, written at its end (as file objects are) or at given offsets, without a buffer of its own.

    Raises OSError from any call when the disk is full or fails, at the latest from `close`. failure: that error, for callers of
    torch.save, which makes a RuntimeError of it that says nothing.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = self._held_back = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append; returns the number of bytes, all of them."""
        view = memoryview(data).cast("B")
        self.write_at(view, self._end)
        self._end += view.nbytes
        return view.nbytes

    def write_at(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, wherever the end is."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            try:
                count = os.pwrite(self._descriptor, view[done : done + _WRITE_BYTES], offset + done)
            except OSError as e:
                self.failure = e
                raise
            done += count
            self._held_back += count
            if self._held_back >= _START_BYTES:
                _start_writeback(self._descriptor)
                self._held_back = 0

    def tell(self) -> int:
        """The end of what was appended, in bytes."""
        return self._end

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self, sync: bool = True) -> None:
        """Sync to disk (unless told otherwise) and close; again: nothing."""
        if self._descriptor < 0:
            return
        try:
            if sync:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


def _start_writeback(descriptor: int) -> None:
    """Send what is written to the disk without waiting for it. Where there is no such call (Linux has it), nothing."""
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None:
        start(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)  # 0, 0: the whole file
