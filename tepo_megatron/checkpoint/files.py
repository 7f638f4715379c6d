"""Files of a checkpoint: summed while they are written, on disk when they are closed, and checked against a manifest."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tepo_megatron.errors import CheckpointError

MANIFEST = "manifest.txt"
_CHUNK = 1 << 22  # bytes; large enough for zlib and the kernel, small enough for the other threads


@dataclass(frozen=True)
class FileSum:
    """Bytes of a file and their CRC-32."""

    size: int
    crc32: int


class SummedFile:
    """A new file for writing, in one go from start to end. On leaving the `with` block it is on disk, and `sum` says what is.

    The sum is that of the bytes handed over, so it also tells of what went wrong between here and the disk.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._size = self._crc = 0
        self._failure: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """As of a binary file. Raises OSError."""
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
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing: all is written on leaving."""

    @property
    def sum(self) -> FileSum:
        """Of what was written so far."""
        return FileSum(self._size, self._crc)

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        with self._file:
            if self._failure is not None:  # torch.save replaces it by an error of its own, which does not say why
                raise self._failure from None
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def write(path: Path, data: bytes) -> FileSum:
    """A new file with these bytes, on disk. Raises OSError."""
    with SummedFile(path) as f:
        f.write(data)
    return f.sum


def read_sum(path: Path) -> FileSum:
    """Of a file that is there, read once. Raises OSError."""
    size = crc = 0
    with path.open("rb", buffering=0) as f:
        while chunk := f.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileSum(size, crc)


def sync_folder(path: Path) -> None:
    """The folder's entries (new files, new names) are on disk. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_manifest(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """The last file of a checkpoint: all others, by their path in it, and behind them the sum of the manifest itself."""
    text = json.dumps({name: asdict(sums[name]) for name in sorted(sums)}, indent=1) + "\n"
    write(folder / MANIFEST, text.encode() + _seal(text.encode()))


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """Raises CheckpointError for one that is missing or not as it was written."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from None
    head, tail = data[: -len(_seal(b""))], data[-len(_seal(b"")) :]
    if tail != _seal(head):
        raise CheckpointError(f"{path}: not as it was written (its own checksum differs)")
    return {name: FileSum(**value) for name, value in json.loads(head).items()}


def check(folder: Path, sums: Mapping[str, FileSum], names: Iterable[str]) -> list[str]:
    """What is wrong with the files `names`, in words; each is read once. Empty: nothing."""
    wrong = []
    for name in names:
        path, expected = folder / name, sums[name]
        try:
            size = path.stat().st_size
            if size != expected.size:
                wrong.append(f"{path}: {size} bytes, not {expected.size}")
            elif (found := read_sum(path)) != expected:
                wrong.append(f"{path}: not as it was written (CRC-32 {found.crc32:08x}, not {expected.crc32:08x})")
        except OSError as e:
            wrong.append(f"{path}: cannot be read ({e.strerror})")
    return wrong


def shares(sums: Mapping[str, FileSum], ranks: int) -> list[list[str]]:
    """The files, dealt out to `ranks` readers of about as many bytes each; the same wherever it is computed."""
    dealt: list[tuple[int, list[str]]] = [(0, []) for _ in range(ranks)]
    for name in sorted(sums, key=lambda n: (-sums[n].size, n)):
        least = min(range(ranks), key=lambda r: dealt[r][0])
        size, names = dealt[least]
        dealt[least] = (size + sums[name].size, [*names, name])
    return [names for _, names in dealt]


def files_below(folder: Path) -> Sequence[str]:
    """Paths of all files below `folder`, relative to it."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _seal(data: bytes) -> bytes:
    return f"CRC-32 of the above: {zlib.crc32(data):08x}\n".encode()
