"""HTTP exchanges with a server that may be faulty or hostile. Every exchange is bounded in time and memory.

Every HTTP client of the package uses this module: rewards, engines, health checks. A deadline covers the whole exchange (name
look-up, connection, request, headers, body). Redirects are not followed, so a key never reaches another server. Compressed
bodies are refused unread, so no answer is larger than the bytes received.
"""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, cast

import httpx
import numpy as np

from tepo_megatron.utils.escaping import excerpt
from tepo_megatron.utils.loop import LoopThread

CONNECT_SECONDS = 10.0
ERROR_BYTES = 64 * 2**10  # maximum bytes read of an error answer
CONTROL_BYTES = 8 * 2**20  # maximum bytes of an answer whose size does not follow from the request
LEAST_VALUES = 1_000_000  # numbers, strings and containers that any JSON answer may hold; about 72 MB of memory
_BYTES_PER_VALUE = 16  # minimum average in longer answers
_CHUNK_BYTES = 2**16  # fits into a core's cache
_SLACK_SECONDS = 5.0  # extra time for a busy event loop to report the time-out itself
# Numbers with this many digits or this large an exponent may exceed the float range; json.loads accepts up to 4300 digits.
_EXTREME = re.compile(rb"[0-9]{300}|[eE]\+?[0-9]{3}")
_JSON = re.compile(r"(application|text)/([\w.-]+\+)?json|text/plain|application/octet-stream")


class ExchangeFailed(Exception):
    """An exchange without an answer. The server may still be alive."""


class TimedOut(ExchangeFailed):
    """The complete answer did not arrive in time."""


class BadAnswer(ExchangeFailed):
    """The server answered with something unacceptable. The message continues the phrase "answered with"."""


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer of any status.

    Attributes:
        status: HTTP status code.
        content_type: Lower case, without parameters; None if the server sends none.
        body: Raw bytes, at most as many as requested. Error answers keep the first ERROR_BYTES, or nothing if compressed.
    """

    status: int
    content_type: str | None
    body: bytes

    @property
    def ok(self) -> bool:
        """Return whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """Return the body as text, with invalid UTF-8 replaced."""
        return self.body.decode(errors="replace")

    def json_body(self) -> bytes:
        """Return the body for a decoder of JSON. Raises BadAnswer for another content type, or a body of too many values."""
        if self.content_type is not None and not _JSON.fullmatch(self.content_type):
            raise BadAnswer(f"{excerpt(self.content_type, 40)!r} instead of JSON")
        values = _count_values(self.body)
        if values > max(LEAST_VALUES, len(self.body) // _BYTES_PER_VALUE):
            raise BadAnswer(f"JSON of {values} values in {len(self.body)} bytes, which no answer of this kind has")
        return self.body

    def json(self) -> Any:
        """Return the JSON value in the body.

        Raises:
            BadAnswer: The body is not JSON, has another content type or too many values, or holds a number out of range.
        """
        body = self.json_body()
        hooks: dict[str, Any] = {"parse_constant": _no_constant}
        if _EXTREME.search(body):
            hooks |= {"parse_int": _in_range, "parse_float": _in_range}
        try:
            return json.loads(body.decode(), **hooks)
        except RecursionError:
            raise BadAnswer("JSON that is nested too deeply") from None
        except UnicodeDecodeError:
            raise BadAnswer("something that is not UTF-8") from None
        except ValueError as e:
            raise BadAnswer(f"something that is not JSON ({excerpt(getattr(e, 'msg', str(e)), 80)})") from None


class HttpClient:
    """Exchanges with one server, in one event loop.

    Each exchange opens its own connection: servers close idle connections, and a request on a closed one fails.

    Args:
        url: URL of the server; `exchange` appends paths to it.
        key: Bearer token sent with every request. None: no key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # cookies are never stored
            follow_redirects=False,
            trust_env=False,  # ignore proxy settings: there is no proxy between us and the server
            verify=url.startswith("https"),  # loading certificates is slow, so only for https
        )

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        most_bytes: int = CONTROL_BYTES,
        body: bytes | None = None,
        accept: str = "*/*",
    ) -> HttpAnswer:
        """Send one request and return the answer, whatever its status. The request is never repeated.

        Args:
            method: HTTP method.
            path: Path below the server's URL.
            seconds: Time limit from the name look-up to the last byte of the answer.
            most_bytes: Maximum size of the body of a successful answer.
            body: JSON. None: no body.
            accept: Content type that the client prefers.

        Raises:
            TimedOut: The answer was not complete after `seconds`.
            BadAnswer: The answer is compressed or larger than `most_bytes`.
            ExchangeFailed: There is no server, or it broke off the exchange.
        """
        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": "application/json"})
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


class BlockingHttpClient:
    """`HttpClient` for callers without an event loop. The first exchange starts a thread with an event loop of its own."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._http, self._loop = HttpClient(url, key), LoopThread("http")

    def exchange(
        self, method: str, path: str, *, seconds: float, most_bytes: int = CONTROL_BYTES, body: bytes | None = None
    ) -> HttpAnswer:
        """Send one request, like `HttpClient.exchange`. It returns in time even if the event loop itself is blocked.

        Args:
            method: HTTP method.
            path: Path below the server's URL.
            seconds: Time limit from the name look-up to the last byte of the answer.
            most_bytes: Maximum size of the body of a successful answer.
            body: JSON. None: no body.

        Raises:
            TimedOut, BadAnswer, ExchangeFailed: As `HttpClient.exchange`.
        """
        future = self._loop.submit(self._http.exchange(method, path, seconds=seconds, most_bytes=most_bytes, body=body))
        try:
            return future.result(seconds + _SLACK_SECONDS)
        except TimeoutError:
            raise TimedOut(f"no answer within {seconds:g} s") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Close the connections and stop the thread. It may be called repeatedly."""
        with contextlib.suppress(TimeoutError):
            self._loop.submit(self._http.close()).result(_SLACK_SECONDS)
        self._loop.stop()


def to_json(value: Mapping[str, Any] | None) -> bytes | None:
    """Return `value` encoded as a request body; None for None."""
    return None if value is None else json.dumps(value).encode()


async def _received(response: httpx.Response, most_bytes: int) -> HttpAnswer:
    """Read an answer within its size limit. Raise BadAnswer if it is compressed or too large."""
    kind = response.headers.get("content-type")
    kind = None if kind is None else kind.partition(";")[0].strip().lower()
    fails = not 200 <= response.status_code < 300
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        if fails:
            return HttpAnswer(response.status_code, kind, b"")
        raise BadAnswer(f"a body that is compressed ({excerpt(encoding, 40)}), which was not asked for")
    limit = ERROR_BYTES if fails else most_bytes
    received = bytearray()
    async with contextlib.aclosing(cast(AsyncGenerator[bytes, None], response.aiter_raw())) as chunks:
        async for chunk in chunks:
            received += chunk
            if len(received) > limit:
                if fails:
                    return HttpAnswer(response.status_code, kind, bytes(received[:limit]))
                raise BadAnswer(f"more than {limit} bytes, which no answer to this request has")
    return HttpAnswer(response.status_code, kind, bytes(received))


def _reason(error: BaseException) -> str:
    """Return the error's message together with the operating system's error behind it."""
    said, cause = str(error) or type(error).__name__, error
    while (behind := cause.__cause__ or cause.__context__) is not None:
        cause = behind
        if isinstance(cause, OSError) and cause.errno and (system := os.strerror(cause.errno)) not in said:
            said += f": {system}"
    return excerpt(said)


def _count_values(body: bytes) -> int:
    """Return the number of commas and opening brackets, which bounds the number of values. numpy counts them fastest."""
    chunks = (np.frombuffer(body[at : at + _CHUNK_BYTES], np.uint8) for at in range(0, len(body), _CHUNK_BYTES))
    return sum(int(np.count_nonzero(c == ord(","))) + int(np.count_nonzero(c | 32 == ord("{"))) for c in chunks)  # [ | 32 is {


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _in_range(text: str) -> int | float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{excerpt(text, 20)} is beyond all floating-point numbers")
    return number if any(sign in text for sign in ".eE") else int(text)
