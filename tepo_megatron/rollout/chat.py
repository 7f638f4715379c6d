"""Render chat messages as tokens, and read tool calls from what the model wrote.

The tokens of earlier turns are never rendered again: `continuation` returns only what follows the model's last turn. Tool calls
are read in the form that the chat template teaches:

    Hermes, Qwen2.5, Qwen3     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder, Qwen3.5       <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    Llama 3                    {"name": "add", "parameters": {"a": 1}}; ...
    Mistral                    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}

A text is read as calls as a whole: if one of them is malformed, the text is the content of the message, as in vLLM.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tepo_megatron.data.rendering import ChatRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_MISTRAL, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_MOST_FORMS = 1000


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls."""

    mark: str  # A part of every chat template that teaches this form
    opening: str  # text with which the first call begins. Empty: a text with calls has no other content.
    # Yields the calls of a text that has `opening`, given the request's tools. Raises ValueError if one is malformed.
    read: Callable[[str, Sequence[Any]], Iterator[ToolCall]]
    framed: bool = False  # whether white space before the first call belongs to the call
    special: bool = False  # whether `opening` is a special token, so that the text has to be decoded with these
    id_length: int | None = None  # length of the ids that chat templates require. None: any.

    def split(self, text: str, tools: Sequence[Any]) -> tuple[str, list[ToolCall]]:
        """Return the text before the first call, and the calls. Without a call it is the whole text."""
        if self.opening not in text:
            return text, []
        try:
            calls = list(self.read(text, tools))
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        if not calls:
            return text, []
        content = text[: text.index(self.opening)]
        return (content.rstrip() if self.framed else content), calls


def form_of(template: str | None) -> ToolForm:
    """Return the form that a chat template teaches, Hermes' if it names none."""
    return next((form for form in FORMS if template is not None and form.mark in template), HERMES)


def _call(parsed: Any) -> ToolCall:
    name = parsed["name"]
    arguments = parsed["arguments"] if "arguments" in parsed else parsed.get("parameters", {})
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError(f"no name or no arguments: {name!r}")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _blocks(text: str) -> Iterator[str]:
    """Yield what is between the tags. The last block may be open, because some models end their turn without the tag."""
    for part in text.split(_OPENING)[1:]:
        yield part.partition(_CLOSING)[0]


def _hermes(text: str, tools: Sequence[Any]) -> Iterator[ToolCall]:
    yield from (_call(json.loads(block)) for block in _blocks(text))


def _xml(text: str, tools: Sequence[Any]) -> Iterator[ToolCall]:
    for block in _blocks(text):
        head, opened, body = block.strip().partition(">")
        name = head.removeprefix(_FUNCTION)
        if not (head.startswith(_FUNCTION) and name and opened):
            raise ValueError(f"no function: {head!r}")
        types, arguments = _types(tools, name), {}
        for part in body.split(_PARAMETER)[1:]:
            key, _, rest = part.partition(">")
            value, closed, _ = rest.rpartition("</parameter>")
            if not closed:
                raise ValueError(f"a parameter that does not end: {key!r}")
            arguments[key] = _typed(value.removeprefix("\n").removesuffix("\n"), types.get(key))
        yield ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _types(tools: Sequence[Any], name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Return a parameter's value: text, or JSON if the tool wants another type and the text is such JSON."""
    if kind is None or "string" in kind:  # a JSON type is a name, or a list of names
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _llama(text: str, tools: Sequence[Any]) -> Iterator[ToolCall]:
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        parsed, end = decoder.raw_decode(text, start)
        yield _call(parsed)
        start = text.find("{", end)


def _mistral(text: str, tools: Sequence[Any]) -> Iterator[ToolCall]:
    for part in text.split(_MISTRAL)[1:]:
        if part.lstrip().startswith("["):
            yield from map(_call, json.loads(part))
        else:
            name, _, arguments = part.partition("{")
            yield _call({"name": name.removesuffix(_ARGUMENTS).strip(), "arguments": json.loads("{" + arguments)})


HERMES = ToolForm(_OPENING, _OPENING, _hermes)
# in the order in which a template is searched: a template of the second form has the mark of the third one, too
FORMS = (
    ToolForm(_MISTRAL, _MISTRAL, _mistral, special=True, id_length=9),
    ToolForm("<function=", _OPENING, _xml, framed=True),
    HERMES,
    ToolForm('"parameters": dictionary', "", _llama),
)

Message = dict[str, Any]
_encode = json.JSONEncoder(sort_keys=True).encode  # `json.dumps` would make an encoder for each message


class ChatFormat:
    """The chat template of a tokenizer. Without a template, a chat is the concatenation of its messages' contents."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self.encode, self.decode = tokenizer, encode, decode
        self._renderer = ChatRenderer(tokenizer, template_kwargs)
        self._end = str(tokenizer.eos_token or "")
        template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template is not None else ""
        self._form = form_of(template)
        self._has_developer = "developer" in template
        self._shown: set[object] = set()  # forms of conversations whose messages the template was seen to render

    def start(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of a conversation that begins with these messages, up to where the model writes.

        Raises ValueError for a message, or tools, that the template leaves out.
        """
        self._require_shown(messages, tools, 0)
        return self._tokens(self._render(messages, tools, True))

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[Any], known: int, last_id: int
    ) -> tuple[list[int] | None, bool]:
        """Return the tokens between the model's last turn and its next one, and whether the template rewrote earlier messages.

        Returns (tokens, rewrote); tokens is None if the template does not tell where the new messages begin.

        Raises ValueError for a new message that the template leaves out.
        """
        self._require_shown(messages, tools, known)
        before, whole = self._render(messages[:known], tools, False), self._render(messages, tools, True)
        ends = before.count(self._end) if self._end else 0
        if not ends:
            return (self._tokens(whole[len(before) :]), False) if whole.startswith(before) else (None, True)
        parts = whole.split(self._end, ends)
        if len(parts) <= ends:
            return None, True
        opening = "" if last_id == self._tokenizer.eos_token_id else self._end
        kept = before[: before.rindex(self._end)]
        return self._tokens(opening + parts[ends]), not whole.startswith(kept)

    def user_turn(self, prompt: Sequence[Message], text: str, last_id: int) -> list[int]:
        """Return the tokens between the model's turn, whose last token is `last_id`, and its next one: a user's turn.

        Raises ValueError if the template leaves out the turn or that of the model.
        """
        mark = f"mark{secrets.token_hex(8)}"
        messages = [*prompt, {"role": "assistant", "content": mark}, {"role": "user", "content": text}]
        self._require_shown(messages, (), len(prompt))
        tokens = self._tokens(self._render(messages, (), True).rpartition(mark)[2])
        if last_id in self._tokenizer.all_special_ids and last_id in tokens:  # what closes the model's turn ends with it
            return tokens[tokens.index(last_id) + 1 :]
        return tokens[1:] if tokens[:1] == [last_id] else tokens

    def reply(self, ids: Sequence[int], tools: Sequence[Any], before: int = 0) -> Message:
        """Return the assistant's message of a turn. Tool calls are read if the request has tools."""
        text = self.decode(ids)
        if not tools:
            return {"role": "assistant", "content": text}
        written = self._with_special_tokens(ids).removesuffix(self._end) if self._form.special else text
        before_calls, tool_calls = self._form.split(written, tools)
        if not tool_calls:
            return {"role": "assistant", "content": text}
        calls = [
            {"id": self._call_id(before, i, ids), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(tool_calls)
        ]
        return {"role": "assistant", "content": before_calls or None, "tool_calls": calls}

    def drifts(self, ids: Sequence[int]) -> bool:
        """Return whether encoding the text of these tokens gives other tokens, as a server without token ids would train on."""
        return list(self.encode(self._with_special_tokens(ids))) != list(ids)

    def stop_ids(self, stops: Sequence[str]) -> dict[int, str]:
        """Return the token of each stop string. Raise ValueError for one that is not one token."""
        single = {}
        for stop in stops:
            ids = list(self.encode(stop))
            if len(ids) != 1:
                raise ValueError(f"stop={stop!r}: only a string of one token can end a turn, and this one has {len(ids)}")
            single[ids[0]] = stop
        return single

    def _with_special_tokens(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _call_id(self, before: int, number: int, ids: Sequence[int]) -> str:
        name = hashlib.blake2b(json.dumps([before, number, list(ids)]).encode(), digest_size=12).hexdigest()
        return f"call_{name}" if self._form.id_length is None else name[: self._form.id_length]

    def _require_shown(self, messages: Sequence[Message], tools: Sequence[Any], known: int) -> None:
        """Raise ValueError for a message, from the `known`-th on, whose text or calls the template leaves out, and for tools.

        A mark in their place has to come out of the template. Whether it does depends on the roles, so each form is tried once.
        """
        form = known, bool(tools), tuple((m["role"], bool(m.get("content")), len(m.get("tool_calls") or ())) for m in messages)
        if form in self._shown:
            return
        marks: dict[str, int] = {}
        marked = [*messages[:known], *(_marked(m, place, marks) for place, m in enumerate(messages[known:], known))]
        mark = secrets.token_hex(8)
        named = [{**tool, "function": {**tool["function"], "name": mark}} for tool in tools]
        text = self._render(marked, named, True)
        if tools and mark not in text:
            raise ValueError(
                "tools: the chat template shows the model no tools; use one that does, or describe them in a message"
            )
        if hidden := [mark for mark in marks if mark not in text]:
            place = marks[hidden[0]]
            role = messages[place]["role"]
            raise ValueError(f"messages[{place}]: the chat template leaves out this message of role {role!r}; use another role")
        if len(self._shown) >= _MOST_FORMS:
            self._shown.clear()
        self._shown.add(form)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], open_turn: bool) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(str(message.get("content") or "") for message in messages)
        return self._renderer.render(list(map(self._as_system, messages)), tools=tools, add_generation_prompt=open_turn)

    def _tokens(self, rendering: str) -> list[int]:
        return self._renderer.encode(rendering).token_ids if self._tokenizer.is_fast else list(self.encode(rendering))

    def _as_system(self, message: Message) -> Message:
        """Return a developer's message as the system's, as engines do, unless the template knows developers."""
        return message if message["role"] != "developer" or self._has_developer else {**message, "role": "system"}


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Return a digest of the first k messages for each k from 1, equal for what a client got and what it sends back."""
    state, states = hashlib.blake2b(_encode(list(tools)).encode()).digest(), []
    for message in messages:
        state = digest_with(state, message)
        states.append(state)
    return states


def digest_with(digest: bytes, message: Message) -> bytes:
    """Return the digest of some messages and one that follows them."""
    calls = [[call.get("id"), call["function"]["name"], _arguments(call)] for call in message.get("tool_calls") or ()]
    fields = [message.get("role"), message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")]
    fields += [message["reasoning_content"]] if message.get("reasoning_content") else []
    return hashlib.blake2b(digest + _encode(fields).encode()).digest()


def _arguments(call: Any) -> Any:
    """Return the arguments of a call as JSON values, so that spaces, escapes, the order of keys and 1.0 make no difference."""
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(arguments if isinstance(arguments, str) else json.dumps(arguments), parse_float=_number)
    return arguments


def _number(text: str) -> int | float:
    return int(value) if (value := float(text)).is_integer() else value


def _marked(message: Message, place: int, marks: dict[str, int]) -> Message:
    """Return a message with marks in the places of its text and its calls' names, and note to which message they belong."""

    def mark() -> str:
        name = f"mark{len(marks)}of{secrets.token_hex(8)}"
        marks[name] = place
        return name

    calls = [{**call, "function": {**call["function"], "name": mark()}} for call in message.get("tool_calls") or ()]
    return {**message, **({"content": mark()} if message.get("content") else {}), **({"tool_calls": calls} if calls else {})}
