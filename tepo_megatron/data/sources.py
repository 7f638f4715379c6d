"""Resolve what `data.train` and `data.eval` name: files, a dataset of Hugging Face or reasoning-gym, and a slice of rows."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import SLICE
from tepo_megatron.data import arrow
from tepo_megatron.data.readers import PARQUET, JsonLines, Row, RowReader, files_of, first_bytes
from tepo_megatron.rewards.grading.reasoning_gym import PREFIX, dataset

T = TypeVar("T")
# ORG/NAME[:CONFIG][:SPLIT]; a name with a file's extension is a file
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+){0,2}")
_FILE = re.compile(r"\.(jsonl?|ndjson|parquet|csv|txt|gz)$", re.IGNORECASE)


@dataclass(frozen=True)
class DatasetSource:
    """A dataset and a slice of its rows.

    Attributes:
        path: Path, glob pattern or Hugging Face name, without the slice.
        start: First row as written in the config: a percentage ("10%"), a row ("500"), or "" for none.
        stop: End of the slice (exclusive), written likewise.
    """

    path: str
    start: str = ""
    stop: str = ""

    @classmethod
    def of(cls, text: str) -> "DatasetSource":
        """Parse the text of a config."""
        match = SLICE.fullmatch(text)
        return cls(text) if match is None else cls(match["source"], match["start"] or "", match["stop"] or "")

    def slice(self, rows: Sequence[T]) -> list[T]:
        """Return the rows inside the slice. Percentages are of `len(rows)`, rounded down."""
        start = _place(self.start, len(rows)) if self.start else 0
        return list(rows[start : _place(self.stop, len(rows)) if self.stop else None])

    @property
    def is_on_hub(self) -> bool:
        """Return whether the path is the name of a Hugging Face dataset, and of nothing on this machine."""
        return bool(not Path(self.path).exists() and _HUB.fullmatch(self.path) and not _FILE.search(self.path))

    def reader(self) -> RowReader:
        """Return the reader for the rows. Raise DataError if nothing is there, or if JSON-lines and parquet files are mixed."""
        if self.path.startswith(PREFIX):
            return ReasoningGymRows(self.path)
        if self.is_on_hub or Path(self.path).is_dir() or Path(self.path.partition(":")[0]).is_dir():
            return arrow.hugging_face(self.path)
        files = files_of(self.path)
        of_parquet = [first_bytes(file).startswith(PARQUET) or file.suffix == ".parquet" for file in files]
        if len(set(of_parquet)) > 1:
            raise DataError(f"{self.path}: {files[0]} and {files[of_parquet.index(not of_parquet[0])]} are of two kinds")
        return arrow.parquet(files) if of_parquet[0] else JsonLines(files)


def check_readable(path: str) -> None:
    """Raise DataError if the first row of a dataset cannot be read. A dataset of the hub is not fetched."""
    place = DatasetSource.of(path)
    for _, row in islice(place.reader().rows((), passing_repeats=False), 1) if not place.is_on_hub else ():
        if isinstance(row, DataError):
            raise row


class ReasoningGymRows:
    """A `RowReader` of the items of a reasoning-gym dataset: question, answer, and the source and place for its verifier."""

    def __init__(self, source: str) -> None:
        """Raise DataError for what reasoning-gym does not know."""
        self.read = self.repeats = 0
        self._source = source
        self._last: Row = {}
        try:
            self._items = dataset(source)
        except ValueError as e:
            raise DataError(str(e)) from None

    def rows(self, keys: Collection[str], passing_repeats: bool) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (place, row) of every item; see `RowReader.rows`."""
        for place in range(len(self._items)):
            item, self.read = self._items[place], place + 1
            self._last = {
                "question": item["question"], "answer": str(item["answer"]), "source": self._source, "place": place
            }  # fmt: skip
            yield place, self._last

    def whole(self, place: int) -> Row:
        """Return the row that `rows` yielded last; `place` is ignored."""
        return self._last

    def where(self, place: int) -> str:
        """Return "SOURCE: item N", N counted from 0 as reasoning-gym counts."""
        return f"{self._source}: item {place}"


def _place(bound: str, count: int) -> int:
    """Return a bound of the slice as a row index; `count` is the number of rows."""
    return count * int(bound[:-1]) // 100 if bound.endswith("%") else int(bound)
