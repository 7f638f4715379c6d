"""Where prompt and answer stand in a row: the schemas that are known, and how one is recognized."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.data.readers import Row, kind
from tepo_megatron.errors import DataError
from tepo_megatron.rewards.boxed import last_boxed

Messages = list[dict[str, Any]]


class MissingKeyError(DataError):
    """A row lacks `key`, which `option` names."""

    def __init__(self, key: str, option: str) -> None:
        super().__init__(f"key {key!r} is missing; add it or set {option}")
        self.key, self.option = key, option


_PROMPTS = ("prompt", "problem", "question", "input", "messages")
_ANSWERS = ("answer", "expected_answer", "final_answer", "ground_truth", "solution", "label", "output")
_HASHES = re.compile(r"\n#### *([^\n]+?)\s*$")  # how GSM8K's worked solutions end


@dataclass(frozen=True)
class Schema:
    """Dotted keys lead into objects. The same key twice: the last message is the assistant's, with the answer."""

    name: str
    prompt_key: str
    answer_key: str

    def __str__(self) -> str:
        return f"{self.name} ({self.prompt_key}, {self.answer_key})"


# in this order: a row may fit several
SCHEMAS = (
    Schema("own", "prompt", "answer"),
    Schema("verl", "prompt", "reward_model.ground_truth"),
    Schema("open-r1", "prompt", "solution"),
    Schema("slime", "prompt", "label"),
    Schema("NeMo-RL", "input", "output"),
    Schema("NeMo-RL messages", "messages", "messages"),
    *(Schema("plain", prompt, answer) for prompt in _PROMPTS for answer in _ANSWERS),
)


def detect(row: Row, prompt_key: str | None, answer_key: str | None) -> Schema | None:
    """The schema of a row, with the keys that are given; None where none fits."""
    if prompt_key is not None and answer_key is not None:
        return next((s for s in SCHEMAS if (s.prompt_key, s.answer_key) == (prompt_key, answer_key)), None) or Schema(
            "keys", prompt_key, answer_key
        )
    for schema in SCHEMAS:
        keys = Schema(schema.name, prompt_key or schema.prompt_key, answer_key or schema.answer_key)
        if schema.prompt_key == schema.answer_key and (
            prompt_key or answer_key or not _ends_with_answer(row, schema.prompt_key)
        ):
            continue
        # of verl's rows the prompt is a chat; where it is a string and there is a solution, open-r1 has made it of one
        if schema.name == "verl" and not isinstance(row.get("prompt"), list) and "solution" in row:
            continue
        if has(row, keys.prompt_key) and has(row, keys.answer_key):
            return keys if (prompt_key, answer_key) == (None, None) else Schema("keys", keys.prompt_key, keys.answer_key)
    return None


def _ends_with_answer(row: Row, key: str) -> bool:
    messages, _ = _reach(row, key)
    return is_chat(messages) and bool(messages[-1]["role"] == "assistant")


def has(row: Row, key: str) -> bool:
    """Whether the row holds something there."""
    return _reach(row, key)[1]


def _reach(row: Mapping[str, Any], key: str) -> tuple[Any, bool]:
    """(what stands there, whether it does)."""
    if key in row:
        return row[key], True
    head, dot, rest = key.partition(".")
    inner = row.get(head)
    return _reach(inner, rest) if dot and isinstance(inner, Mapping) else (None, False)


def take(row: Row, schema: Schema) -> tuple[str | Messages, str]:
    """(prompt, gold answer) of a row. Raises DataError with the key and the mend, not where it is."""
    for key, option in ((schema.prompt_key, "data.prompt_key"), (schema.answer_key, "data.answer_key")):
        if not has(row, key):
            raise MissingKeyError(key, option)
    prompt = _prompt(_reach(row, schema.prompt_key)[0], schema.prompt_key)
    if schema.prompt_key != schema.answer_key:
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{schema.prompt_key!r} ends with the assistant's message, and a prompt ends before it; remove it (where it is "
                "the answer, set data.answer_key to the same key)"
            )
        return prompt, gold(_reach(row, schema.answer_key)[0], schema.answer_key)
    if not isinstance(prompt, list) or len(prompt) < 2 or prompt[-1]["role"] != "assistant":
        raise DataError(f"{schema.prompt_key!r} must end with the assistant's message, which is the answer; add it")
    return prompt[:-1], gold(prompt[-1]["content"], schema.answer_key)


def gold(value: Any, key: str) -> str:
    r"""The answer as a string: a number's digits, the only entry of a list, of a worked solution its last `\boxed{}` or what
    follows `####`. Raises DataError.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{key!r} is {value}; an answer must be finite")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{key!r} must be a string or a number, or a list of one, not {kind(value)}")
    text = str(value)
    if "boxed" in text:
        text = last_boxed(text) or text
    elif "####" in text and (hashes := _HASHES.search(text)):
        text = hashes[1]
    if not text.strip():
        raise DataError(f"{key!r} is blank, so no response could be right; fill it in or remove the row")
    return text


def _prompt(value: Any, key: str) -> str | Messages:
    if isinstance(value, str):
        return value
    if is_chat(value):
        # columns hold null for what other messages have
        return [{k: v for k, v in message.items() if v is not None} for message in value]
    raise DataError(f"{key!r} must be a string or a list of messages with string 'role' and 'content', not {kind(value)}")


def is_chat(value: Any) -> bool:
    """Whether it is a list of messages that a template could know."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content")) for message in value
        )
    )
