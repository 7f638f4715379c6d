"""An OpenAI-compatible HTTP endpoint on the loopback interface, with one address and one secret key for each sample.

    POST {base_url}/chat/completions    messages, tools, stop, max_tokens, stream; the run's own sampling parameters apply
    POST {base_url}/responses           the same for the Responses API, without a memory of earlier ones
    GET  {base_url}/models              one model, "policy"

A streamed answer is sent when the turn is complete: tool calls are read from its whole text. A request whose client has gone
before that, as after a timeout, is cancelled in the engine and is no part of the sample.

The Responses API, as the openai-agents SDK uses it, is text and function tools, mapped onto chat requests:

    instructions                        the system's message
    input: text, or a list of           messages: of the user
        role, content                   the message
        function_call                   a tool call of the assistant's message before it
        function_call_output            the message of a tool
    output                              a message if there is text, and a function_call for each tool call

Nothing is remembered between requests: each has its whole input, from which the gateway knows the tokens that it continues.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tepo_megatron.base.types import SamplingParams
from tepo_megatron.rollout.agent import AgentSample, AgentTask, ChatReply
from tepo_megatron.rollout.chat import Message
from tepo_megatron.rollout.chat_request import (
    MODEL,
    MOST_MESSAGES,
    ChatRequest,
    RefusedRequest,
    checked_fields,
    read_message,
    read_request,
    refuse,
)
from tepo_megatron.rollout.conversation import Decode

_HONOURED = {"input", "instructions", "model", "tools", "max_output_tokens", "stream"}
_DEFAULTS: dict[str, Any] = {
    "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled", "text": {"format": {"type": "text"}},
    "include": [], "background": False, "top_logprobs": 0, "stream_options": {},
}  # fmt: skip
# What an item of an earlier output has besides: nothing that the model reads.
_LABELS = {"type", "id", "status", "phase"}
# `strict` asks that arguments fit the schema, which no turn of a policy is made to do: the agent checks them, as it does anyway
_OF_TOOLS = {"type", "name", "description", "parameters", "strict"}


def read_responses_request(body: Any, sampling: SamplingParams) -> ChatRequest:
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


MOST_BYTES = 8 << 20  # of a request
_SHUTDOWN_SECONDS = 1.0  # limit since the end of the run: its samples are cancelled; then their connections are closed
_BACKLOG = 4096  # all samples of a step connect at once; what exceeds the default of 128 is sent again by TCP, seconds later
_ROUTES = "POST chat/completions, POST responses and GET models"


class Gateway:
    """The endpoint. `start` and `close` run in the event loop that serves it; samples may be opened from any thread."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._samples: dict[str, tuple[str, AgentSample]] = {}  # name -> (key, sample)
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/samples/{sample}/v1/chat/completions", self._complete)
        app.router.add_post("/samples/{sample}/v1/responses", self._respond)
        app.router.add_get("/samples/{sample}/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _not_offered)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=_BACKLOG).start()
        self.port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def open_sample(self, sample: AgentSample) -> Iterator[AgentTask]:
        """Serve a sample inside of the block, and yield what its agent gets."""
        name, key = secrets.token_hex(8), secrets.token_hex(24)
        self._samples[name] = (key, sample)
        try:
            prompt = sample.prompt
            address = f"http://127.0.0.1:{self.port}/samples/{name}/v1"
            yield AgentTask(self._decode(prompt.token_ids), prompt.answer, prompt.meta, address, key, MODEL)
        finally:
            del self._samples[name]
            sample.close()

    def _sample_of(self, request: web.Request) -> AgentSample | None:
        """Return the sample of a request with the right key; None for any other, whether the sample exists or not."""
        key, sample = self._samples.get(request.match_info["sample"], (secrets.token_hex(24), None))
        authorization = request.headers.get("Authorization", "").encode(errors="replace")
        return sample if hmac.compare_digest(authorization, f"Bearer {key}".encode()) else None

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._sample_of(request) is None:
            return _error(401, "invalid_api_key", "wrong key, or the sample has ended")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tepo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_request, lambda _, reply: _completion(reply), _chunks)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_responses_request, response, events)

    async def _answer(
        self,
        request: web.Request,
        read: Callable[[Any, SamplingParams], ChatRequest],
        whole: Callable[[ChatRequest, ChatReply], dict[str, Any]],
        parts: Callable[[ChatRequest, ChatReply], list[str]],
    ) -> web.StreamResponse:
        if (sample := self._sample_of(request)) is None:
            return _error(401, "invalid_api_key", "wrong key, or the sample has ended")
        try:
            chat = read(json.loads(await request.read()), sample.sampling)
            reply = await sample.complete(chat)
        except RefusedRequest as e:
            return _error(400, e.code, str(e))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "request_too_large", f"a request has at most {MOST_BYTES} bytes")
        except (ValueError, RecursionError) as e:
            return _error(400, "invalid_request", str(e)[:500])
        except Exception as e:  # a chat template may raise anything
            return _error(400, "chat_template", f"{type(e).__name__}: {e}"[:500])
        return await _stream(request, parts(chat, reply)) if chat.stream else web.json_response(whole(chat, reply))


async def _not_offered(request: web.Request) -> web.StreamResponse:
    what = request.path.partition("/v1/")[2] or request.path
    return _error(404, "not_found", f"{request.method} {what}: not offered by the gateway, which has {_ROUTES}")


def _completion(reply: ChatReply) -> dict[str, Any]:
    choice = {"index": 0, "message": reply.message, **_end_of(reply), "logprobs": None}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(reply)}


def _chunks(chat: ChatRequest, reply: ChatReply) -> list[str]:
    head = _head("chat.completion.chunk")
    calls = [{"index": i, **call} for i, call in enumerate(reply.message.get("tool_calls", ()))]
    deltas: list[tuple[dict[str, Any], dict[str, Any]]] = [({"role": "assistant", "content": reply.message["content"]}, {})]
    deltas += [({"tool_calls": [call]}, {}) for call in calls] + [({}, _end_of(reply))]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **end}]} for delta, end in deltas]
    if chat.with_usage:
        chunks.append({**head, "choices": [], "usage": _usage(reply)})
    return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]


async def _stream(request: web.Request, parts: Sequence[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        for part in parts:
            await response.write(part.encode())
    except (ConnectionError, asyncio.CancelledError):
        pass  # the client has cut the stream; the turn stays part of the sample
    return response


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _end_of(reply: ChatReply) -> dict[str, Any]:
    reason = "tool_calls" if reply.message.get("tool_calls") else reply.turn.stop_reason
    return {"finish_reason": reason, "stop_reason": reply.stopped_by}


def _usage(reply: ChatReply) -> dict[str, int]:
    written = len(reply.turn.token_ids)
    return {
        "prompt_tokens": reply.prompt_tokens, "completion_tokens": written, "total_tokens": reply.prompt_tokens + written,
    }  # fmt: skip


def _error(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
