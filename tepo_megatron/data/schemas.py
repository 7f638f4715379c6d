"""Known row schemas: the columns of prompt and gold answer, and how a row's schema is detected."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.data.readers import Row, describe_value
from tepo_megatron.rewards.grading.answers import canonical, last_boxed

Messages = list[dict[str, Any]]


class MissingKeyError(DataError):
    """A row lacks `key`, which the config option `option` sets."""

    def __init__(self, key: str, option: str) -> None:
        """Build the message."""
        super().__init__(f"key {key!r} is missing; add it or set {option}")
        self.key, self.option = key, option


_PROMPTS = ("prompt", "problem", "question", "input", "messages")
_ANSWERS = ("answer", "expected_answer", "final_answer", "ground_truth", "solution", "label", "output")
_WORKED = ("solution", "output", "messages")  # columns that may hold prose without an answer
_HASHES = re.compile(r"(?<!#)####[ \t]*([^\s#][^\n]*?)\s*$")  # GSM8K's worked solutions end like this
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}")  # a text with words, and without a box or `####`, is prose
_NAMED = re.compile(r"^[A-Za-z](=|\\in(?![a-z]))(?!.*=)")  # `x=` of one solution


@dataclass(frozen=True)
class Schema:
    """Names the keys of prompt and gold answer. Dotted keys lead into nested objects.

    If both keys are the same, they name a chat whose last message, the assistant's, is the answer.
    """

    name: str
    prompt_key: str
    answer_key: str

    def __str__(self) -> str:
        """Return the name and both keys."""
        return f"{self.name} ({self.prompt_key}, {self.answer_key})"


# the first match counts: a row may fit several
SCHEMAS = (
    Schema("own", "prompt", "answer"),
    Schema("verl", "prompt", "reward_model.ground_truth"),
    Schema("open-r1", "prompt", "solution"),
    Schema("slime", "prompt", "label"),
    Schema("NeMo-RL", "input", "output"),
    *(Schema("plain", prompt, answer) for prompt in _PROMPTS if prompt != "messages" for answer in _ANSWERS),
    Schema("NeMo-RL messages", "messages", "messages"),  # behind those that name an answer: its message may be a sample
    *(Schema("plain", "messages", answer) for answer in _ANSWERS),
)


def detect(row: Row, prompt_key: str | None, answer_key: str | None) -> Schema | None:
    """Return the schema of a row, or None if none fits."""
    return next(iter(fitting(row, prompt_key, answer_key)), None)


def fitting(row: Row, prompt_key: str | None, answer_key: str | None) -> list[Schema]:
    """Return all schemas that a row fits; the first one counts."""
    if prompt_key is not None and answer_key is not None:
        known = (schema for schema in SCHEMAS if (schema.prompt_key, schema.answer_key) == (prompt_key, answer_key))
        return [next(known, Schema("keys", prompt_key, answer_key))]
    schemas: dict[tuple[str, str], Schema] = {}
    for schema in SCHEMAS:
        keys = Schema(schema.name, prompt_key or schema.prompt_key, answer_key or schema.answer_key)
        if schema.prompt_key == schema.answer_key and (
            prompt_key or answer_key or not _ends_with_answer(row, schema.prompt_key)
        ):
            continue
        # verl's prompt is a chat; a string prompt with a solution next to verl's keys is open-r1's version of a verl dataset
        if schema.name == "verl" and not isinstance(row.get("prompt"), list) and "solution" in row:
            continue
        if has(row, keys.prompt_key) and has(row, keys.answer_key):
            name = schema.name if (prompt_key, answer_key) == (None, None) else "keys"
            schemas.setdefault((keys.prompt_key, keys.answer_key), Schema(name, keys.prompt_key, keys.answer_key))
    return list(schemas.values())


def answers_of(row: Row) -> dict[str, str]:
    """Return the gold answers of all columns that may hold one, by key. Prose and values that are no answers are left out."""
    answers = {}
    for key in dict.fromkeys(schema.answer_key for schema in SCHEMAS):
        value = value_at(row, key)
        if key == "messages":
            value = value[-1]["content"] if _ends_with_answer(row, key) else None
        try:
            text = gold(value, key)
        except DataError:
            continue
        if key not in _WORKED or text != value or not _WORD.search(text):
            answers[key] = text
    return answers


def same_gold(a: str, b: str) -> bool:
    """Return whether two gold answers are the same, but for spelling. Values are not compared: 1/2 is not 0.5."""
    a, b = map(_spelling, (a, b))
    if bool(_NAMED.match(a)) != bool(_NAMED.match(b)):  # `x=3` and `3`; `x=3` and `y=3` stay apart
        a, b = (_NAMED.sub("", text) for text in (a, b))
    try:
        return a == b or Decimal(a.replace(",", "")) == Decimal(b.replace(",", ""))
    except ArithmeticError:
        return False


def _spelling(gold: str) -> str:
    r"""Return an answer without spaces, fonts, braces around one character, and parentheses around one capital.

    >>> _spelling(r"\frac{1}{2}"), _spelling("1/2"), _spelling(r"\textbf{(B)}"), _spelling("x = 3")
    ('\\frac12', '\\frac12', 'B', 'x=3')
    """
    text = re.sub(r"\s|\\left(?![a-z])|\\right(?![a-z])|\\(?=%)", "", canonical(gold))
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"\{(\w)\}", r"\1", text)
    return re.sub(r"^\(([A-Z])\)$", r"\1", text)


def _ends_with_answer(row: Row, key: str) -> bool:
    messages, _ = _reach(row, key)
    return is_chat(messages) and bool(messages[-1]["role"] == "assistant")


def has(row: Row, key: str) -> bool:
    """Return whether the row has this key."""
    return _reach(row, key)[1]


def value_at(row: Row, key: str) -> Any:
    """Return the value at a dotted key; None if the row lacks it."""
    return _reach(row, key)[0]


def _reach(row: Mapping[str, Any], key: str) -> tuple[Any, bool]:
    """Return (the value at a dotted key, whether the row has the key)."""
    if key in row:
        return row[key], True
    head, dot, rest = key.partition(".")
    inner = row.get(head)
    return _reach(inner, rest) if dot and isinstance(inner, Mapping) else (None, False)


def prompt_and_answer(row: Row, schema: Schema) -> tuple[str | Messages, str]:
    """Return (prompt, gold answer) of a row.

    Raises:
        MissingKeyError: The row lacks one of the two keys.
        DataError: A value cannot be used. The message has the key and the fix, but not the place of the row.
    """
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
    r"""Return the gold answer as a string.

    Unit tests of a program give their JSON. A number gives its digits without an exponent, a list its only entry, a worked
    solution the content of its last `\boxed{}` or the text after `####` on its last line (GSM8K).

    Raises:
        DataError: The value is none of these, or blank.
    """
    if _are_tests(value):
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (float, Decimal)) and not math.isfinite(value):
        raise DataError(f"{key!r} is {value}; an answer must be finite")
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise DataError(f"{key!r} must be a string or a number, or a list of one, not {describe_value(value)}")
    text = value if isinstance(value, str) else digits_of(value)
    if "boxed" in text:
        boxed = last_boxed(text)
        text = text if boxed is None else boxed
    elif "####" in text and (hashes := _HASHES.search(text)):
        text = hashes[1]
    if not text.strip():
        raise DataError(f"{key!r} is blank, so no response could be right; fill it in or remove the row")
    return text


def digits_of(number: float | Decimal) -> str:
    """Return the shortest digits that read as this finite number, without an exponent.

    >>> digits_of(5e-05), digits_of(1e16), digits_of(7)
    ('0.00005', '10000000000000000', '7')
    """
    return format(Decimal(str(number)), "f")


def _are_tests(value: Any) -> bool:
    """Return whether an answer looks like unit tests, as `rewards/grading/programs.py` reads them; only that can say it."""
    match value:
        case str():
            return value.lstrip().startswith(('{"', '[{"', '["assert', "assert "))
        case {"inputs": _} | {"tests": _} | {"test_list": _} | {"test": _, "entry_point": _}:
            return True
        case [{"input": _, "output": _}, *_]:
            return True
        case [str(first), *_]:
            return first.lstrip().startswith("assert ")
    return False


def _prompt(value: Any, key: str) -> str | Messages:
    """Return a prompt column's value as a string or chat. Raise DataError if it is neither."""
    if isinstance(value, str):
        return value
    if is_chat(value):
        # parquet columns hold null for the keys that only other messages have
        return [{k: v for k, v in message.items() if v is not None} for message in value]
    raise DataError(
        f"{key!r} must be a string or a list of messages with string 'role' and 'content', not {describe_value(value)}"
    )


def is_chat(value: Any) -> bool:
    """Return whether the value is a non-empty list of messages, each with a string `role` and `content`."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
