"""Small files with huge contents: refused, with what is huge in them, before they are in memory."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from tepo_megatron.data import readers
from tepo_megatron.data.arrow import parquet
from tepo_megatron.data.readers import JsonLines
from tepo_megatron.errors import DataError
from tepo_megatron.platform import memory
from tests.marks import full_but

HUGE = 2**27
CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_parquet_column_that_swells_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    table = pa.table({"prompt": ["fine"] * 2, "answer": ["0" * (HUGE // 2)] * 2})
    pa.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < HUGE / 500
    memory.reset_peak(CPU)
    before = memory.usage(CPU).peak
    with pytest.raises(DataError, match=r"bomb\.parquet: column answer of row group 0 takes 128 MiB of memory and 0\.\d MiB"):
        list(parquet([path]).rows(["prompt"], passing_repeats=False))
    assert memory.usage(CPU).peak - before < HUGE / 2


def test_honest_columns_are_read(tmp_path: Path) -> None:
    """A column with one value for all rows, and rows of more than one batch, are read."""
    path = tmp_path / "honest.parquet"
    pa.parquet.write_table(pa.table({"prompt": ["a system prompt " * 50] * 1000, "answer": list(map(str, range(1000)))}), path)
    rows = [row for _, row in parquet([path]).rows(["prompt", "answer"], passing_repeats=False)]
    assert [row["answer"] for row in rows] == list(map(str, range(1000)))


def write(path: Path, values: pa.Array, **options: Any) -> None:
    table = pa.table({"prompt": ["fine"] * len(values), "answer": values})
    pa.parquet.write_table(table, path, compression="zstd", store_schema=False, **options)
    assert path.stat().st_size < 50_000


@pytest.mark.parametrize("nested", full_but([], [False], [False, True]), ids=["flat", "in lists of structs"])
def test_a_parquet_dictionary_with_a_huge_value_is_refused_by_name(nested: bool, tmp_path: Path) -> None:
    """The 256 rows of a batch would take 2.5 GiB."""
    path = tmp_path / "bomb.parquet"
    values = pa.DictionaryArray.from_arrays(pa.nulls(600, pa.int8()).fill_null(0), pa.array(["0" * (10 * 2**20)]))
    if nested:
        rows = pa.StructArray.from_arrays([pa.array(["user"] * 600), values], ["role", "content"])
        values = pa.ListArray.from_arrays([*range(601)], rows)
    write(path, values)
    said = r"column answer: 256 rows take 2560 MiB of memory, made of 10\.0 MiB that the file repeats"
    refused_by_name(path, f"{said}; check what it holds, and shorten its values or remove the column")


@pytest.mark.full
def test_parquet_values_that_each_repeat_the_one_before_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    encoding = {"answer": "DELTA_BYTE_ARRAY"}
    write(path, pa.array(["0" * (2 * 2**20)] * 150), use_dictionary=False, column_encoding=encoding)
    refused_by_name(path, r"column answer: \d+ rows take \d+ MiB of memory, made of \d\.\d MiB that the file repeats; check ")


@pytest.mark.full
def test_a_parquet_list_that_repeats_one_element_is_refused_by_name(tmp_path: Path) -> None:
    """The file has one row of 2**25 elements, none of which takes a byte in the file."""
    path = tmp_path / "bomb.parquet"
    element = pa.DictionaryArray.from_arrays(pa.nulls(2**25, pa.int8()).fill_null(0), pa.array(["x"]))
    write(path, pa.ListArray.from_arrays([0, 2**25], element))
    refused_by_name(path, r"column answer\.list\.element of row group 0 takes 128 MiB of memory and 0\.\d MiB of the file")


READ = """
import sys
from pathlib import Path
import torch
from tepo_megatron.data.arrow import parquet
from tepo_megatron.errors import DataError
from tepo_megatron.platform import memory
import pyarrow.parquet
before = memory.usage(torch.device("cpu")).peak
try:
    for _ in parquet([Path(sys.argv[1])]).rows(["prompt", "answer"], passing_repeats=False):
        pass
except DataError as e:
    print((memory.usage(torch.device("cpu")).peak - before) / 2**20, e)
"""


def refused_by_name(path: Path, said: str) -> None:
    """A process of its own reads the file, in an address space that no other on this machine suffers from."""
    limited = ["sh", "-c", 'ulimit -v 4194304; exec "$@"', "sh"]  # KiB
    ended = subprocess.run([*limited, sys.executable, "-c", READ, path], capture_output=True, text=True, timeout=300)
    grown, _, message = ended.stdout.partition(" ")
    assert re.search(re.escape(str(path)) + ": " + said, message), ended.stdout + ended.stderr
    # A batch has 64 MiB. pyarrow takes twice that to decode one, Python as much for its rows, and the last one is still held.
    assert float(grown) < 5 * 64, f"{grown} MiB"


def test_texts_in_dictionaries_are_the_same_in_python(tmp_path: Path) -> None:
    """Texts are equal at every depth, with rows that have none, over row groups and batches."""
    rows = [
        {
            "prompt": f"p{i % 5}",
            "chat": [{"role": "user", "content": f"q{i % 7}"}, {"role": "assistant", "content": None}] if i % 3 else None,
            "meta": {"ground": str(i % 4), "n": i, "flags": [True, False]},
            "raw": b"x" * (i % 2),
            "tags": ["a", None] if i % 2 else [],
            "long": ["short", "l" * 300_000][i == 500],  # so that its column stays in a dictionary
            "deep": [[{"text": "l" * 300_000}]] if i == 500 else [],
        }
        for i in range(1000)
    ]
    path = tmp_path / "honest.parquet"
    for options in ({}, {"use_dictionary": False}, {"use_dictionary": ["prompt"], "data_page_version": "2.0"}):
        pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=300, **options)
        read = parquet([path])
        assert [row for _, row in read.rows(list(rows[0]), passing_repeats=False)] == rows
        assert read.whole(999) == rows[999] and read.where(999).endswith(": row 1000")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 2**20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "' + b"0" * 2**24))
    with pytest.raises(DataError, match=r"bomb\.jsonl\.gz: a line is longer than 1 MiB"):
        list(JsonLines([path]).rows(["prompt"], passing_repeats=False))
