"""Refuse parquet files that are small on disk and huge in memory, before they are decoded.

All rows of a batch are in memory at once, and so are the encoded bytes of a column of a row group. A small file may expand
to a huge one: one huge value, one value for a million rows (dictionary encoding), values that each repeat the prefix of the
value before (DELTA_BYTE_ARRAY), or a list of a billion equal elements. Ordinary text is compressed to a tenth of its size, at
most to a hundredth.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tepo_megatron.errors import DataError

BATCH_ROWS = 256
_MIB = 2**20
_COLUMN_BYTES = 4 * 2**30
_BOMB_BYTES, _BOMB_RATIO = 64 * _MIB, 500
_ELEMENT_BYTES = 4  # the least memory that a list element takes
# Decoded values may take this many times their stored bytes: those of the dictionary, or of the whole column with prefixes.
_OF_DICTIONARY, _OF_COLUMN = 2, 16
_DICTIONARIES, _PREFIXES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}, "DELTA_BYTE_ARRAY"


def refuse_bombs(path: Path, metadata: Any, schema: Any) -> None:
    """Raise DataError for a column chunk that takes too much memory, or far more memory than bytes in the file.

    The limits are 4 GiB, and 64 MiB together with 500 times the compressed size.
    """
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            if schema.column(column).max_repetition_level:  # a list column: one row may hold all elements
                unpacked = max(unpacked, _ELEMENT_BYTES * chunk.num_values)
            if unpacked > _COLUMN_BYTES or (unpacked > _BOMB_BYTES and unpacked > _BOMB_RATIO * packed):
                raise DataError(
                    f"{path}: column {chunk.path_in_schema} of row group {group} takes {unpacked / _MIB:.0f} MiB of memory "
                    f"and {packed / _MIB:.1f} MiB of the file; check what it holds, or write it with smaller row groups"
                )


def huge_dictionaries(path: Path) -> set[str]:
    """Return the text columns that must be read as dictionaries, so that each distinct value takes memory only once.

    These are the columns whose longest dictionary value, repeated in every row of a batch, would exceed 64 MiB, or whose
    dictionary is empty in the first batch. A column chunk has one dictionary, which its first batch shows.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        metadata = file.metadata
    found: set[str] = set()
    for group in range(metadata.num_row_groups):
        chunks = [metadata.row_group(group).column(column) for column in range(metadata.num_columns)]
        names = [c.path_in_schema for c in chunks if c.physical_type == "BYTE_ARRAY" and set(c.encodings) & _DICTIONARIES]
        # leave out columns that may also be prefix-encoded: pyarrow does not read those into dictionaries
        names = [c.path_in_schema for c in chunks if c.path_in_schema in names and _PREFIXES not in c.encodings]
        if not names:
            continue
        with pyarrow.parquet.ParquetFile(path, read_dictionary=names) as file:
            for batch in file.iter_batches(batch_size=1, row_groups=[group], columns=names):
                most = _BOMB_BYTES // BATCH_ROWS
                found |= {name for name in names if not 0 < _longest(_column(batch, name)) <= most}
                break
    return found


def decoding_limits(path: Path, group: Any, huge: set[str]) -> "tuple[int, ExpansionGuard]":
    """Return how many rows of a row group to decode at once, and the guard that refuses batches that still expand too much."""
    chunks = [group.column(column) for column in range(group.num_columns)]
    repeating = [chunk for chunk in chunks if _PREFIXES in chunk.encodings]  # a value may repeat the whole value before it
    rows = min([BATCH_ROWS, *(_BOMB_BYTES // max(1, chunk.total_uncompressed_size) for chunk in repeating)])
    stored: dict[str, int] = {}
    for chunk in chunks:
        if chunk in repeating or chunk.path_in_schema in huge:
            name = chunk.path_in_schema.partition(".")[0]
            stored[name] = stored.get(name, 0) + chunk.total_uncompressed_size
    return max(1, rows), ExpansionGuard(path, stored)


class ExpansionGuard:
    """Compares the memory of one row group's decoded values with the bytes that the file stores of them."""

    def __init__(self, path: Path, stored: Mapping[str, int]) -> None:
        """Begin a row group of which nothing is decoded yet.

        Args:
            stored: Columns that may expand, each with its uncompressed bytes in the file.
        """
        self._path, self._rows, self._stored = path, 0, stored
        self._decoded = dict.fromkeys(stored, 0)

    def refuse(self, batch: Any) -> None:
        """Raise DataError for a column whose decoded values take far more memory than their stored bytes.

        Call it once for each `pyarrow.RecordBatch` of the row group, in order: decoded bytes are summed over batches.
        """
        for name, stored in self._stored.items():
            held, decoded = _sizes(batch.column(name))
            self._decoded[name] += decoded
            if decoded > max(_BOMB_BYTES, _OF_DICTIONARY * held):
                self._raise(name, batch.num_rows, decoded, held)
            if self._decoded[name] > max(_BOMB_BYTES, _OF_COLUMN * stored) and decoded == held:  # not dictionary-encoded
                self._raise(name, self._rows + batch.num_rows, self._decoded[name], stored)
        self._rows += batch.num_rows

    def _raise(self, name: str, rows: int, decoded: int, held: int) -> None:
        raise DataError(
            f"{self._path}: column {name}: {rows} rows take {decoded / _MIB:.0f} MiB of memory, made of {held / _MIB:.1f} MiB "
            f"that the file repeats; check what it holds, and shorten its values or remove the column"
        )


def _sizes(array: Any) -> tuple[int, int]:
    """Return the bytes of an array's values as stored (dictionary values once), and with every value expanded."""
    import pyarrow
    import pyarrow.compute as compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary)
        decoded = compute.sum(compute.take(lengths, array.indices)).as_py() or 0
        return compute.sum(lengths).as_py() or 0, decoded
    if pyarrow.types.is_struct(kind):
        parts = [_sizes(part) for part in array.flatten()]
    elif pyarrow.types.is_nested(kind) and hasattr(array, "flatten"):
        parts = [_sizes(array.flatten())]
    else:
        return array.nbytes, array.nbytes
    return sum(held for held, _ in parts), sum(decoded for _, decoded in parts)


def _column(batch: Any, path: str) -> Any:
    """Return the texts of a leaf column, named by its `path_in_schema`, without the lists and structs around it."""
    import pyarrow

    name, *inner = path.split(".")
    array = batch.column(name)
    while not pyarrow.types.is_dictionary(array.type):
        if pyarrow.types.is_struct(array.type):
            while inner and array.type.get_field_index(inner[0]) < 0:
                inner.pop(0)  # the schema's names for list levels, which the Arrow type does not have
            array = array.flatten()[array.type.get_field_index(inner.pop(0))]
        else:
            array = array.flatten()
    return array


def _longest(array: Any) -> int:
    """Return the bytes of the longest value in the dictionary of a dictionary array; 0 if the dictionary is empty."""
    import pyarrow.compute as compute

    return compute.max(compute.binary_length(array.dictionary)).as_py() or 0
