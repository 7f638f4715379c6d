"""Datasets: what is read, what is refused and how, and the stream that resumes exactly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.data import PromptStream, load_prompts, load_tokenizer
from tepo_megatron.errors import CheckpointError, DataError
from tepo_megatron.types import Prompt

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and a beginning-of-sequence token that must never be added."""
    vocabulary = {c: i for i, c in enumerate(["<bos>", "<unk>", *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write(path: Path, *rows: object) -> Path:
    """Rows as JSON lines; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def load(path: Path, tokenizer: PreTrainedTokenizerFast, max_prompt_tokens: int = 64) -> tuple[list[Prompt], int]:
    return load_prompts(path, tokenizer, "prompt", "answer", max_prompt_tokens)


def test_rows_become_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "3+4?", "answer": "7", "level": 2},
        b"",
        {"prompt": chat, "answer": 2},
        {"prompt": "half?", "answer": 0.5},
    )
    prompts, dropped = load(path, tokenizer)
    assert dropped == 0
    assert [(p.id, p.answer, dict(p.meta)) for p in prompts] == [
        (0, "7", {"level": 2}),
        (2, "2", {}),
        (3, "0.5", {}),
    ]
    texts = ["".join(tokenizer.convert_ids_to_tokens(list(p.token_ids))) for p in prompts]
    assert texts == ["3+4?", "s:S|u:1+1?|a:", "half?"]
    assert all(type(token) is int for p in prompts for token in p.token_ids)


def test_keys_are_configurable(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", {"problem": "3+4?", "label": 7})
    prompts, _ = load_prompts(path, tokenizer, "problem", "label", 8)
    assert (prompts[0].answer, len(prompts[0].token_ids), prompts[0].meta) == ("7", 4, {})


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "x" * length, "answer": "1"} for length in (3, 4, 5, 9, 1)]
    path = write(tmp_path / "d.jsonl", *rows)
    prompts, dropped = load(path, tokenizer, max_prompt_tokens=4)
    assert ([p.id for p in prompts], dropped) == ([0, 1, 4], 2)
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
            "the tokenizer refuses 'prompt' .*unknown role bard",
        ),
        ({"prompt": "", "answer": "1"}, "'prompt' has no tokens"),
        ({"prompt": "\ud800", "answer": "1"}, "the tokenizer refuses 'prompt'"),
        ({"prompt": "x", "answer": None}, "'answer' must be a string or a number, not null"),
        ({"prompt": "x", "answer": True}, "'answer' must be a string or a number, not a boolean: true"),
        ({"prompt": "x", "answer": ["1"]}, "'answer' must be a string or a number, not a list"),
        ({"prompt": "x", "answer": float("nan")}, "an answer must be finite"),
        ({"prompt": "x", "answer": "  "}, "'answer' is blank"),
    ],
)
def test_bad_row_is_named(row: object, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "ok", "answer": "1"}, b"", row)
    with pytest.raises(DataError, match=rf"^{path}:3: .*{message}"):
        load(path, tokenizer)


def test_chat_needs_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="<unk>")
    path = write(tmp_path / "d.jsonl", {"prompt": [{"role": "user", "content": "x"}], "answer": "1"})
    with pytest.raises(DataError, match=r"d\.jsonl:1: .*no chat template"):
        load(path, plain)


def test_missing_and_empty_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot read .*No such file"):
        load(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(DataError, match=r"empty\.jsonl: the dataset is empty"):
        load(write(tmp_path / "empty.jsonl", b"", b"  "), tokenizer)


def test_tokenizer_loads_from_its_directory(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("3+4?", add_special_tokens=False).input_ids == tokenizer("3+4?", add_special_tokens=False).input_ids


def test_tokenizer_errors_name_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: no such directory; model\.path"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: no tokenizer here \(tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: the tokenizer files cannot be read"):
        load_tokenizer(tmp_path)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=i, token_ids=(1, i), answer=str(i)) for i in range(count)]


def ids(batch: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in batch]


def test_stream_in_file_order() -> None:
    stream = PromptStream(prompts(5), seed=0, shuffle=False)
    assert [ids(stream.take(2)) for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_stream_shuffles_each_epoch_anew_and_everywhere_alike() -> None:
    stream = PromptStream(prompts(8), seed=3, shuffle=True)
    epochs = [ids(stream.take(8)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    # pinned: a change of the order would change every run and break every resume
    assert epochs[0] == [0, 7, 5, 6, 1, 2, 4, 3]
    assert ids(PromptStream(prompts(8), seed=4, shuffle=True).take(8)) != epochs[0]


@pytest.mark.parametrize(("count", "n"), [(5, 3), (5, 4), (5, 5), (7, 3)])
def test_stream_batches_hold_no_prompt_twice(count: int, n: int) -> None:
    stream = PromptStream(prompts(count), seed=1, shuffle=True)
    seen: Counter[int] = Counter()
    for _ in range(60):
        batch = ids(stream.take(n))
        assert len(set(batch)) == n
        seen.update(batch)
    assert min(seen.values()) >= 0.6 * max(seen.values())


def test_stream_refills_with_other_prompts() -> None:
    stream = PromptStream(prompts(5), seed=1, shuffle=True)
    for _ in range(10):
        first = ids(stream.take(3))
        assert not set(first) & set(ids(stream.take(2, excluding=first)))
    with pytest.raises(DataError, match=r"data\.train has 5 prompts, 3 of them .*rollout\.prompts_per_step"):
        stream.take(3, excluding=first)
    with pytest.raises(DataError, match=r"data\.train has 5 prompts"):
        stream.take(6)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_resumes_exactly(shuffle: bool) -> None:
    stream = PromptStream(prompts(7), seed=5, shuffle=shuffle)
    for _ in range(5):
        stream.take(3)
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = PromptStream(prompts(7), seed=5, shuffle=shuffle)
        resumed.load_state_dict(state)
        expected = [ids(stream.take(3)) for _ in range(6)]
        assert [ids(resumed.take(3)) for _ in range(6)] == expected
        stream.load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptStream(prompts(8), seed=5, shuffle=True), "count was 7 and is 8"),
        (PromptStream([*prompts(6), Prompt(6, (1, 6), "7")], seed=5, shuffle=True), "fingerprint"),
        (PromptStream(prompts(7), seed=6, shuffle=True), "seed was 5 and is 6"),
        (PromptStream(prompts(7), seed=5, shuffle=False), "shuffle"),
    ],
    ids=["count", "answers", "seed", "shuffle"],
)
def test_stream_refuses_the_state_of_another(other: PromptStream, message: str) -> None:
    stream = PromptStream(prompts(7), seed=5, shuffle=True)
    before = other.state_dict()
    with pytest.raises(DataError, match=message):
        other.load_state_dict(stream.state_dict())
    assert other.state_dict() == before


def test_stream_needs_prompts() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptStream([], seed=0, shuffle=True)
