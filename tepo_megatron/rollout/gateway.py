"""An OpenAI-compatible HTTP endpoint on the loopback interface, with one address and one secret key for each sample.

    POST {base_url}/chat/completions    messages, tools, stop, max_tokens, stream; the run's own sampling parameters apply
    POST {base_url}/responses           the same for the Responses API, without a memory of earlier ones (`responses.py`)
    GET  {base_url}/models              one model, "policy"

A streamed answer is sent when the turn is complete: tool calls are read from its whole text. A request whose client has gone
before that, as after a timeout, is cancelled in the engine and is no part of the sample.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tepo_megatron.base.types import SamplingParams
from tepo_megatron.rollout import responses
from tepo_megatron.rollout.agent import AgentSample, AgentTask, ChatReply
from tepo_megatron.rollout.chat_request import MODEL, ChatRequest, RefusedRequest, read_request
from tepo_megatron.rollout.conversation import Decode

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
        return await self._answer(request, responses.read_request, responses.response, responses.events)

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
