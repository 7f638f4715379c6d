"""Read rows of a dataset as conversations. A column or key that changes what is learned is honoured, or refused by its name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import SftConfig
from tepo_megatron.data.readers import Row, describe_value
from tepo_megatron.data.schemas import Messages, has, is_chat, value_at

_CHATS = ("messages", "conversations", "conversation", "prompt")
_PAIRS = tuple(
    (prompt, response)
    for prompt in ("prompt", "instruction", "question", "problem", "input", "query")
    for response in ("response", "completion", "output", "answer", "solution")
)
_SHARE_GPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
# columns that would be part of the prompt, or of what its template gets
_OF_PROMPT = ("history", "functions", "documents", "chat_template_kwargs", "images", "videos", "audios")
_SWITCHES = ("weight", "train", "training", "loss", "loss_mask")  # keys of a turn that say whether it is learned
_PARTIAL = ("train_detail", "prefix")  # keys of a turn of which a part is learned


@dataclass(frozen=True)
class Chat:
    """A conversation in messages."""

    messages: Messages
    learned: tuple[bool, ...]  # for each message, whether its turn may be learned
    tools: tuple[Any, ...] = ()  # the tools that the template shows


def read_row(row: Row, cfg: SftConfig) -> Chat | tuple[str, str]:
    """Return the chat of a row, or its prompt and response. Raises DataError for a row that has neither, or that says more."""
    for key in _OF_PROMPT:
        if row.get(key):
            raise DataError(f"has {key!r}, which is not read; write it into the messages, or remove it")
    conversation = _chat_of(row, cfg) or _pair_of(row, cfg)
    system, tools = row.get("system"), _tools(row.get("tools"))
    if isinstance(conversation, tuple):
        unread = [key for key in ("system", "tools") if row.get(key)]
        if row.get("context") and cfg.prompt_key is None:
            unread.append("context")
        if unread:
            raise DataError(f"has {unread[0]!r}, and its prompt is a string, which is learned from as it is; write a chat")
        return conversation
    messages, learned = conversation.messages, conversation.learned
    if system:
        if not isinstance(system, str):
            raise DataError(f"'system' must be a string, not {describe_value(system)}")
        if messages[0]["role"] != "system":
            messages, learned = [{"role": "system", "content": system}, *messages], (False, *learned)
        elif messages[0]["content"] != system:
            raise DataError("has 'system' and another message of the system; keep one of them")
    return Chat(messages, learned, tools)


def _chat_of(row: Row, cfg: SftConfig) -> Chat | None:
    if cfg.response_key is not None:
        return None
    for key in (cfg.prompt_key,) if cfg.prompt_key is not None else _CHATS:
        if has(row, key) and isinstance(value_at(row, key), list):
            chat = _chat(value_at(row, key), key)
            # otherwise the response is in a column of its own
            if key != "prompt" or (chat.messages[-1]["role"] == "assistant" and not has(row, "completion")):
                return chat
    return None


def _pair_of(row: Row, cfg: SftConfig) -> Chat | tuple[str, str]:
    pairs = [(cfg.prompt_key or prompt, cfg.response_key or response) for prompt, response in _PAIRS]
    for prompt_key, response_key in pairs:
        if prompt_key == response_key or not (has(row, prompt_key) and has(row, response_key)):
            continue
        prompt, response = value_at(row, prompt_key), value_at(row, response_key)
        if isinstance(prompt, list):
            asked = _chat(prompt, prompt_key)
            if isinstance(response, str):
                answer = Chat([{"role": "assistant", "content": response}], (True,))
            elif isinstance(response, list):
                answer = _chat(response, response_key)
            else:
                raise DataError(f"{response_key!r} must be a string or messages, not {describe_value(response)}")
            return Chat([*asked.messages, *answer.messages], (*(False for _ in asked.messages), *answer.learned))
        if prompt_key == "instruction" and isinstance(row.get("input"), str) and row["input"]:
            prompt = f"{prompt}\n\n{row['input']}"
        if not isinstance(prompt, str) or not isinstance(response, str):
            what = describe_value(response if isinstance(prompt, str) else prompt)
            raise DataError(f"{prompt_key!r} and {response_key!r} must be two strings or two lists of messages, not {what}")
        return prompt, response
    columns = ", ".join(map(repr, row)) or "none"
    raise DataError(
        f"no chat and no prompt with a response in these keys: {columns}; name them with sft.prompt_key and sft.response_key"
    )


def _tools(value: Any) -> tuple[Any, ...]:
    """Return the column `tools`: a list, or its JSON."""
    if not value:
        return ()
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as e:
        raise DataError(f"'tools' is not valid JSON ({e})") from None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"'tools' must be a list of tools, or the JSON of one, not {describe_value(value)}")
    return tuple(_without_nulls(tools or ()))


def _without_nulls(value: Any) -> Any:
    """Return a value without null keys: parquet writes each key of a struct in all its rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _chat(value: Any, key: str) -> Chat:
    """Return messages with role and content; ShareGPT's `from` and `value` are renamed."""
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value):
        unknown = sorted({str(m["from"]) for m in value} - _SHARE_GPT.keys())
        if unknown:
            raise DataError(f"{key!r} has a message from {unknown[0]!r}; known are {', '.join(_SHARE_GPT)}")
        value = [{**m, "role": _SHARE_GPT[m["from"]], "content": m["value"]} for m in value]
        value = [{k: v for k, v in m.items() if k not in ("from", "value")} for m in value]
    if isinstance(value, list):  # OpenAI's form: a message that calls tools has no content
        value = [{**m, "content": ""} if _only_calls(m) else m for m in value]
    if not is_chat(value):
        raise DataError(f"{key!r} must be a list of messages with string 'role' and 'content', not {describe_value(value)}")
    messages = [_without_nulls(message) for message in value]
    learned = tuple(_is_learned(message, i) for i, message in enumerate(messages))
    return Chat([{k: v for k, v in m.items() if k not in _SWITCHES} for m in messages], learned)


def _only_calls(message: Any) -> bool:
    return isinstance(message, dict) and message.get("content") is None and bool(message.get("tool_calls"))


def _is_learned(message: Mapping[str, Any], number: int) -> bool:
    """Return whether a turn may be learned, as its own keys say. Raises DataError for what is neither yes nor no."""
    for key in _PARTIAL:
        if message.get(key):
            raise DataError(f"message {number} has {key!r}, which is not read; mark whole turns with 'weight', or remove it")
    switches = {key: message[key] for key in _SWITCHES if key in message}
    for key, value in switches.items():
        if value not in (0, 1):  # also of booleans and floats
            raise DataError(f"message {number} has {key!r}: {value!r}; a turn is learned (1, true) or not (0, false)")
        if value and message["role"] != "assistant" and key in ("train", "training", "loss"):
            raise DataError(f"message {number} of the {message['role']} has {key!r}: true; only the assistant's are learned")
    return message["role"] == "assistant" and all(switches.values())
