"""Write a file that is synced to disk when it is closed."""

import ctypes
import os
from pathlib import Path

# After this many bytes the kernel is asked to start writing to the disk. Otherwise it would start when the file is synced, at
# the end, and the disk would be idle until then.
_START_BYTES = 32 * 2**20
# Bytes of one write. Larger writes make the page cache allocate large pages, which took up to five times as long in a virtual
# machine whose host reclaims free pages (Linux 6.18, ext4).
_WRITE_BYTES = 256 * 2**10
_SYNC_FILE_RANGE_WRITE = 2


class Sink:
    """A new file without a buffer of its own, which is written at its end (like a file object) or at given offsets.

    Any call raises OSError when the disk is full or fails; `close` does at the latest.

    Attributes:
        failure: that error, for callers of torch.save, which replaces it by a RuntimeError that does not name the cause.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = self._held_back = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return their number."""
        view = memoryview(data).cast("B")
        self.write_at(view, self._end)
        self._end += view.nbytes
        return view.nbytes

    def write_at(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at a given place, independently of the end of the file.

        Args:
            data: the bytes.
            offset: where to write them, in bytes from the beginning of the file.
        """
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
        """Return the number of bytes appended so far."""
        return self._end

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self, sync: bool = True) -> None:
        """Sync to disk, unless `sync` is false, and close. A second call does nothing."""
        if self._descriptor < 0:
            return
        try:
            if sync:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


def _start_writeback(descriptor: int) -> None:
    """Ask the kernel to start writing to the disk, without waiting. Do nothing where the C library lacks sync_file_range
    (Linux).
    """
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None:
        start(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)  # 0, 0: the whole file
