"""Requests to an inference server, and a watch over its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tepo_megatron.escaping import excerpt
from tepo_megatron.exchange import (
    CONNECT_SECONDS,
    CONTROL_BYTES,
    ERROR_BYTES,
    Answer,
    BadAnswer,
    ExchangeFailed,
    Http,
    TimedOut,
    to_json,
)

HEALTH_SECONDS = 1.0


class RequestFailed(Exception):
    """What the server did instead of answering, to be put after its name.

    answered: with an error, and it may live on; refused: it says that the request was wrong (4xx), and nothing else is.
    """

    def __init__(self, what: str, *, answered: bool = False, refused: bool = False) -> None:
        super().__init__(what)
        self.what, self.answered, self.refused = what, answered, refused


class Client:
    """Speaks JSON to the server at `url`, with `key` in every request. To be used in one event loop.

    request_seconds: for one whole exchange; silent_seconds: without an answer from `/health`, after which the server counts as
    frozen.
    """

    def __init__(self, url: str, key: str, *, request_seconds: float, silent_seconds: float) -> None:
        self.url = url
        self._request_seconds, self._silent_seconds = request_seconds, silent_seconds
        self._asking, self._resting = asyncio.Lock(), False  # about its health
        self._http = Http(url, key)

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, most_bytes: int = CONTROL_BYTES) -> Any:
        """The JSON answer to one request, which is never repeated: it may have had its effect. Raises RequestFailed.

        An answer without a type is returned as text: some of SGLang's are a bare line. most_bytes: of the answer.
        """
        try:
            answer = await self._http.exchange(
                method, path, seconds=self._request_seconds, most_bytes=most_bytes, body=to_json(body)
            )
            if answer.ok:
                return answer.text if answer.content_type is None else answer.json()
        except TimedOut:
            raise RequestFailed(
                f"did not answer {path} within {self._request_seconds:g} s; raise rollout.server.request_seconds if it was busy"
            ) from None
        except BadAnswer as e:
            raise RequestFailed(f"answered {path} with {e}", answered=True) from None
        except ExchangeFailed as e:
            raise RequestFailed(f"broke off {path} ({e})") from None
        what = f"answered {path} with {answer.status}: {_message(answer)}"
        raise RequestFailed(what, answered=True, refused=400 <= answer.status < 500)

    async def rest(self) -> None:
        """From now on the server is asked for a connection instead of its health; returns when no such question is open.

        SGLang samples a token to answer `/health`, which kills a server that is asleep or about to sleep.
        """
        async with self._asking:
            self._resting = True

    def rise(self) -> None:
        """Ask for its health again."""
        self._resting = False

    async def _ask_for_health(self) -> None:
        """Raises ExchangeFailed; BadAnswer with a status that is an error."""
        limit = max(HEALTH_SECONDS, self._silent_seconds)
        async with self._asking:
            if self._resting:
                await self._http.exchange("HEAD", "/", seconds=limit, most_bytes=ERROR_BYTES)
                return
            answer = await self._http.exchange("GET", "/health", seconds=limit, most_bytes=ERROR_BYTES)
            if not answer.ok:
                raise BadAnswer(str(answer.status))

    async def illness(self) -> str:
        """Return when the server is ill, and how: it takes no connections, says so itself, or is silent for too long.

        vLLM, told to end, waits for its open requests without ever answering them: only its health shows it.
        """
        heard = time.monotonic()
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await self._ask_for_health()
                heard = time.monotonic()
            except TimedOut:
                if time.monotonic() - heard >= self._silent_seconds:
                    return (
                        f"did not answer /health for {self._silent_seconds:g} s; raise rollout.server.silent_seconds if it "
                        "was busy"
                    )
            except BadAnswer as e:
                return f"answered /health with {e}"
            except ExchangeFailed as e:
                return f"takes no connections ({e})"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


async def healthy(url: str) -> bool:
    """Whether a server at `url` says that it takes requests."""
    http = Http(url)
    try:
        return (await http.exchange("GET", "/health", seconds=CONNECT_SECONDS, most_bytes=ERROR_BYTES)).status == 200
    except ExchangeFailed:
        return False
    finally:
        await http.close()


def _message(answer: Answer) -> str:
    """What an error answer says, on one line, at most 500 characters: {"error": {"message": ...}} or {"message": ...}."""
    try:
        told = answer.json()
        text = str(told["error"]["message"] if "error" in told else told["message"])
    except (BadAnswer, KeyError, TypeError, IndexError):
        text = answer.text
    return excerpt(text, 500)
