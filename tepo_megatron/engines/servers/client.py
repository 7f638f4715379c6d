"""HTTP client of one inference server: requests, and a watch over the server's health."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tepo_megatron.base.errors import RolloutError, excerpt
from tepo_megatron.base.exchange import (
    CONTROL_BYTES,
    ERROR_BYTES,
    BadAnswer,
    ExchangeFailed,
    HttpAnswer,
    HttpClient,
    TimedOut,
    TooManyOpenFiles,
    to_json,
)

HEALTH_SECONDS = 1.0  # between health requests
# Limit since one health request: a busy event loop answers in seconds; then it is asked again; key
# rollout.server.heartbeat_timeout
HEALTHY_SECONDS = 10.0
CONTROL_CONNECTIONS = 2  # per server, next to those of its generation requests: health, and updates or interruptions


class RequestFailed(Exception):
    """A request to a server failed. `what` is a phrase that follows the server's name in messages.

    Attributes:
        answered: The server answered, but with an error; it may still be usable.
        refused: The server rejected the request as wrong (4xx); the server itself is fine.
    """

    def __init__(self, what: str, *, answered: bool = False, refused: bool = False) -> None:
        super().__init__(what)
        self.what, self.answered, self.refused = what, answered, refused


class Client:
    """Exchanges JSON with one server, and watches its health. Use it in one event loop."""

    def __init__(self, url: str, key: str, *, request_seconds: float, heartbeat_timeout: float) -> None:
        self.url = url
        self._request_seconds, self._heartbeat_timeout = request_seconds, heartbeat_timeout
        self._asking, self._paused = asyncio.Lock(), False  # held during a health request
        self._http = HttpClient(url, key)

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, repeatable: bool = False) -> Any:
        """Send one request and return the JSON answer. A request is never repeated, because it may have had its effect.

        An answer without a content type is returned as text: some of SGLang's answers are a bare line.
        """
        answer = await self.exchange(method, path, body, repeatable=repeatable)
        try:
            return answer.text if answer.content_type is None else answer.json()
        except BadAnswer as e:
            raise RequestFailed(f"answered {path} with {e}", answered=True) from None

    async def exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        accept: str = "*/*",
        most_bytes: int = CONTROL_BYTES,
        seconds: float | None = None,
        repeatable: bool = False,
    ) -> HttpAnswer:
        """Send one request, like `send`, and return the undecoded answer of at most `most_bytes`."""
        seconds = seconds or self._request_seconds
        try:
            answer = await self._http.exchange(
                method,
                path,
                seconds=seconds,
                most_bytes=most_bytes,
                body=to_json(body),
                accept=accept,
                repeatable=repeatable,
            )
        except TimedOut:
            raise RequestFailed(
                f"did not answer {path} within {seconds:g} s; raise rollout.server.request_seconds if it was busy"
            ) from None
        except TooManyOpenFiles as e:
            raise RolloutError(f"{path}: {e}") from None
        except BadAnswer as e:
            raise RequestFailed(f"answered {path} with {e}", answered=True) from None
        except ExchangeFailed as e:
            raise RequestFailed(f"broke off {path} ({e})") from None
        if answer.ok:
            return answer
        what = f"answered {path} with {answer.status}: {_message(answer)}"
        raise RequestFailed(what, answered=True, refused=400 <= answer.status < 500)

    async def pause(self) -> None:
        """Pause health requests: from now on the watch only checks that the server answers at all.

        Returns when no health request is in flight. SGLang samples a token to answer `/health`, which kills a server that is
        asleep or about to sleep.
        """
        async with self._asking:
            self._paused = True

    def resume(self) -> None:
        """Resume health requests."""
        self._paused = False

    async def _ask_for_health(self) -> None:
        limit = max(HEALTH_SECONDS, self._heartbeat_timeout)
        async with self._asking:
            paused = self._paused  # `resume` may come before the answer
            method, path = ("HEAD", "/") if paused else ("GET", "/health")
            answer = await self._http.exchange(method, path, seconds=limit, most_bytes=ERROR_BYTES, repeatable=True)
            if not (answer.ok or paused):
                raise BadAnswer(str(answer.status))

    async def wait_unhealthy(self) -> str:
        """Watch the server's health. Returns once the server is unhealthy, with a phrase that says how.

        Unhealthy means: it accepts no connections, reports an error itself, or is silent for `heartbeat_timeout`. vLLM, when
        it is asked to end, waits for its open requests without ever answering them: only its health shows that.
        """
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await self._ask_for_health()
            except TimedOut:
                return (
                    f"did not answer /health for {self._heartbeat_timeout:g} s; raise rollout.server.heartbeat_timeout if it "
                    "was busy"
                )
            except TooManyOpenFiles:  # that says nothing about the server
                continue
            except BadAnswer as e:
                return f"answered /health with {e}"
            except ExchangeFailed as e:
                return f"takes no connections ({e})"

    async def close(self) -> None:
        await self._http.close()


async def healthy(url: str, path: str = "/health") -> bool:
    """Return whether a server at `url` reports that it takes requests."""
    http = HttpClient(url)
    try:
        return (await http.exchange("GET", path, seconds=HEALTHY_SECONDS, most_bytes=ERROR_BYTES)).status == 200
    except ExchangeFailed:
        return False
    finally:
        await http.close()


def _message(answer: HttpAnswer) -> str:
    """Return an error answer's message on one line, cut at 500 characters: {"error": {"message": ...}} or {"message": ...}."""
    try:
        body = answer.json()
        text = str(body["error"]["message"] if "error" in body else body["message"])
    except (BadAnswer, KeyError, TypeError, IndexError):
        text = answer.text
    return excerpt(text, 500)
