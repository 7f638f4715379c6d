"""The Responses API of OpenAI, as the openai-agents SDK uses it: text and function tools, mapped onto chat requests.

    instructions                        the system's message
    input: text, or a list of           messages: of the user
        role, content                   the message
        function_call                   a tool call of the assistant's message before it
        function_call_output            the message of a tool
    output                              a message if there is text, and a function_call for each tool call

Nothing is remembered between requests: each has its whole input, from which the gateway knows the tokens that it continues.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tepo_megatron.base.types import SamplingParams
from tepo_megatron.rollout.agent import ChatReply
from tepo_megatron.rollout.chat import Message
from tepo_megatron.rollout.chat_request import MODEL, MOST_MESSAGES, ChatRequest, checked_fields, read_message, refuse

_HONOURED = {"input", "instructions", "model", "tools", "max_output_tokens", "stream"}
_DEFAULTS: dict[str, Any] = {
    "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled", "text": {"format": {"type": "text"}},
    "include": [], "background": False, "top_logprobs": 0, "stream_options": {},
}  # fmt: skip
# What an item of an earlier output has besides: nothing that the model reads.
_LABELS = {"type", "id", "status", "phase"}
# `strict` asks that arguments fit the schema, which no turn of a policy is made to do: the agent checks them, as it does anyway
_OF_TOOLS = {"type", "name", "description", "parameters", "strict"}


def read_request(body: Any, sampling: SamplingParams) -> ChatRequest:
    """Return the chat request of a request to the Responses API. Raises RefusedRequest."""
    fields = checked_fields(body, sampling, _HONOURED, _DEFAULTS)
    instructions, items, stream = fields.get("instructions"), fields.get("input"), fields.get("stream", False)
    if not isinstance(stream, bool):
        refuse("stream must be true or false")
    if not isinstance(instructions, str | None):
        refuse("instructions must be text")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not 0 < len(items) <= MOST_MESSAGES:
        refuse(f"input must be text, or a list of 1 to {MOST_MESSAGES} items")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for place, item in enumerate(items):
        _add(messages, f"input[{place}]", item)
    tools, limit = _tools(fields.get("tools", [])), fields.get("max_output_tokens")
    return ChatRequest(messages, tools, limit, stream=stream, ends_when_cut=True)  # for the SDK raises when it is "incomplete"


def response(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """Return the response of a turn."""
    cut = reply.turn.stop_reason == "length"
    status, written = "incomplete" if cut else "completed", len(reply.turn.token_ids)
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": MODEL,
        "output": _output(reply.message, status),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, "parameters": None, **tool["function"]} for tool in request.tools],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + written,
        },
    }


def events(request: ChatRequest, reply: ChatReply) -> list[str]:
    """Return the server-sent events of a streamed response."""
    whole = response(request, reply)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    stream: list[dict[str, Any]] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(whole["output"]):
        at, empty = {"output_index": index, "item_id": item["id"]}, {**item, "status": "in_progress"}
        if item["type"] == "message":
            at, part, empty = {**at, "content_index": 0}, item["content"][0], {**empty, "content": []}
            inner = [
                {"type": "response.content_part.added", "part": {**part, "text": ""}, **at},
                {"type": "response.output_text.delta", "delta": part["text"], "logprobs": [], **at},
                {"type": "response.output_text.done", "text": part["text"], "logprobs": [], **at},
                {"type": "response.content_part.done", "part": part, **at},
            ]
        else:
            empty = {**empty, "arguments": ""}
            inner = [
                {"type": "response.function_call_arguments.delta", "delta": item["arguments"], **at},
                {"type": "response.function_call_arguments.done", "arguments": item["arguments"], "name": item["name"], **at},
            ]
        stream.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        stream += [*inner, {"type": "response.output_item.done", "output_index": index, "item": item}]
    stream.append({"type": f"response.{whole['status']}", "response": whole})
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(stream)]
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered]


def _add(messages: list[Message], place: str, item: Any) -> None:
    """Add an item of the input: a message of its own, or a tool call of the last one."""
    kind = item.get("type") or "message" if isinstance(item, dict) else type(item).__name__
    if kind == "message":
        messages.append(read_message(place, {key: value for key, value in item.items() if key not in _LABELS}))
    elif kind == "function_call":
        if not all(isinstance(item.get(key), str) for key in ("call_id", "name", "arguments")):
            refuse(f"{place} must have call_id, name and arguments, which are texts")
        call = {"name": item["name"], "arguments": item["arguments"]}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        calls = [*messages[-1].get("tool_calls", ()), {"id": item["call_id"], "type": "function", "function": call}]
        messages[-1] = {**messages[-1], "tool_calls": calls}
    elif kind == "function_call_output":
        message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append(read_message(place, message))
    else:
        refuse(f"{place} is of type {kind!r}; the gateway takes messages, function_call and function_call_output")


def _tools(tools: Any) -> list[Any]:
    functions = []
    for place, tool in enumerate(tools if isinstance(tools, list) else [None]):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            refuse('tools must be a list of {"type": "function", "name": ..., ...}')
        if others := sorted(key for key in tool.keys() - _OF_TOOLS if tool[key]):
            refuse(f"tools[{place}].{others[0]}: not supported by the gateway; leave it out")
        shown = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        functions.append({"type": "function", "function": shown})
    return functions


def _output(message: Message, status: str) -> list[dict[str, Any]]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    output: list[dict[str, Any]] = []
    if message["content"] or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": []}
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        output.append({**head, "status": status, "content": [part]})
    for call in calls:
        head = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed"}
        output.append({**head, "call_id": call["id"], **call["function"]})
    return output
