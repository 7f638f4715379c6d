"""Requests to an inference server, and a watch over its health."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx

CONNECT_SECONDS = 10.0
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

    request_seconds: for one answer; silent_seconds: without an answer from `/health`, after which the server counts as frozen.
    """

    def __init__(self, url: str, key: str, *, request_seconds: float, silent_seconds: float) -> None:
        self.url, self._key = url, key
        self._request_seconds, self._silent_seconds = request_seconds, silent_seconds
        self._asking, self._resting = asyncio.Lock(), False  # about its health
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(request_seconds, connect=CONNECT_SECONDS, pool=None),
            # Servers close connections that were idle, or after an error, and a request that meets a closed one fails: each
            # has its own, which costs next to nothing beside a generation.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # no proxy stands between us and the server
            verify=url.startswith("https"),  # loading certificates takes a while
        )

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to one request, which is never repeated: it may have had its effect. Raises RequestFailed.

        An answer without a type is returned as text: some of SGLang's are a bare line.
        """
        try:
            response = (await self._http.request(method, path, json=body)).raise_for_status()
            return response.json() if "content-type" in response.headers else response.text
        except httpx.HTTPStatusError as e:
            what = f"answered {path} with {e.response.status_code}: {_message(e.response)}"
            raise RequestFailed(what, answered=True, refused=e.response.is_client_error) from None
        except httpx.TimeoutException:
            raise RequestFailed(
                f"did not answer {path} within {self._request_seconds:g} s; raise rollout.server.request_seconds if it was busy"
            ) from None
        except httpx.RequestError as e:
            raise RequestFailed(f"broke off {path} ({str(e) or type(e).__name__})") from None
        except json.JSONDecodeError:
            raise RequestFailed(f"answered {path} with something that is not JSON", answered=True) from None

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
        limit = max(HEALTH_SECONDS, self._silent_seconds)
        async with self._asking:
            if self._resting:
                await self._http.head("/", timeout=limit)
            else:
                (await self._http.get("/health", timeout=limit)).raise_for_status()

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
            except httpx.TimeoutException:
                if time.monotonic() - heard >= self._silent_seconds:
                    return (
                        f"did not answer /health for {self._silent_seconds:g} s; raise rollout.server.silent_seconds if it "
                        "was busy"
                    )
            except httpx.HTTPStatusError as e:
                return f"answered /health with {e.response.status_code}"
            except httpx.RequestError as e:
                return f"takes no connections ({str(e) or type(e).__name__})"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def healthy(url: str) -> bool:
    """Whether a server at `url` says that it takes requests."""
    async with httpx.AsyncClient(timeout=CONNECT_SECONDS, trust_env=False, verify=url.startswith("https")) as http:
        try:
            return (await http.get(f"{url}/health")).status_code == httpx.codes.OK
        except httpx.RequestError:
            return False


def _message(response: httpx.Response) -> str:
    """What an error answer says, on one line, at most 500 characters: {"error": {"message": ...}} or {"message": ...}."""
    try:
        answer = response.json()
        text = str(answer["error"]["message"] if "error" in answer else answer["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        text = response.text
    return " ".join(text.split())[:500]
