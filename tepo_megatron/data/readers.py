"""Read the rows of JSON-lines files, and define the `RowReader` interface that every kind of dataset implements."""

import bisect
import glob
import gzip
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, cast

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.foreign_files import SNIFFED_BYTES, foreign_kind

Row = dict[str, Any]
_GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
LINE_BYTES = 256 * 2**20  # a limit, since a gzipped file of a megabyte can hold a line of a gigabyte


class RowReader(Protocol):
    """Rows of a dataset, which `rows` may go through several times.

    Attributes:
        read: Number of rows that the current or last pass of `rows` has gone through.
        repeats: Number of these that it skipped as copies.
    """

    read: int
    repeats: int

    def rows(self, keys: Collection[str], passing_repeats: bool) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (place, row) in order; a row that cannot be read is yielded as its DataError.

        `place` is unique, ascending and counted from 0 over all files.

        Args:
            passing_repeats: Rows that are recognized as byte-identical copies of an earlier row may be skipped.
        """

    def whole(self, place: int) -> Row:
        """Return all columns of the row that `rows` yielded last; `place` must be its place."""

    def where(self, place: int) -> str:
        """Return how error messages name the row: its file, and its number counted from 1."""


class JsonLines:
    """Reads files of one JSON object per line, UTF-8, gzipped or not. Blank lines are skipped but count as places."""

    def __init__(self, files: list[Path]) -> None:
        self.read = self.repeats = 0
        self._files = files
        self._starts = [0]  # place of each file's first line, for the files read so far
        self._last: Row = {}

    def rows(self, keys: Collection[str], passing_repeats: bool) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (place, row); see `RowReader.rows`.

        Args:
            passing_repeats: Skip lines that are byte-identical to an earlier valid line, and count them in `repeats`.
        """
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
        """Return the row that `rows` yielded last; `place` is ignored."""
        return self._last

    def where(self, place: int) -> str:
        """Return "FILE:LINE", the line counted from 1."""
        return where(self._files, self._starts, place, ":")


def files_of(path: str) -> list[Path]:
    """Return the file, or the sorted files that match the pattern (`*`, `?`, `[...]`, `**`). Raise DataError for no match."""
    if Path(path).exists():
        return [Path(path)]
    files = sorted(map(Path, glob.glob(path, recursive=True)))
    if not files:
        raise DataError(
            f"{path}: cannot read the dataset (No such file or directory); give the path of a JSON-lines or parquet file, or a "
            "dataset of Hugging Face as ORG/NAME"
        )
    return files


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of the file, which tell its format. Raise DataError if it cannot be read, or is no dataset."""
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED_BYTES)
    except OSError as e:
        raise unreadable(path, e) from None
    _refuse_foreign(path, start)
    return start


def _refuse_foreign(path: Path, start: bytes, where: str = "is") -> None:
    if (kind := foreign_kind(start)) is not None:
        raise DataError(f"{path}: {where} {kind}")


def where(names: list[Path], starts: list[int], place: int, between: str) -> str:
    """Return the file and row of a place, for messages."""
    at = bisect.bisect_right(starts, place) - 1
    return f"{names[at]}{between}{place - starts[at] + 1}"


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the DataError for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{path}: cannot read the dataset ({reason}); give the path of a JSON-lines or parquet file")


def _lines(path: Path) -> Iterator[bytes]:
    is_gzip = first_bytes(path).startswith(_GZIP)
    try:
        if is_gzip:
            with gzip.open(path) as unzipped:
                inner = unzipped.read(SNIFFED_BYTES)
            _refuse_foreign(path, inner, "holds, gzipped, something that is")
            if inner.startswith((_GZIP, PARQUET)):
                raise DataError(f"{path}: is gzipped, and holds a gzip or parquet file; unpack it (`gunzip`)")
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            while line := cast(IO[bytes], file).readline(LINE_BYTES + 1):
                if len(line) > LINE_BYTES:
                    raise DataError(f"{path}: a line is longer than {LINE_BYTES // 2**20} MiB; each must hold one JSON object")
                yield line
    except (OSError, EOFError, zlib.error) as e:
        raise unreadable(path, e) from e


def _parse(line: bytes, first: bool) -> Row:
    """Return the JSON object of a line. Raise DataError otherwise; for a file's first line, say how to split an array."""
    hint = ""
    if first and line.lstrip(b"\xef\xbb\xbf \t")[:1] == b"[":
        hint = "; the file is a JSON array, of which `jq -c '.[]' FILE` makes lines"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:  # malformed JSON, bytes that are not UTF-8, or nesting without end
        raise DataError(f"not valid JSON ({e}); each line must hold one JSON object{hint}") from None
    if not isinstance(row, dict):
        raise DataError(f"each line must hold one JSON object, not {describe_value(row)}{hint}")
    return row


def describe_value(value: Any) -> str:
    """Return a description of a value for messages: the JSON name of its type, and its first 60 characters."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    text = json.dumps(value, default=repr)
    default = "a number" if isinstance(value, (int, float)) else type(value).__name__
    return f"{names.get(type(value), default)}: {text if len(text) <= 60 else text[:57] + '...'}"
