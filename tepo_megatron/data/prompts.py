"""JSON-lines datasets as prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_megatron.errors import DataError
from tepo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    prompt_key: str,
    answer_key: str,
    max_prompt_tokens: int,
) -> tuple[list[Prompt], int]:
    """The prompts of a JSON-lines file in its order, and how many were dropped as longer than `max_prompt_tokens`.

    Each row is an object. Its prompt is a string, tokenized as it stands without special tokens, or a list of chat
    messages {"role", "content"}, for which the tokenizer's chat template and generation prompt apply. Its answer is a
    string or a number. `Prompt.id` is the line counted from 0 (stable when `max_prompt_tokens` changes); `Prompt.meta`
    holds the rest of the row. Blank lines are passed over.

    Raises DataError with file and line (counted from 1) and the mend: unreadable or empty file, malformed row, or no
    prompt short enough.
    """
    prompts: list[Prompt] = []
    dropped_lengths: list[int] = []
    for number, row in read_rows(Path(path)):
        where = f"{path}:{number + 1}"
        text = _take(row, prompt_key, where, "data.prompt_key")
        answer = _answer(_take(row, answer_key, where, "data.answer_key"), answer_key, where)
        token_ids = tokenize(text, tokenizer, prompt_key, where)
        if len(token_ids) > max_prompt_tokens:
            dropped_lengths.append(len(token_ids))
            continue
        meta = {key: value for key, value in row.items() if key not in (prompt_key, answer_key)}
        prompts.append(Prompt(id=number, token_ids=token_ids, answer=answer, meta=meta))
    if not prompts and not dropped_lengths:
        raise DataError(f"{path}: the dataset is empty; give a file with one JSON object per line")
    if not prompts:
        raise DataError(
            f"{path}: no prompt left: all {len(dropped_lengths)} prompts exceed "
            f"data.max_prompt_tokens={max_prompt_tokens} (the shortest has {min(dropped_lengths)}); raise it"
        )
    return prompts, len(dropped_lengths)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line counted from 0, object) of each line that is not blank. Raises DataError naming file and line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    yield number, _parse(line, f"{path}:{number + 1}")
    except OSError as e:
        raise DataError(f"{path}: cannot read the dataset ({e.strerror}); give the path of a JSON-lines file") from e


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (
        ValueError,
        RecursionError,
    ) as e:  # malformed JSON, bytes that are not UTF-8, or nesting without end
        raise DataError(f"{where}: not valid JSON ({e}); each line must hold one JSON object") from e
    if not isinstance(row, dict):
        raise DataError(f"{where}: each line must hold one JSON object, not {_kind(row)}")
    return row


def _take(row: dict[str, Any], key: str, where: str, option: str) -> Any:
    if key not in row:
        found = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: key {key!r} is missing (found: {found}); add it or set {option}")
    return row[key]


def _answer(value: Any, key: str, where: str) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: {key!r} is {value}; an answer must be finite")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{where}: {key!r} must be a string or a number, not {_kind(value)}")
    if not str(value).strip():
        raise DataError(f"{where}: {key!r} is blank, so no response could be right; fill it in or remove the line")
    return str(value)


def tokenize(value: Any, tokenizer: PreTrainedTokenizerBase, key: str, where: str) -> tuple[int, ...]:
    """A string as it stands, or chat messages under the tokenizer's template. Raises DataError naming `where` and `key`."""
    chat = _is_chat(value)
    if not chat and not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} must be a string or a list of messages with string 'role' and 'content', not {_kind(value)}"
        )
    if chat and tokenizer.chat_template is None:
        raise DataError(
            f"{where}: {key!r} holds chat messages but the tokenizer has no chat template; "
            "use a chat model's tokenizer or give the prompt as one string"
        )
    try:
        if chat:
            token_ids = tokenizer.apply_chat_template(value, add_generation_prompt=True, return_dict=False)
        else:
            token_ids = tokenizer(value, add_special_tokens=False).input_ids
    except Exception as e:  # templates raise what their authors like; lone surrogates are a TypeError
        raise DataError(f"{where}: the tokenizer refuses {key!r} ({e}); mend the prompt") from e
    if not token_ids:
        raise DataError(f"{where}: {key!r} has no tokens; fill it in or remove the line")
    return tuple(token_ids)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content")) for message in value
        )
    )


def _kind(value: Any) -> str:
    """What JSON calls the value's type, with a short look at it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    text = json.dumps(value)
    return f"{names.get(type(value), 'a number')}: {text if len(text) <= 60 else text[:57] + '...'}"
