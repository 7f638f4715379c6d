"""Small files with huge contents: refused, with what is huge in them, before they are in memory."""

from __future__ import annotations

import gzip
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tepo_megatron.data import readers
from tepo_megatron.data.arrow import parquet
from tepo_megatron.data.readers import JsonLines
from tepo_megatron.errors import DataError

HUGE = 2**27


def test_a_parquet_column_that_swells_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    table = pa.table({"prompt": ["fine"] * 2, "answer": ["0" * (HUGE // 2)] * 2})
    pa.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < HUGE / 500
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"bomb\.parquet: column answer of row group 0 takes 128 MiB of memory and 0\.\d MiB"):
        list(parquet([path]).rows(["prompt"], passing_repeats=False))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < HUGE / 2**10 / 2


def test_honest_columns_are_read(tmp_path: Path) -> None:
    """One value for all rows, and rows of more than one batch."""
    path = tmp_path / "honest.parquet"
    pa.parquet.write_table(pa.table({"prompt": ["a system prompt " * 50] * 1000, "answer": list(map(str, range(1000)))}), path)
    rows = [row for _, row in parquet([path]).rows(["prompt", "answer"], passing_repeats=False)]
    assert [row["answer"] for row in rows] == list(map(str, range(1000)))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 2**20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "' + b"0" * 2**24))
    with pytest.raises(DataError, match=r"bomb\.jsonl\.gz: a line is longer than 1 MiB"):
        list(JsonLines([path]).rows(["prompt"], passing_repeats=False))
