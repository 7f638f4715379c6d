"""Resolve what `data.train` and `data.eval` name: files, a dataset of Hugging Face or reasoning-gym, and a slice of rows.

Parquet files and datasets of Hugging Face are read through Arrow record batches.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import SLICE
from tepo_megatron.data import readers
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
            return hugging_face(self.path)
        files = files_of(self.path)
        of_parquet = [first_bytes(file).startswith(PARQUET) or file.suffix == ".parquet" for file in files]
        if len(set(of_parquet)) > 1:
            raise DataError(f"{self.path}: {files[0]} and {files[of_parquet.index(not of_parquet[0])]} are of two kinds")
        return parquet(files) if of_parquet[0] else JsonLines(files)


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


_BATCH_ROWS = 4096
_PARQUET_ROWS = 256  # in memory at once
_SHORT_FLOATS = {"float": np.float32, "halffloat": np.float16}


class ArrowRows:
    """A `RowReader` over Arrow record batches, one file after the other. It never skips copied rows, so `repeats` stays 0."""

    def __init__(self, names: list[Path], open_: Callable[[Path], Iterable[Any]]) -> None:
        """Store what to read; nothing is opened yet."""
        self.read = self.repeats = 0
        self._names, self._open = names, open_
        self._starts = [0]
        self._batch: Any = None
        self._batch_start = 0

    def rows(self, keys: Collection[str], passing_repeats: bool) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (place, row) of every row; see `RowReader.rows`."""
        self.read, self._starts, self._batch_start = 0, [], 0
        for name in self._names:
            self._starts.append(self.read)
            for batch in self._open(name):
                self._batch, self._batch_start = batch, self.read
                columns = [c for c in batch.schema.names if any(key == c or key.startswith(f"{c}.") for key in keys)]
                for row in _rows(batch.select(columns)) if columns else [{}] * batch.num_rows:
                    self.read += 1
                    yield self.read - 1, row

    def whole(self, place: int) -> Row:
        """Return all columns of the row that `rows` yielded last; `place` must be its place."""
        (row,) = _rows(self._batch.slice(place - self._batch_start, 1))
        return row

    def where(self, place: int) -> str:
        """Return "FILE: row N" of a row, N counted from 1 in its file."""
        return readers.where(self._names, self._starts, place, ": row ")


def _rows(batch: Any) -> list[Row]:
    """Return the rows of a record batch."""
    import pyarrow

    struct = pyarrow.struct(batch.schema)
    rows = batch.to_pylist()
    return [_shortest(row, struct) for row in rows] if _has_short_floats(struct) else rows


def _has_short_floats(kind: Any) -> bool:
    return str(kind) in _SHORT_FLOATS or any(_has_short_floats(kind.field(i).type) for i in range(kind.num_fields))


def _shortest(value: Any, kind: Any) -> Any:
    """Return a value with the shortest decimals of its type: 0.1 of a float32, which is 0.10000000149011612 as a float64."""
    if value is None:
        return None
    if str(kind) in _SHORT_FLOATS:
        return float(str(_SHORT_FLOATS[str(kind)](value)))
    if isinstance(value, dict):
        return {name: _shortest(inner, kind.field(name).type) for name, inner in value.items()}
    if isinstance(value, list) and kind.num_fields == 1:
        return [_shortest(inner, kind.field(0).type) for inner in value]
    return value


def parquet(files: list[Path]) -> ArrowRows:
    """Return a reader of parquet files. Files are opened when the rows are read.

    Raises:
        DataError: pyarrow is not installed. Reading the rows raises it for a file that pyarrow cannot read.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{files[0]}: parquet needs the package pyarrow; install it, or give the dataset as JSON lines"
        ) from None

    def batches(path: Path) -> Iterator[Any]:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_PARQUET_ROWS)
        except (pyarrow.ArrowException, OSError) as e:
            raise DataError(f"{path}: not a parquet file that can be read ({e}); download or write it again") from None

    return ArrowRows(files, batches)


def hugging_face(source: str) -> ArrowRows:
    """Return a reader of a Hugging Face dataset. The `datasets` library downloads the dataset unless it is in the cache.

    Raises:
        DataError: The `datasets` package is missing, the split is ambiguous or unknown, or the library fails. The message says
            what the library reported and how to fix it.
    """
    name, _, rest = source.partition(":")
    config, _, split = rest.rpartition(":")
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source}: datasets of Hugging Face need the package datasets; install tepo-megatron[datasets], or fetch the "
            f"files (`hf download --repo-type dataset {name} --local-dir DIR`) and give their path (DIR/*.parquet)"
        ) from None
    try:
        splits = datasets.get_dataset_split_names(name, config or None)
        chosen = split or ("train" if "train" in splits else splits[0])
        if chosen not in splits or (not split and chosen != "train" and len(splits) > 1):
            raise DataError(f"{source}: choose one of its splits, as in {name}:{splits[0]} (there are {', '.join(splits)})")
        table = datasets.load_dataset(name, config or None, split=chosen).with_format("arrow")
    except DataError:
        raise
    except Exception as e:  # the library passes on whatever its many back ends raise
        words = " ".join(str(e).split())[:300]
        raise DataError(
            f"{source}: no such file, and as a dataset of Hugging Face, which is ORG/NAME[:CONFIG][:SPLIT], it cannot be "
            f"loaded ({type(e).__name__}: {words})"
        ) from None

    def batches(_: Path) -> Iterator[Any]:
        for part in table.iter(batch_size=_BATCH_ROWS):
            yield from part.to_batches()

    return ArrowRows([Path(f"{name}:{chosen}")], batches)
