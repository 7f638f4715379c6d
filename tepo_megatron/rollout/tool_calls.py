"""Read tool calls from what a model wrote, in the form that its chat template teaches.

    Hermes, Qwen2.5, Qwen3     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder, Qwen3.5       <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    Llama 3                    {"name": "add", "parameters": {"a": 1}}; ...
    Mistral                    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}

A text is read as calls as a whole: if one of them is malformed, the text is the content of the message, as in vLLM.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_MISTRAL, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_FUNCTION, _PARAMETER = "<function=", "<parameter="


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls.

    Attributes:
        mark: A part of every chat template that teaches this form.
        opening: Text with which the first call begins. Empty: a text with calls has no other content.
        read: Yields the calls of a text that has `opening`, given the request's tools. Raises ValueError if one is malformed.
        framed: Whether white space before the first call belongs to the call.
        special: Whether `opening` is a special token, so that the text has to be decoded with these.
        id_length: Length of the ids that chat templates require. None: any.
    """

    mark: str
    opening: str
    read: Callable[[str, Sequence[Any]], Iterator[ToolCall]]
    framed: bool = False
    special: bool = False
    id_length: int | None = None

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


def _call(found: Any) -> ToolCall:
    name = found["name"]
    arguments = found["arguments"] if "arguments" in found else found.get("parameters", {})
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
        found, end = decoder.raw_decode(text, start)
        yield _call(found)
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
