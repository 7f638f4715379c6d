"""Read a chat completion request. Each of its fields is honoured or refused: none is ignored that changes the answer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tepo_megatron.base.types import SamplingParams
from tepo_megatron.rollout.chat import Message

MODEL = "policy"
MOST_MESSAGES = 10_000
_KEEPS_STOP = ("include_stop_str_in_output", "no_stop_trim")  # vLLM's name and SGLang's
_LIMITS = ("max_completion_tokens", "max_tokens")
_HONOURED = {"messages", "model", "tools", "stop", "stream", "stream_options", *_LIMITS, *_KEEPS_STOP}
# Labels, for billing and storing: nothing that is sampled, shown or rendered depends on them.
_LABELS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
}  # fmt: skip
# The one value of a field that asks for what the gateway does anyway. null does so, too.
_DEFAULTS: dict[str, Any] = {
    "n": 1, "best_of": 1, "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "modalities": ["text"],
    "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "echo": False,
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0, "ignore_eos": False,
    "stop_token_ids": [], "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False,
    "add_special_tokens": False, "chat_template_kwargs": {},
}  # fmt: skip
_OF_STREAMS = ("include_usage", "include_obfuscation")
_TEXTS = ("text", "input_text", "output_text")  # the last two are of the Responses API
_OF_MESSAGES = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class RefusedRequest(Exception):
    """A request that the gateway refuses, with an OpenAI error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion request that was checked."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    stream: bool = False  # whether the answer is sent in chunks
    with_usage: bool = False  # whether the last chunk has the numbers of tokens
    # Whether an agent that raises after a turn that was cut off ends its sample there, instead of losing it
    ends_when_cut: bool = False


def read_request(body: Any, sampling: SamplingParams) -> ChatRequest:
    """Return the request in a JSON body, whose sample is made with `sampling`. Raises RefusedRequest."""
    fields = checked_fields(body, sampling, _HONOURED, _DEFAULTS)
    limits = {name: fields[name] for name in _LIMITS if name in fields}
    flags = {name: fields.get(name, False) for name in ("stream", *_KEEPS_STOP)} | _stream_options(fields)
    if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
        refuse(f"{wrong[0]} must be true or false")
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        refuse("stop must be a string or a list of strings")
    return ChatRequest(
        messages=_messages(fields.get("messages")),
        tools=_tools(fields.get("tools", [])),
        max_tokens=min(limits.values(), default=None),
        stops=stops,
        keeps_stop=any(flags[name] for name in _KEEPS_STOP),
        stream=flags["stream"],
        with_usage=flags.get("include_usage", False),
    )


def checked_fields(
    body: Any, sampling: SamplingParams, honoured: Collection[str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that are not null. Raises RefusedRequest unless each is honoured, a label, or at its default."""
    if not isinstance(body, dict):
        refuse("a request is a JSON object")
    defaults = {**defaults, **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}}
    fields = {name: value for name, value in body.items() if value is not None}
    if not fields.get("tools") and fields.get("tool_choice") == "none":
        del fields["tool_choice"]
    for name in sorted(fields.keys() - set(honoured) - _LABELS):
        if name not in defaults:
            refuse(f"{name}: not supported by the gateway; leave it out")
        if fields[name] != defaults[name]:
            hint = "; send several requests, each is a branch of the sample" if name == "n" else ""
            refuse(f"{name}={fields[name]!r:.80}: the gateway has only {defaults[name]!r}; leave it out{hint}")
    if (model := fields.get("model", MODEL)) != MODEL:
        refuse(f"model={model!r:.80}: only {MODEL!r} is served here; a judge of your own needs a client of its own")
    for name in fields.keys() & {*_LIMITS, "max_output_tokens"}:
        if type(fields[name]) is not int or fields[name] < 1:
            refuse(f"{name}={fields[name]!r:.80} must be a positive integer")
    return fields


def _stream_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= set(_OF_STREAMS):
        refuse(f"stream_options must be an object with {' or '.join(_OF_STREAMS)}")
    return {name: value for name, value in options.items() if value is not None}


def _tools(tools: Any) -> list[Any]:
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse('tools must be a list of {"type": "function", "function": {"name": ..., ...}}')
    return list(tools)


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        refuse(f"messages must be a list of 1 to {MOST_MESSAGES} messages")
    return [read_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def read_message(place: str, message: Any) -> Message:
    """Return a message whose content is text. Raises RefusedRequest, which names its place, for any other."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        refuse(f"{place} must be an object with a role")
    if others := [name for name in sorted(message.keys() - set(_OF_MESSAGES)) if message[name]]:
        refuse(f"{place}.{others[0]}: not supported by the gateway; leave it out")
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function):
            refuse(f"{place}.tool_calls: each call needs a function with a name and arguments")
    if isinstance(content := message.get("content"), list):
        content = "".join(_text(place, part) for part in content)
    if content is None and not message.get("tool_calls"):
        refuse(f"{place}.content is missing or null, which only a message with tool_calls may be")
    if not isinstance(content, str | None):
        refuse(f"{place}.content must be text")
    return {**message, "content": content}


def _text(place: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = repr(part.get("type")) if isinstance(part, dict) else type(part).__name__
    refuse(f"{place}.content has a part of type {kind}; the gateway takes only parts of type 'text'")


def refuse(why: str) -> NoReturn:
    """Raise the RefusedRequest of a request that cannot be honoured."""
    raise RefusedRequest("invalid_request", why)
