"""Render chat messages as tokens, and read tool calls from what the model wrote.

The tokens of earlier turns are never rendered again: `continuation` returns only what follows the model's last turn.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tepo_megatron.rollout.tool_calls import form_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_encode = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` would make an encoder for each message


class ChatFormat:
    """The chat template of a tokenizer. Without a template, a chat is the concatenation of its messages' contents."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._tokenizer, self.encode, self.decode = tokenizer, encode, decode
        self._end = str(tokenizer.eos_token or "")
        self._form = form_of(tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template is not None else None)

    def start(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of a conversation that begins with these messages, up to where the model writes."""
        return list(self.encode(self._render(messages, tools, True)))

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[Any], known: int, last_id: int
    ) -> tuple[list[int] | None, bool]:
        """Return the tokens between the model's last turn and its next one, and whether the template rewrote earlier messages.

        Returns (tokens, rewrote); tokens is None if the template does not tell where the new messages begin.
        """
        before, whole = self._render(messages[:known], tools, False), self._render(messages, tools, True)
        ends = before.count(self._end) if self._end else 0
        if not ends:
            return (list(self.encode(whole[len(before) :])), False) if whole.startswith(before) else (None, True)
        parts = whole.split(self._end, ends)
        if len(parts) <= ends:
            return None, True
        opening = "" if last_id == self._tokenizer.eos_token_id else self._end
        kept = before[: before.rindex(self._end)]
        return list(self.encode(opening + parts[ends])), not whole.startswith(kept)

    def reply(self, ids: Sequence[int], tools: Sequence[Any], before: int = 0) -> Message:
        """Return the assistant's message of a turn. Tool calls are read if the request has tools.

        Templates may render the names of calls, so these follow from the tokens: the same samples give the same prompts.
        """
        text = self.decode(ids)
        if not tools:
            return {"role": "assistant", "content": text}
        written = self._with_special_tokens(ids).removesuffix(self._end) if self._form.special else text
        before_calls, found = self._form.split(written, tools)
        if not found:
            return {"role": "assistant", "content": text}
        calls = [
            {"id": self._call_id(before, i, ids), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(found)
        ]
        return {"role": "assistant", "content": before_calls or None, "tool_calls": calls}

    def drifts(self, ids: Sequence[int]) -> bool:
        """Return whether encoding the text of these tokens gives other tokens, as a server without token ids would train on."""
        return list(self.encode(self._with_special_tokens(ids))) != list(ids)

    def stop_ids(self, stops: Sequence[str]) -> dict[int, str]:
        """Return the token of each stop string. Raise ValueError for one that is not one token."""
        found = {}
        for stop in stops:
            ids = list(self.encode(stop))
            if len(ids) != 1:
                raise ValueError(f"stop={stop!r}: only a string of one token can end a turn, and this one has {len(ids)}")
            found[ids[0]] = stop
        return found

    def _with_special_tokens(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _call_id(self, before: int, number: int, ids: Sequence[int]) -> str:
        name = hashlib.blake2b(json.dumps([before, number, list(ids)]).encode(), digest_size=12).hexdigest()
        return f"call_{name}" if self._form.id_length is None else name[: self._form.id_length]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], open_turn: bool) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(str(message.get("content") or "") for message in messages)
        rendered = self._tokenizer.apply_chat_template(
            [_with_parsed_arguments(message) for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=open_turn,
            tokenize=False,
        )
        return str(rendered)


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Return a digest of the first k messages for each k from 1, equal for what a client got and what it sends back."""
    state, found = hashlib.blake2b(_encode(list(tools)).encode()).digest(), []
    for message in messages:
        state = digest_with(state, message)
        found.append(state)
    return found


def digest_with(digest: bytes, message: Message) -> bytes:
    """Return the digest of some messages and one that follows them."""
    calls = [[call.get("id"), call.get("function")] for call in message.get("tool_calls") or ()]
    fields = [message.get("role"), message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")]
    return hashlib.blake2b(digest + _encode(fields).encode()).digest()


def _with_parsed_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
