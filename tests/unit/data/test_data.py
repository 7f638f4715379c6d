"""Datasets of JSON lines: what is read, what is refused and how, what is taken once; and the tokenizer."""

import bz2
import gzip
import lzma
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import CheckpointError, DataError
from tepo_megatron.config import DataConfig
from tepo_megatron.data import LoadedPrompts, load_prompts, load_tokenizer
from tepo_megatron.data.prompts import check_rows
from tests.datasets import character_tokenizer, write


def load(path: Path | str, tokenizer: PreTrainedTokenizerFast, **data: Any) -> LoadedPrompts:
    """One set, read as the config says."""
    cfg = DataConfig(train=str(path), **{"max_prompt_tokens": 64, **data})
    return load_prompts(cfg.sets[0], cfg, tokenizer)


def test_rows_become_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "3+4?", "answer": "7", "level": 2},
        b"",
        {"prompt": chat, "answer": 2},
        {"prompt": "half?", "answer": 0.5},
    )
    loaded = load(path, tokenizer)
    prompts = loaded.prompts
    assert str(loaded.report) == f"{path}: own (prompt, answer), 3 rows, 3 prompts; dropped: none"
    assert [(p.id, p.answer, dict(p.meta)) for p in prompts] == [(0, "7", {"level": 2}), (2, "2", {}), (3, "0.5", {})]
    texts = ["".join(tokenizer.convert_ids_to_tokens(list(p.token_ids))) for p in prompts]
    assert texts == ["3+4?", "s:S|u:1+1?|a:", "half?"]
    assert all(type(token) is int for p in prompts for token in p.token_ids)


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "x" * length, "answer": "1"} for length in (3, 4, 5, 9, 1)]
    path = write(tmp_path / "d.jsonl", *rows)
    loaded = load(path, tokenizer, max_prompt_tokens=4)
    assert ([p.id for p in loaded.prompts], loaded.report.too_long) == ([0, 1, 4], 2)
    with pytest.raises(DataError, match=r"all 2 prompts exceed data\.max_prompt_tokens=2 \(the shortest has 3\)"):
        load(write(tmp_path / "long.jsonl", *rows[:2]), tokenizer, max_prompt_tokens=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"prompt": "x", ', r"not valid JSON .*one JSON object"),
        (b'{"prompt": "\xff", "answer": "1"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([1, 2], r"one JSON object, not a list: \[1, 2\]"),
        ({"prompt": "x"}, r"key 'answer' is missing \(found: 'prompt'\).*data\.answer_key"),
        ({"question": "x", "answer": "1"}, r"key 'prompt' is missing .*data\.prompt_key"),
        ({"prompt": 3, "answer": "1"}, "'prompt' must be a string or a list of messages .* a number: 3"),
        ({"prompt": [], "answer": "1"}, "'prompt' must be a string or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'prompt' must be a string or a list of messages"),
        (
            {"prompt": [{"role": "bard", "content": "x"}], "answer": "1"},
            "'prompt' is refused by the tokenizer .*unknown role bard",
        ),
        ({"prompt": "", "answer": "1"}, "'prompt' has no tokens"),
        ({"prompt": "\ud800", "answer": "1"}, "'prompt' is refused by the tokenizer"),
        ({"prompt": "x", "answer": None}, "'answer' must be a string or a number, or a list of one, not null"),
        ({"prompt": "x", "answer": True}, "'answer' must be a string or a number, or a list of one, not a boolean: true"),
        ({"prompt": "x", "answer": ["1", "2"]}, "'answer' must be a string or a number, or a list of one, not a list"),
        ({"prompt": "x", "answer": float("nan")}, "an answer must be finite"),
        ({"prompt": "x", "answer": "  "}, "'answer' is blank"),
    ],
)
def test_bad_row_is_named(row: object, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "ok", "answer": "1"}, b"", row)
    with pytest.raises(DataError, match=rf"^{path}:3: .*{message}"):
        load(path, tokenizer)


def test_tokenizer_errors_name_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: no such directory; model\.path"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: no tokenizer here \(tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: the tokenizer files cannot be read"):
        load_tokenizer(tmp_path)


def rows(*pairs: tuple[str, object]) -> list[dict[str, object]]:
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def test_a_prompt_is_taken_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Copies to the byte, other columns and another order of keys alike; the first row represents all."""
    first = {"prompt": "1+1?", "answer": "2", "id": 1}
    path = write(tmp_path / "d.jsonl", first, first, {"id": 7, "answer": 2, "prompt": "1+1?"}, *rows(("1+2?", 3), ("1+2?", 3)))
    loaded = load(path, tokenizer)
    assert [(p.id, p.answer, dict(p.meta)) for p in loaded.prompts] == [(0, "2", {"id": 1}), (3, "3", {})]
    assert (loaded.report.rows, loaded.report.duplicates) == (5, 3)
    assert "5 rows, 2 prompts; dropped: 3 duplicates" in str(loaded.report)


def test_different_answers_are_refused_or_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", *rows(("a", 1), ("b", 2), ("a", 1), ("a", 3), ("c", 4), ("c", "4.0")))
    with pytest.raises(DataError) as e:
        load(path, tokenizer)
    assert f"2 prompts have different answers: {path}:1 ('1') and {path}:4 ('3'), {path}:5 ('4') and {path}:6 ('4.0')" in str(
        e.value
    )
    loaded = load(path, tokenizer, skip_bad_rows=True)
    assert [p.id for p in loaded.prompts] == [1]
    assert any("different answers" in line for line in loaded.report.details())


def test_bad_rows_are_counted_if_asked(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    bad = [b'{"prompt": "x", ', {"prompt": "no answer"}, {"prompt": "\ud800", "answer": "1"}, {"prompt": "x", "answer": ""}]
    good = rows(("a", 1), ("b", 2))
    loaded = load(write(tmp_path / "d.jsonl", *bad, *good), tokenizer, skip_bad_rows=True)
    assert [p.id for p in loaded.prompts] == [4, 5]
    assert "6 rows, 2 prompts; dropped: 4 bad rows" in str(loaded.report)
    assert [line.split(": ", 2)[2].split(": ")[0] for line in loaded.report.details()] == [
        f"{tmp_path}/d.jsonl:{line}" for line in (1, 2, 4, 3)
    ]
    with pytest.raises(DataError, match=r"no row fits a known schema"):
        load(write(tmp_path / "all.jsonl", *bad[:2]), tokenizer, skip_bad_rows=True)


@pytest.mark.parametrize("start", [b"{", {"prompt": "a", "answer": 1}])
def test_bad_rows_are_refused_together(start: object, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Before anything is started if the first row shows it, else when the rows are read."""
    path = write(tmp_path / "d.jsonl", start, b"[", {"prompt": "x", "answer": ""}, {"prompt": "b", "answer": 2}, *[b"x"] * 9)
    cfg = DataConfig(train=str(path), max_prompt_tokens=64)
    with pytest.raises(DataError) as e:
        check_rows(cfg.sets[0], cfg)
        load(path, tokenizer)
    number = 12 if start == b"{" else 11
    text = str(e.value)
    assert text.startswith(f"{number} bad rows: {path}:") and f"; and {number - 10} more (data.skip_bad_rows=true" in text
    assert f"{path}:3: 'answer' is blank" in text and text.count(f"{path}:") == 10


@pytest.mark.parametrize(
    ("slice_", "ids"),
    [
        ("[:2]", [0, 2]),
        ("[2:]", [3, 4, 5]),
        ("[1:3]", [2, 3]),
        ("[:40%]", [0, 2]),
        ("[40%:]", [3, 4, 5]),
        ("[:50%]", [0, 2]),
        ("[:]", [0, 2, 3, 4, 5]),
        ("[4:99]", [5]),
    ],
)
def test_slices_are_of_different_prompts(
    slice_: str, ids: list[int], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """[:40%] and [40%:] of a file that repeats its rows have no prompt in common."""
    path = write(tmp_path / "d.jsonl", *rows(("a", 1), ("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("a", 1)))
    loaded = load(f"{path}{slice_}", tokenizer)
    assert [p.id for p in loaded.prompts] == ids
    assert loaded.report.outside == 5 - len(ids)


def test_a_slice_without_prompts_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", *rows(("a", 1)))
    with pytest.raises(DataError, match=r"no prompt left: .*1 rows, 0 prompts; dropped: 1 outside the slice"):
        load(f"{path}[5:]", tokenizer)


def test_several_files_are_one_set(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Errors name the file, of which one is gzipped, and its own line."""
    write(tmp_path / "a-1.jsonl", *rows(("a", 1), ("b", 2)))
    (tmp_path / "a-2.jsonl").write_bytes(gzip.compress(b'{"prompt": "c", "answer": 3}\n{"prompt": "a", "answer": 1}\n'))
    loaded = load(tmp_path / "a-*.jsonl", tokenizer)
    assert [(p.id, p.answer) for p in loaded.prompts] == [(0, "1"), (1, "2"), (2, "3")]
    write(tmp_path / "a-3.jsonl", *rows(("x", 1), ("y", None)))
    with pytest.raises(DataError, match=rf"^{tmp_path}/a-3\.jsonl:2: 'answer'"):
        load(tmp_path / "a-*.jsonl", tokenizer)


LINE = '{"prompt": "x", "answer": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x", "answer": 1}\n'.encode("utf-16"), r"d\.jsonl: is encoded in UTF-16; convert it \(`iconv"),
        (b'[\n{"prompt": "x", "answer": 1}\n]\n', r"d\.jsonl:1: not valid JSON .*a JSON array, of which `jq -c"),
        (b'[{"prompt": "x", "answer": 1}]\n', r"d\.jsonl:1: .*not a list.*a JSON array, of which `jq -c"),
        (gzip.compress('{"prompt": "x", "answer": 1}\n'.encode("utf-16")), r"d\.jsonl: .*gzipped.* UTF-16; .*iconv"),
        (LINE.encode("utf-16-le"), r"d\.jsonl: is encoded in UTF-16 without a mark; .*iconv"),
        (bz2.compress(LINE.encode()), r"d\.jsonl: is compressed with bzip2; .*bunzip2"),
        (lzma.compress(LINE.encode()), r"d\.jsonl: is compressed with xz; .*unxz"),
        (b"PK\x03\x04" + b"0" * 99, r"d\.jsonl: is a zip archive; .*unzip"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            r"d\.jsonl: is a Git LFS pointer.*git lfs pull",
        ),
        (b"\n<!DOCTYPE html>\n<html>", r"d\.jsonl: is an HTML .*download the file itself"),
        (gzip.compress(b"PAR1" + b"0" * 99), r"d\.jsonl: is gzipped, and holds a gzip or parquet file; .*gunzip"),
        (b'{"prompt": "caf\xe9", "answer": 1}\n', r"d\.jsonl:1: not valid JSON .*utf-8"),
        (gzip.compress(b'{"prompt": "x", "answer": 1}\n' * 99)[:-9], r"d\.jsonl: cannot read the dataset \(.*end-of-stream"),
        (gzip.compress(b"")[:10] + b"\xff" * 30, r"d\.jsonl: cannot read the dataset \(Error -3 while decompressing"),
        (b'{"q": 1, "a": 2}\n', r"d\.jsonl:1: no known schema has these keys: 'q', 'a'; .*data\.prompt_key"),
    ],
    ids=[
        *("utf-16", "array", "array on a line", "utf-16 in gzip", "utf-16 without mark", "bzip2", "xz", "zip", "lfs", "html"),
        *("parquet in gzip", "latin-1", "cut off", "damaged", "unknown"),
    ],
)
def test_files_of_another_kind_are_refused_by_name(
    content: bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(path, tokenizer)
    if " is a Git LFS" in message or " is an HTML" in message:
        path.rename(tmp_path / "d.parquet")
        with pytest.raises(DataError, match=message.replace("jsonl", "parquet")):
            load(tmp_path / "d.parquet", tokenizer)


def test_answers_that_the_grader_cannot_read_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """They are reported, dropped or refused, with their lines; blanks around an answer hide none. A busy machine drops none."""
    path = write(tmp_path / "d.jsonl", *rows(("a", "7"), ("b", r" \frac{1 "), ("c", "8")))
    asked: list[str] = []

    def try_golds(golds: Sequence[str]) -> tuple[dict[str, str], int]:
        asked.extend(golds)
        return {r"\frac{1": "bad_gold", "8": "timeout"}, 1

    def load_with(what: str) -> LoadedPrompts:
        cfg = DataConfig(train=str(path), check_answers=what)  # type: ignore[arg-type]
        return load_prompts(cfg.sets[0], cfg, tokenizer, try_golds)

    reported = load_with("tell")
    assert [p.id for p in reported.prompts] == [0, 1, 2] and asked == ["7", r" \frac{1 ", "8"]
    assert reported.report.details() == [
        f"{path}: 1 answers that the grader cannot read: {path}:2 ' \\\\frac{{1 ' (bad_gold)",
        f"{path}: 1 answers that the grader did not settle: {path}:3 '8' (timeout)",
        f"{path}: 1 answers were not tried on the grader: there was no time for more",
    ]
    assert [p.id for p in load_with("drop").prompts] == [0, 2]
    assert "1 with answers that the grader cannot read" in str(load_with("drop").report)
    with pytest.raises(DataError, match=rf"1 answers that the grader cannot read: {path}:2 "):
        load_with("error")
    asked.clear()
    assert len(load_with("off").prompts) == 3 and not asked


def test_a_template_sees_the_start_of_the_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed on another day, in another time zone or language gives the same prompts."""
    model, run = tmp_path / "model", tmp_path / "run"
    run.mkdir()
    dated = character_tokenizer()
    dated.chat_template = "{{ strftime_now('%a %d %B %Y %H') }} {{ messages[0].content }}"
    dated.save_pretrained(model)

    def prompt() -> str:
        chat = [{"role": "user", "content": "1+1?"}]
        return str(load_tokenizer(model, run).apply_chat_template(chat, tokenize=False))

    prompt()
    (stored,) = run.iterdir()
    stored.write_text("2025-03-01T23:30:00+00:00\n")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert prompt() == "Sat 01 March 2025 23 1+1?"
    finally:
        monkeypatch.undo()
        time.tzset()
    stored.write_text("yesterday")
    with pytest.raises(CheckpointError, match=r"template_clock: holds no time like 2025"):
        load_tokenizer(model, run)
