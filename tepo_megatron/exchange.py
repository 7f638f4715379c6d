"""One HTTP exchange with a server that need not be ours: bounded in time and memory, whatever it does.

Every client goes through here: rewards, engines, their health. A deadline holds for the whole exchange (name look-up,
connection, request, headers, body). Redirects are not followed, so a key goes to no other server. Compressed bodies are refused
unread, so no answer is larger than what came over the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, cast

import httpx

from tepo_megatron.escaping import excerpt

CONNECT_SECONDS = 10.0
ERROR_BYTES = 64 * 2**10  # what is read of an answer that is an error
CONTROL_BYTES = 8 * 2**20  # of an answer whose size the request does not tell
LEAST_VALUES = 1_000_000  # numbers, texts and containers that any JSON answer may have; about 72 MB of memory
_BYTES_PER_VALUE = 16  # of longer answers, on average at least
_SLACK_SECONDS = 5.0  # for a loop that is busy to give up by itself
# json.loads converts up to 4300 digits, to numbers that no float holds
_EXTREME = re.compile(rb"[0-9]{300}|[eE]\+?[0-9]{3}")
_JSON = re.compile(r"(application|text)/([\w.-]+\+)?json|text/plain|application/octet-stream")


class ExchangeFailed(Exception):
    """What happened instead of an answer; it may live on after that."""


class TimedOut(ExchangeFailed):
    """No whole answer came in time."""


class BadAnswer(ExchangeFailed):
    """The server answered, with something that is not accepted; the text goes after "answered with"."""


@dataclass(frozen=True)
class Answer:
    """An answer of whatever status. content_type: in lower case, without parameters; None where the server gives none.

    body: raw, at most the bytes asked for; of an error the first ERROR_BYTES, and nothing where it is compressed.
    """

    status: int
    content_type: str | None
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as text, bytes that are not UTF-8 replaced."""
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """The object in the body. Raises BadAnswer: not JSON, another content type, too many values, a number out of range."""
        if self.content_type is not None and not _JSON.fullmatch(self.content_type):
            raise BadAnswer(f"{excerpt(self.content_type, 40)!r} instead of JSON")
        values = sum(self.body.count(sign) for sign in (b",", b"[", b"{"))
        if values > max(LEAST_VALUES, len(self.body) // _BYTES_PER_VALUE):
            raise BadAnswer(f"JSON of {values} values in {len(self.body)} bytes, which no answer of this kind has")
        hooks: dict[str, Any] = {"parse_constant": _no_constant}
        if _EXTREME.search(self.body):
            hooks |= {"parse_int": _in_range, "parse_float": _in_range}
        try:
            return json.loads(self.body.decode(), **hooks)
        except RecursionError:
            raise BadAnswer("JSON that is nested too deeply") from None
        except UnicodeDecodeError:
            raise BadAnswer("something that is not UTF-8") from None
        except ValueError as e:
            raise BadAnswer(f"something that is not JSON ({excerpt(getattr(e, 'msg', str(e)), 80)})") from None


class Http:
    """Exchanges with one server, in one event loop. Each has a connection of its own: servers close connections that were idle,
    and a request that meets a closed one fails.

    Args:
        url: Of the server; paths of `exchange` are appended.
        key: Sent as a bearer token with every request. None: no key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # none is kept
            follow_redirects=False,
            trust_env=False,  # no proxy stands between us and the server
            verify=url.startswith("https"),  # loading certificates takes a while
        )

    async def exchange(
        self, method: str, path: str, *, seconds: float, most_bytes: int = CONTROL_BYTES, body: bytes | None = None
    ) -> Answer:
        """Send one request, which is never repeated, and return the answer, of whatever status.

        Args:
            method: Of HTTP.
            path: Below the server's URL.
            seconds: From the look-up of the name to the last byte of the answer.
            most_bytes: Of the body of an answer that is no error.
            body: JSON. None: no body.

        Raises:
            TimedOut: The answer was not whole after `seconds`.
            BadAnswer: It is compressed, or has more than `most_bytes`.
            ExchangeFailed: There is no server, or it broke the exchange off.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(None, connect=min(CONNECT_SECONDS, seconds))
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, path, content=body, headers=headers, timeout=timeout) as response,
            ):
                return await _received(response, most_bytes)
        except (TimeoutError, httpx.TimeoutException):
            raise TimedOut(f"no answer within {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as e:
            raise ExchangeFailed(_reason(e)) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class BlockingHttp:
    """The same for callers without an event loop: one runs in a thread of its own, started by the first exchange."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._http = Http(url, key)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def exchange(
        self, method: str, path: str, *, seconds: float, most_bytes: int = CONTROL_BYTES, body: bytes | None = None
    ) -> Answer:
        """See `Http.exchange`; it returns in time even where the loop itself is held up."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
            self._thread.start()
        work = self._http.exchange(method, path, seconds=seconds, most_bytes=most_bytes, body=body)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds + _SLACK_SECONDS)
        except TimeoutError:
            raise TimedOut(f"no answer within {seconds:g} s") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Close the connections and end the thread. May be called again."""
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(self._loop), self._loop).result(_SLACK_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        await self._http.close()
        await loop.shutdown_asyncgens()


def to_json(value: Mapping[str, Any] | None) -> bytes | None:
    """The body of a request."""
    return None if value is None else json.dumps(value).encode()


async def _received(response: httpx.Response, most_bytes: int) -> Answer:
    """Raises BadAnswer."""
    kind = response.headers.get("content-type")
    kind = None if kind is None else kind.partition(";")[0].strip().lower()
    fails = not 200 <= response.status_code < 300
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        if fails:
            return Answer(response.status_code, kind, b"")
        raise BadAnswer(f"a body that is compressed ({excerpt(encoding, 40)}), which was not asked for")
    limit = ERROR_BYTES if fails else most_bytes
    received = bytearray()
    async with contextlib.aclosing(cast(AsyncGenerator[bytes, None], response.aiter_raw())) as chunks:
        async for chunk in chunks:
            received += chunk
            if len(received) > limit:
                if fails:
                    return Answer(response.status_code, kind, bytes(received[:limit]))
                raise BadAnswer(f"more than {limit} bytes, which no answer to this request has")
    return Answer(response.status_code, kind, bytes(received))


def _reason(error: BaseException) -> str:
    """What an error says, and what the operating system says behind it."""
    said, cause = str(error) or type(error).__name__, error
    while (behind := cause.__cause__ or cause.__context__) is not None:
        cause = behind
        if isinstance(cause, OSError) and cause.errno and (system := os.strerror(cause.errno)) not in said:
            said += f": {system}"
    return excerpt(said)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _in_range(text: str) -> int | float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{excerpt(text, 20)} is beyond all floating-point numbers")
    return number if any(sign in text for sign in ".eE") else int(text)
