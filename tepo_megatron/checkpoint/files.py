"""Write files with checksums, sync them to disk, and check the files of a checkpoint against its manifest."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tepo_megatron.base.errors import CheckpointError

MANIFEST = "manifest.txt"
_CHUNK = 1 << 22  # bytes; large enough for zlib and the kernel, small enough not to hold up other threads


@dataclass(frozen=True)
class FileChecksum:
    """The size of a file in bytes and the CRC-32 of its content."""

    size: int
    crc32: int


class ChecksummedFile:
    """A new file that is written from start to end while its checksum is computed.

    When the `with` block ends, the file is synced to disk and `sum` describes it. The checksum covers the bytes that were
    passed to `write`, so comparing it with the file later also reveals errors on the way to the disk.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._size = self._crc = 0
        self._failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return their number, as a binary file does. Raises OSError."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            self._crc = zlib.crc32(part, self._crc)
            try:
                self._file.write(part)
            except OSError as e:
                self._failure = e
                raise
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: leaving the `with` block flushes the file."""

    @property
    def sum(self) -> FileChecksum:
        """Return the size and checksum of what was written so far."""
        return FileChecksum(self._size, self._crc)

    def __enter__(self) -> "ChecksummedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        with self._file:
            if self._failure is not None:  # torch.save replaces it by an error that does not name the cause
                raise self._failure from None
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def write(path: Path, data: bytes) -> FileChecksum:
    """Write a new file and sync it to disk."""
    with ChecksummedFile(path) as f:
        f.write(data)
    return f.sum


def read_sum(path: Path) -> FileChecksum:
    """Read a file once and return its size and checksum. Raises OSError."""
    size = crc = 0
    with path.open("rb", buffering=0) as f:
        while chunk := f.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileChecksum(size, crc)


def write_manifest(folder: Path, sums: Mapping[str, FileChecksum]) -> None:
    """Write the manifest, which is the last file of a checkpoint. It lists all other files and ends with its own checksum."""
    text = json.dumps({name: asdict(sums[name]) for name in sorted(sums)}, indent=1) + "\n"
    write(folder / MANIFEST, text.encode() + _seal(text.encode()))


def read_manifest(folder: Path) -> dict[str, FileChecksum]:
    """Return size and checksum of each file of a checkpoint, by its path in the folder."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    head, tail = data[: -len(_seal(b""))], data[-len(_seal(b"")) :]
    if tail != _seal(head):
        raise CheckpointError(f"{path}: not as it was written (its own checksum differs)")
    return {name: FileChecksum(**value) for name, value in json.loads(head).items()}


def check(folder: Path, sums: Mapping[str, FileChecksum], names: Iterable[str]) -> list[str]:
    """Read the files `names` once each and return one message for each that is damaged."""
    wrong = []
    for name in names:
        path, expected = folder / name, sums[name]
        try:
            size = path.stat().st_size
            if size != expected.size:
                wrong.append(f"{path}: {size} bytes, not {expected.size}")
            elif (actual := read_sum(path)) != expected:
                wrong.append(f"{path}: not as it was written (CRC-32 {actual.crc32:08x}, not {expected.crc32:08x})")
        except OSError as e:
            wrong.append(f"{path}: cannot be read ({e.strerror})")
    return wrong


def shares(sums: Mapping[str, FileChecksum], ranks: int) -> list[list[str]]:
    """Split the files among readers, with about the same number of bytes for each."""
    dealt: list[tuple[int, list[str]]] = [(0, []) for _ in range(ranks)]
    for name in sorted(sums, key=lambda n: (-sums[n].size, n)):
        least = min(range(ranks), key=lambda r: dealt[r][0])
        size, names = dealt[least]
        dealt[least] = (size + sums[name].size, [*names, name])
    return [names for _, names in dealt]


def files_below(folder: Path) -> Sequence[str]:
    """Return the paths of all files below `folder`, relative to it, sorted."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _seal(data: bytes) -> bytes:
    return f"CRC-32 of the above: {zlib.crc32(data):08x}\n".encode()
