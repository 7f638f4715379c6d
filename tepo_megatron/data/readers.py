"""The rows of JSON-lines files, and what every kind of dataset offers its reader."""

from __future__ import annotations

import bisect
import glob
import gzip
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, cast

from tepo_megatron.errors import DataError

Row = dict[str, Any]
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
LINE_BYTES = 256 * 2**20  # a gzipped file of a megabyte can hold a line of a gigabyte


class Reader(Protocol):
    """The rows of a dataset. read: how many rows `rows` went through so far; repeats: how many of them it passed over."""

    read: int
    repeats: int

    def rows(self, keys: Collection[str], passing_repeats: bool) -> Iterator[tuple[int, Row | DataError]]:
        """(place, row) in order, the row with at least what the keys name, where it has that.

        place: unique, ascending, counted from 0 over all files; a row that cannot be read is its error. passing_repeats: a row
        that is known at a glance to be the copy of an earlier one may be left out.
        """
        ...

    def whole(self, place: int) -> Row:
        """All of the row that `rows` yielded last."""
        ...

    def where(self, place: int) -> str:
        """How errors call the row."""
        ...


class JsonLines:
    """Files of one JSON object per line, UTF-8, gzipped or not; blank lines are passed over, and counted as places."""

    def __init__(self, files: list[Path]) -> None:
        self.read = self.repeats = 0
        self._files = files
        self._starts = [0]  # place of each file's first line, once it is known
        self._last: Row = {}

    def rows(self, keys: Collection[str], passing_repeats: bool) -> Iterator[tuple[int, Row | DataError]]:
        self.read, self.repeats, self._starts = 0, 0, []
        known: set[bytes] = set()
        lines = 0
        for path in self._files:
            self._starts.append(lines)
            for line in _lines(path):
                place, lines = lines, lines + 1
                if not line.strip():
                    continue
                self.read += 1
                digest = hashlib.blake2b(line, digest_size=16).digest() if passing_repeats else b""
                if digest in known:
                    self.repeats += 1
                    continue
                try:
                    row = self._last = _parse(line, first=place == self._starts[-1])
                except DataError as e:
                    yield place, DataError(f"{self.where(place)}: {e}")
                    continue
                if passing_repeats:
                    known.add(digest)
                yield place, row

    def whole(self, place: int) -> Row:
        return self._last

    def where(self, place: int) -> str:
        return where(self._files, self._starts, place, ":")


def files_of(path: str) -> list[Path]:
    """The file, or those that `*`, `?` and `[...]` stand for, sorted. Raises DataError where there is none."""
    if Path(path).exists():
        return [Path(path)]
    found = sorted(map(Path, glob.glob(path, recursive=True)))
    if not found:
        raise DataError(
            f"{path}: cannot read the dataset (No such file or directory); give the path of a JSON-lines or parquet file, or a "
            "dataset of Hugging Face as ORG/NAME"
        )
    return found


def first_bytes(path: Path) -> bytes:
    """Enough of the file to know its format. Raises DataError."""
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as e:
        raise unreadable(path, e) from None


def where(names: list[Path], starts: list[int], place: int, between: str) -> str:
    """The file and the row counted from 1."""
    at = bisect.bisect_right(starts, place) - 1
    return f"{names[at]}{between}{place - starts[at] + 1}"


def unreadable(path: Path, error: Exception) -> DataError:
    """What the system, or gzip, said of a file."""
    said = getattr(error, "strerror", None) or error
    return DataError(f"{path}: cannot read the dataset ({said}); give the path of a JSON-lines or parquet file")


def _lines(path: Path) -> Iterator[bytes]:
    start = first_bytes(path)
    if start.startswith(_UTF16):
        raise DataError(f"{path}: is encoded in UTF-16; convert it (`iconv -f UTF-16 -t UTF-8`)")
    try:
        with gzip.open(path) if start.startswith(_GZIP) else path.open("rb") as file:
            while line := cast(IO[bytes], file).readline(LINE_BYTES + 1):
                if len(line) > LINE_BYTES:
                    raise DataError(
                        f"{path}: a line is longer than {LINE_BYTES / 2**20:.0f} MiB; each must hold one JSON object"
                    )
                yield line
    except (OSError, EOFError, zlib.error) as e:
        raise unreadable(path, e) from e


def _parse(line: bytes, first: bool) -> Row:
    """Raises DataError. first: of its file, where an array may start."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:  # malformed JSON, bytes that are not UTF-8, or nesting without end
        mend = "; `jq -c '.[]' FILE` makes lines of an array" if first and line.lstrip()[:1] == b"[" else ""
        raise DataError(f"not valid JSON ({e}); each line must hold one JSON object{mend}") from None
    if not isinstance(row, dict):
        raise DataError(f"each line must hold one JSON object, not {kind(row)}")
    return row


def kind(value: Any) -> str:
    """What JSON calls the value's type, with a short look at it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    text = json.dumps(value, default=repr)
    default = "a number" if isinstance(value, (int, float)) else type(value).__name__
    return f"{names.get(type(value), default)}: {text if len(text) <= 60 else text[:57] + '...'}"
