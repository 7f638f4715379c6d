"""Environments that an OpenEnv server runs (openenv-core 0.3, openenv 0.10), over one WebSocket connection for each sample.

    -> {"type": "reset", "data": {"seed": 7, ...}}
    <- {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    -> {"type": "step", "data": {...}}                                        an action
    <- an observation, or {"type": "error", "data": {"message": "...", "code": "..."}}

    -> {"type": "close"}

The server keeps an environment for each connection, and ends it with the connection.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp

from tepo_megatron.base.processes import raise_open_file_limit
from tepo_megatron.base.types import Prompt
from tepo_megatron.rollout.conversation import Conversation
from tepo_megatron.rollout.environment import EnvironmentStep, play

MOST_BYTES = 100 << 20  # of a message, as OpenEnv's own client allows
# Limit since the end of an episode: the server has only to hang up; then its connection is closed from here
_CLOSE_SECONDS = 0.5
_FULL = "CAPACITY_REACHED"


class OpenEnvError(Exception):
    """A server refused a message, or closed the connection."""


def reset_data(prompt: Prompt) -> dict[str, Any]:
    """Return the row's other fields, and a seed for all samples of the prompt unless the row has one."""
    return {"seed": prompt.id % 2**31, **prompt.meta}


def play_openenv(
    url: str,
    *,
    action: Callable[[str], Mapping[str, Any]],
    observation: Callable[[Mapping[str, Any]], str],
    reset: Callable[[Prompt], Mapping[str, Any]] = reset_data,
    stop: str | None = None,
) -> Callable[[Conversation], Awaitable[float]]:
    """Return the generation function of the environment of a server. Its reward is the sum of the steps' rewards.

    Args:
        url: Address of the server, as "http://127.0.0.1:8000".
        action: Turns what the model wrote into an action. A ValueError, for a text that is none, ends the episode.
        observation: Turns an observation's fields, without reward and done, into what the model reads.
        reset: Returns what the environment's `reset` gets; a server leaves out what that does not take.
        stop: See `environment.play`.
    """
    raise_open_file_limit()
    return play(partial(_Episode, f"{url.rstrip('/')}/ws", action, observation, reset), stop)


class _Episode:
    def __init__(
        self,
        url: str,
        action: Callable[[str], Mapping[str, Any]],
        observation: Callable[[Mapping[str, Any]], str],
        reset: Callable[[Prompt], Mapping[str, Any]],
    ) -> None:
        self._url, self._action, self._observation, self._reset = url, action, observation, reset
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, prompt: Prompt) -> str:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(self._url, max_msg_size=MOST_BYTES)
        return (await self._exchange("reset", self._reset(prompt))).observation

    async def step(self, action: str) -> EnvironmentStep:
        try:
            data = self._action(action)
        except ValueError:
            return EnvironmentStep("", done=True)
        return await self._exchange("step", data)

    async def close(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            if self._socket is not None:
                await self._socket.send_json({"type": "close"})
                await self._socket.receive(_CLOSE_SECONDS)  # the server hangs up; it logs an error if the client does so first
        if self._session is not None:
            await self._session.close()

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> EnvironmentStep:
        assert self._socket is not None
        with suppress(ConnectionError):  # why the server hung up is read below
            await self._socket.send_json({"type": kind, "data": dict(data)})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvError(f"{self._url}: the server closed the connection ({message.type.name}, {message.data!r:.200})")
        answer = json.loads(message.data)
        result = answer["data"]
        if answer["type"] == "error":
            hint = "; raise max_concurrent_envs of the server to the samples of a step" if result.get("code") == _FULL else ""
            raise OpenEnvError(f"{self._url}: {kind} was refused: {json.dumps(result)[:500]}{hint}")
        return EnvironmentStep(self._observation(result["observation"]), float(result["reward"] or 0.0), bool(result["done"]))
