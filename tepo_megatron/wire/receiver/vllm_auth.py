"""ASGI middleware that runs inside the vLLM server through its `--middleware` option, and requires the key for every route.

vLLM 0.32 requires its API key only under /v1 and a few other prefixes. Anyone who reaches the port could still pause the engine
or replace its weights, and a loopback port can be reached by all users of the machine.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

API_KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RequireKey:
    """Answer 401 to every HTTP request without `Authorization: Bearer $VLLM_API_KEY`, except OPEN_PATHS. Refuse websockets."""

    def __init__(self, app: App) -> None:
        self._app = app
        if not (key := os.environ.get(API_KEY_VARIABLE)):
            raise RuntimeError(f"{API_KEY_VARIABLE} is not set: without a key anyone could replace the weights")
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not self._admits(scope):
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await self._app(scope, receive, send)

    def _admits(self, scope: Message) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected)
