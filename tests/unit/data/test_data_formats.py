"""Parquet files and Hugging Face's datasets hold what JSON lines hold."""

import gzip
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import DataError
from tepo_megatron.data import readers
from tepo_megatron.data.readers import JsonLines
from tepo_megatron.data.sources import parquet
from tests.datasets import load, write

pyarrow = pytest.importorskip("pyarrow")

VERL = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{i}+1?"}],
        "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        "extra_info": {"index": i},
    }
    for i in (0, 1, 1, 2, 0, 3)
]


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_rows_equal_those_of_json_lines(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """All keys of a row are equal, over several row groups and files; the file's suffix does not matter."""
    write_parquet(tmp_path / "train-0.parquet", VERL[:4], row_group_size=2)
    write_parquet(tmp_path / "train-1.parquet", VERL[4:])
    of_parquet, of_lines = load(tmp_path / "train-*", tokenizer), load(write(tmp_path / "d.jsonl", *VERL), tokenizer)
    assert of_parquet.prompts == of_lines.prompts and [p.id for p in of_lines.prompts] == [0, 1, 3, 5]
    assert of_parquet.prompts[2].meta == {key: VERL[3][key] for key in ("data_source", "reward_model", "extra_info")} | {}
    for loaded in (of_parquet, of_lines):
        assert "verl (prompt, reward_model.ground_truth), 6 rows, 4 prompts; dropped: 2 duplicates" in str(loaded.report)


def test_columns_hold_null_for_what_other_messages_have(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "1+1?", "name": None}], "answer": 2},
        {"prompt": [{"role": "user", "content": "1+2?", "name": "me"}], "answer": 3},
    ]
    loaded = load(write_parquet(tmp_path / "d.parquet", rows), tokenizer)
    assert len(loaded.prompts) == 2 and len(loaded.prompts[0].token_ids) == len("u:1+1?|a:")


def test_bad_rows_of_parquet_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_parquet(tmp_path / "d-0.parquet", [{"prompt": "a", "answer": "1"}])
    write_parquet(tmp_path / "d-1.parquet", [{"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": None}])
    with pytest.raises(DataError, match=rf"^{tmp_path}/d-1\.parquet: row 2: 'answer' must be a string .*not null"):
        load(tmp_path / "d-*.parquet", tokenizer)
    assert [p.id for p in load(tmp_path / "d-*.parquet", tokenizer, skip_bad_rows=True).prompts] == [0, 1]
    with pytest.raises(DataError, match=r"d-0\.parquet: row 1: key 'gold' is missing \(found: 'prompt', 'answer'\)"):
        load(tmp_path / "d-0.parquet", tokenizer, prompt_key="prompt", answer_key="gold")


def test_damaged_parquet_and_files_of_two_kinds_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_parquet(tmp_path / "d.parquet", VERL)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"d\.parquet: not a parquet file that can be read"):
        load(path, tokenizer)
    write(tmp_path / "d.jsonl", *VERL)
    with pytest.raises(DataError, match=r"d\.jsonl and .*d\.parquet are of two kinds"):
        load(tmp_path / "d.*", tokenizer)


@pytest.mark.parametrize(("package", "source"), [("pyarrow", "d.parquet"), ("datasets", "openai/gsm8k:main:train[:10]")])
def test_what_is_not_installed_is_named(
    package: str, source: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "d.parquet", VERL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"need[s]? the package {package}; (or )?install"):
        load(source, tokenizer)


def test_a_folder_is_a_dataset_of_hugging_face(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is read with the package `datasets`, as an id is; only the download differs."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "dapo"
    folder.mkdir()
    write_parquet(folder / "train-00000-of-00001.parquet", VERL)
    write_parquet(folder / "test-00000-of-00001.parquet", VERL[3:])
    loaded = load(folder, tokenizer)
    assert loaded.prompts == load(write(tmp_path / "d.jsonl", *VERL), tokenizer).prompts
    assert [p.answer for p in load(f"{folder}:test[1:]", tokenizer).prompts] == ["1", "4"]
    with pytest.raises(DataError, match=r"dapo:dev: choose one of its splits, as in .*dapo:\w+ \(there are .*test"):
        load(f"{folder}:dev", tokenizer)
    with pytest.raises(DataError, match=r"^no/such: no such file, and as a dataset of Hugging Face, .* cannot be loaded \(\w+"):
        load("no/such", tokenizer)


def test_parquet_values_of_every_type_are_those_of_python(tmp_path: Path) -> None:
    """Values are equal at every depth, with rows that have none, over row groups and batches."""
    rows = [
        {
            "prompt": f"p{i % 5}",
            "chat": [{"role": "user", "content": f"q{i % 7}"}, {"role": "assistant", "content": None}] if i % 3 else None,
            "meta": {"ground": str(i % 4), "n": i, "flags": [True, False]},
            "raw": b"x" * (i % 2),
            "tags": ["a", None] if i % 2 else [],
            "deep": [[{"text": "l"}]] if i == 500 else [],
        }
        for i in range(1000)
    ]
    for options in ({}, {"use_dictionary": False}, {"use_dictionary": ["prompt"], "data_page_version": "2.0"}):
        read = parquet([write_parquet(tmp_path / "d.parquet", rows, row_group_size=300, **options)])
        assert [row for _, row in read.rows(list(rows[0]), passing_repeats=False)] == rows
        assert read.whole(999) == rows[999] and read.where(999).endswith(": row 1000")


def test_short_floats_give_their_shortest_decimals(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    import pyarrow.parquet

    for kind in (pyarrow.float16(), pyarrow.float32(), pyarrow.float64(), pyarrow.decimal128(4, 1)):
        answers = pyarrow.array([0.1, 0.5] if pyarrow.types.is_floating(kind) else [Decimal("0.1"), Decimal("0.5")], kind)
        inner = pyarrow.StructArray.from_arrays([answers], ["ground_truth"])
        table = pyarrow.table({"prompt": ["a", "b"], "reward_model": inner})
        pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
        loaded = load(tmp_path / "d.parquet", tokenizer)
        assert [p.answer for p in loaded.prompts] == ["0.1", "0.5"], kind


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 2**20)
    path = tmp_path / "endless.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "' + b"0" * 2**24))
    with pytest.raises(DataError, match=r"endless\.jsonl\.gz: a line is longer than 1 MiB"):
        list(JsonLines([path]).rows(["prompt"], passing_repeats=False))
