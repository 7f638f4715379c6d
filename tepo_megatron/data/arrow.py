"""Read the rows of parquet files and of Hugging Face datasets through Arrow record batches."""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.base.errors import DataError
from tepo_megatron.data import readers
from tepo_megatron.data.readers import Row

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
