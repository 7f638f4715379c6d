"""Name, publish, lock and delete the checkpoints in a folder, and write and check the files of one with checksums.

    step-00000012            a complete checkpoint
    step-00000012.partial    a checkpoint that is being written, or that an interrupted save left
    step-00000012.deleted-*  being deleted; it is renamed first, so that a half-deleted one never looks complete
    step-00000012.abandoned  set aside: the run went back, and then saved a checkpoint of the same or an earlier step

Anything else in the folder is left alone. Each checkpoint has a manifest of its files and their checksums.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.base.storage import sync

_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(partial|deleted-\w+)")


def complete(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of a step."""
    return folder / f"step-{step:08d}"


def partial(folder: Path, step: int) -> Path:
    """Return the path at which the checkpoint of a step is written."""
    return folder / f"step-{step:08d}.partial"


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in ascending order; none for a missing folder. Raises OSError."""
    if not folder.exists():
        return []
    matches = (_COMPLETE.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def prepare(folder: Path, step: int) -> Path:
    """Create an empty folder in which to write the checkpoint of a step, and return its path."""
    if not folder.exists():
        folder.mkdir(parents=True)
        sync(folder.parent)
    target = partial(folder, step)
    if target.exists():
        _to_deleted(target)
    target.mkdir()
    return target


def publish(folder: Path, step: int) -> list[Path]:
    """Turn the partial folder of a step into its checkpoint: sync everything to disk, then rename.

    Returns:
        New paths of the complete checkpoints that were set aside. They are those of this step and of later ones, which the run
        abandoned by going back.
    """
    source, target = partial(folder, step), complete(folder, step)
    for inner in (source, *(path for path in source.rglob("*") if path.is_dir())):
        sync(inner)
    aside = [_set_aside(target)] if target.exists() else []
    source.rename(target)
    sync(folder)
    aside += [_set_aside(complete(folder, later)) for later in steps(folder) if later > step]
    sync(folder)
    return aside


def prune(folder: Path, keep_last: int, keep_every: int | None, best: int | None = None) -> None:
    """Delete the checkpoints that no retention rule keeps and that nobody holds (`hold`), and what `sweep` deletes.

    Args:
        keep_every: keep checkpoints whose step is a multiple of this too; None: no such rule.
        best: keep the checkpoint of this step too; None: no such rule.
    """
    for step in steps(folder)[:-keep_last]:
        if step != best and not (keep_every and step % keep_every == 0):
            with _alone(complete(folder, step)) as alone:
                if alone:
                    _to_deleted(complete(folder, step))
    sweep(folder)


def sweep(folder: Path, writing: int | None = None) -> None:
    """Delete what earlier saves and deletions left unfinished."""
    for path in folder.iterdir():
        if _LEFT_OVER.fullmatch(path.name) and (writing is None or path != partial(folder, writing)):
            shutil.rmtree(path if ".deleted-" in path.name else _to_deleted(path))


def finish_deletions(folder: Path) -> None:
    """Delete what a killed process had begun to delete: a run that is resumed after its last step saves nothing more."""
    for path in folder.glob("step-*.deleted-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Protect a checkpoint from `prune` within the block, if the file system supports locks."""
    with _opened(path) as folder:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        if not path.exists():  # renamed between opening and locking
            raise FileNotFoundError(2, os.strerror(2), str(path))
        yield


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Yield whether nobody holds `path`. If so, nobody can hold it within the block."""
    with _opened(path) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError as e:
            alone = not isinstance(e, BlockingIOError)  # any other error: the file system has no locks
        yield alone


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # closing it, or the end of the process, releases its lock
    try:
        yield folder
    finally:
        os.close(folder)


def _set_aside(path: Path) -> Path:
    target = path.with_name(f"{path.name}.abandoned")
    if target.exists():
        _to_deleted(target)
    return path.rename(target)


def _to_deleted(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name.partition('.')[0]}.deleted-{uuid.uuid4().hex}"))


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
