"""Refuse parquet files that are small on the disk and huge in memory, before they are in memory.

The rows of a batch are in memory at once, and so is what a column of a row group takes before it is decoded. A small file may
hold a huge value, one value for a million rows (dictionaries), values that each repeat the beginning of the one before
(DELTA_BYTE_ARRAY), or a list of a billion equal elements. Honest text is packed to a tenth, at most a hundredth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tepo_megatron.errors import DataError

BATCH_ROWS = 256
_MIB = 2**20
_COLUMN_BYTES = 4 * 2**30
_BOMB_BYTES, _BOMB_RATIO = 64 * _MIB, 500
_ELEMENT_BYTES = 4  # of a list: the least that one takes in memory
# Decoded values may take so many times what is stored of them: their dictionary, or the whole column with its prefixes.
_OF_DICTIONARY, _OF_COLUMN = 2, 16
_DICTIONARIES, _PREFIXES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}, "DELTA_BYTE_ARRAY"


def refuse_bombs(path: Path, metadata: Any, schema: Any) -> None:
    """Raise DataError for a column that takes too much memory, or far more than it takes in the file.

    Args:
        path: of the file.
        metadata: its `pyarrow.parquet.FileMetaData`.
        schema: its `pyarrow.parquet.ParquetSchema`.
    """
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            if schema.column(column).max_repetition_level:  # of a list, one row may hold all elements
                unpacked = max(unpacked, _ELEMENT_BYTES * chunk.num_values)
            if unpacked > _COLUMN_BYTES or (unpacked > _BOMB_BYTES and unpacked > _BOMB_RATIO * packed):
                raise DataError(
                    f"{path}: column {chunk.path_in_schema} of row group {group} takes {unpacked / _MIB:.0f} MiB of memory "
                    f"and {packed / _MIB:.1f} MiB of the file; check what it holds, or write it with smaller row groups"
                )


def dictionary_columns(metadata: Any) -> list[str]:
    """Return the columns of texts that can stay in their dictionaries while they are read: values take memory once each."""
    found = []
    for column in range(metadata.num_columns):
        chunks = [metadata.row_group(group).column(column) for group in range(metadata.num_row_groups)]
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        if chunks and chunks[0].physical_type == "BYTE_ARRAY" and encodings & _DICTIONARIES and _PREFIXES not in encodings:
            found.append(chunks[0].path_in_schema)
    return found


def batch_rows(group: Any, in_dictionaries: list[str]) -> int:
    """Return how many rows of a row group may be decoded at once: fewer where a value may repeat all of the one before.

    Args:
        group: a `pyarrow.parquet.RowGroupMetaData`.
        in_dictionaries: columns that are read as dictionaries.
    """
    chunks = [group.column(column) for column in range(group.num_columns)]
    repeating = [
        chunk.total_uncompressed_size
        for chunk in chunks
        if _PREFIXES in chunk.encodings and chunk.path_in_schema not in in_dictionaries
    ]
    return max(1, min(BATCH_ROWS, _BOMB_BYTES // max([1, *repeating])))


class Swelling:
    """What the batches of one row group take once their values are Python's, of what the file stores of them."""

    def __init__(self, path: Path, group: Any) -> None:
        """Begin a row group: nothing of it is decoded yet.

        Args:
            path: of the file.
            group: a `pyarrow.parquet.RowGroupMetaData`.
        """
        self._path, self._rows = path, 0
        self._stored: dict[str, int] = {}
        for column in range(group.num_columns):
            chunk = group.column(column)
            name = chunk.path_in_schema.partition(".")[0]
            self._stored[name] = self._stored.get(name, 0) + chunk.total_uncompressed_size
        self._decoded = dict.fromkeys(self._stored, 0)

    def refuse(self, batch: Any) -> None:
        """Raise DataError for a column whose values take far more memory than what they are made of.

        batch: the next `pyarrow.RecordBatch` of the row group.
        """
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            held, decoded = _sizes(array)
            self._decoded[name] = self._decoded.get(name, 0) + decoded
            stored = self._stored.get(name, 0)
            if decoded > max(_BOMB_BYTES, _OF_DICTIONARY * held):
                self._raise(name, batch.num_rows, decoded, held)
            if self._decoded[name] > max(_BOMB_BYTES, _OF_COLUMN * stored) and decoded == held:  # without a dictionary
                self._raise(name, self._rows + batch.num_rows, self._decoded[name], stored)
        self._rows += batch.num_rows

    def _raise(self, name: str, rows: int, decoded: int, held: int) -> None:
        raise DataError(
            f"{self._path}: column {name}: {rows} rows take {decoded / _MIB:.0f} MiB of memory, made of {held / _MIB:.1f} MiB "
            f"that the file repeats; check what it holds, and shorten its values or remove the column"
        )


def _sizes(array: Any) -> tuple[int, int]:
    """Return the bytes of an array's values as they are held, and once each is a value of its own."""
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
