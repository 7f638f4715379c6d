"""HTTP exchanges with a server that may be faulty or hostile. Every exchange is bounded in time and memory.

Every HTTP client of the package uses this module: rewards, engines, health checks. A deadline covers the whole exchange (name
look-up, connection, request, headers, body). Redirects are not followed, so a key never reaches another server. Compressed
bodies are refused unread, so no answer is larger than the bytes received.

aiohttp carries the requests, because its parser is compiled: a step of conversations is tens of thousands of requests.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
import msgspec
import numpy as np

from tepo_megatron.base.errors import excerpt
from tepo_megatron.base.loop import time_limit
from tepo_megatron.base.processes import open_file_limit

# Limit since the request: a busy event loop that opens thousands of connections takes seconds; then `no connection within`
CONNECT_SECONDS = 60.0
# Not a limit: an idle connection is kept as long; uvicorn, which serves vLLM and SGLang, closes it after 5 s
KEEP_SECONDS = 3.0
ERROR_BYTES = 64 * 2**10  # maximum bytes read of an error answer
TIMING_CHARACTERS = 200
CONTROL_BYTES = 8 * 2**20  # maximum bytes of an answer whose size does not follow from the request
LEAST_VALUES = 1_000_000  # numbers, strings and containers that any JSON answer may hold; about 72 MB of memory
_BYTES_PER_VALUE = 16  # minimum average in longer answers
_CHUNK_BYTES = 2**16  # fits into a core's cache
_CLOSED = "the connections to it were closed"
# Limit since the last exchange: a frozen server never takes what is being sent to it; then the connections are dropped
_CLOSE_SECONDS = 1.0
# Numbers with this many digits or this large an exponent may exceed the float range; json.loads accepts up to 4300 digits.
_EXTREME = (b"0" * 300, b"e000", b"e+000")
_DIGITS_AS_ZERO = bytes.maketrans(b"123456789E", b"000000000e")
_JSON = re.compile(r"(application|text)/([\w.-]+\+)?json|text/plain|application/octet-stream")


class ExchangeFailed(Exception):
    """An exchange without an answer. The server may still be alive."""


class TimedOut(ExchangeFailed):
    """The complete answer did not arrive in time."""


class TooManyOpenFiles(ExchangeFailed):
    """This process has too many open files for another connection. The message names the limit and the fix."""


class BadAnswer(ExchangeFailed):
    """The server answered with something unacceptable. The message continues the phrase "answered with"."""


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer of any status."""

    status: int
    content_type: str | None
    body: bytes  # raw bytes, at most as many as requested. Error answers keep the first ERROR_BYTES, or nothing if compressed.
    timing: str | None = None  # the header `Server-Timing`, cut at TIMING_CHARACTERS. None: the server sends none.

    @property
    def ok(self) -> bool:
        """Return whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """Return the body as text, with invalid UTF-8 replaced."""
        return self.body.decode(errors="replace")

    def json_body(self, expected_values: int = 0) -> bytes:
        """Return the body for a decoder of JSON. Raises BadAnswer for another content type, or a body of too many values."""
        if self.content_type is not None and not _JSON.fullmatch(self.content_type):
            raise BadAnswer(f"{excerpt(self.content_type, 40)!r} instead of JSON")
        values = _count_values(self.body)
        if values > max(LEAST_VALUES + expected_values, len(self.body) // _BYTES_PER_VALUE):
            raise BadAnswer(f"JSON of {values} values in {len(self.body)} bytes, which no answer of this kind has")
        return self.body

    def json(self) -> Any:
        """Return the JSON value in the body.

        Raises BadAnswer if the body is not JSON, has another content type or too many values, or holds a number out of range.
        """
        body = self.json_body()
        hooks: dict[str, Any] = {"parse_constant": _no_constant}
        plain = body.translate(_DIGITS_AS_ZERO)  # faster than a regular expression over the body
        if any(extreme in plain for extreme in _EXTREME):
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

    Repeatable requests share connections, which are kept for KEEP_SECONDS. The server may close such a connection just as a
    request is sent, so any other request opens a connection of its own.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether its connections are kept
        self._deadlines: set[asyncio.Timeout] = set()  # of the exchanges in progress
        self._closed = False

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        most_bytes: int = CONTROL_BYTES,
        body: bytes | None = None,
        accept: str = "*/*",
        repeatable: bool = False,
    ) -> HttpAnswer:
        """Send one request and return the answer, whatever its status.

        Raises:
            TimedOut: The answer was not complete after `seconds`.
            BadAnswer: The answer is compressed or larger than `most_bytes`.
            TooManyOpenFiles: This process cannot open another connection.
            ExchangeFailed: There is no server, it broke off the exchange, or `close` was called.
        """
        try:
            async with time_limit(seconds) as deadline:
                self._deadlines.add(deadline)
                try:
                    if repeatable:
                        with contextlib.suppress(_Unanswered):
                            return await self._sent(True, method, path, most_bytes, body, accept)
                    return await self._sent(False, method, path, most_bytes, body, accept)
                finally:
                    self._deadlines.discard(deadline)
        except (TimeoutError, _Unanswered, aiohttp.ClientError, OSError, ValueError) as e:
            if self._closed:
                raise ExchangeFailed(_CLOSED) from None
            if isinstance(e, aiohttp.ServerTimeoutError):
                raise ExchangeFailed(f"no connection within {CONNECT_SECONDS:g} s{self.unused_proxy()}") from None
            if isinstance(e, TimeoutError):
                raise TimedOut(f"no answer within {seconds:g} s") from None
            raise _failure(e, self.unused_proxy() if isinstance(e, aiohttp.ClientConnectorError) else "") from None

    def unused_proxy(self) -> str:
        """Return words about the proxy that the environment names for this server; empty if it names none."""
        server = urlsplit(self._url)
        if not getproxies_environment().get(server.scheme) or proxy_bypass(server.netloc):
            return ""
        return f"; the proxy in {server.scheme}_proxy is not used: this machine must reach the server itself"

    async def close(self) -> None:
        """Close the connections. Exchanges in progress fail at once, and so do later ones. It may be called repeatedly."""
        self._closed = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())
        sessions = list(self._sessions.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(session.close() for session in sessions))

    async def _sent(self, kept: bool, method: str, path: str, most_bytes: int, body: bytes | None, accept: str) -> HttpAnswer:
        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": "application/json"})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        if self._closed:
            raise ExchangeFailed(_CLOSED)
        try:
            async with self._session(kept).request(
                method, self._url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return await _received(response, most_bytes)
        except aiohttp.ClientConnectionError as e:
            if isinstance(e, aiohttp.ClientConnectorError | TimeoutError):  # there was no connection
                raise
            raise _Unanswered(str(e)) from e

    def _session(self, kept: bool) -> aiohttp.ClientSession:
        if kept not in self._sessions:
            connector = aiohttp.TCPConnector(limit=0, force_close=not kept, keepalive_timeout=KEEP_SECONDS if kept else None)
            # neither cookies are stored nor proxies of the environment used, and bodies are not unpacked
            self._sessions[kept] = aiohttp.ClientSession(
                connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._sessions[kept]


def to_json(value: Mapping[str, Any] | None) -> bytes | None:
    """Return `value` encoded as a request body; None for None."""
    return None if value is None else msgspec.json.encode(value)


class _Unanswered(Exception):
    pass


async def _received(response: aiohttp.ClientResponse, most_bytes: int) -> HttpAnswer:
    kind = response.headers.get("content-type")
    kind = None if kind is None else kind.partition(";")[0].strip().lower()
    fails = not 200 <= response.status < 300
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        if fails:
            return HttpAnswer(response.status, kind, b"")
        raise BadAnswer(f"a body that is compressed ({excerpt(encoding, 40)}), which was not asked for")
    limit = ERROR_BYTES if fails else most_bytes
    received = bytearray()
    async for chunk in response.content.iter_any():
        received += chunk
        if len(received) > limit:
            if fails:
                return HttpAnswer(response.status, kind, bytes(received[:limit]))
            raise BadAnswer(f"more than {limit} bytes, which no answer to this request has")
    timing = response.headers.get("server-timing")
    return HttpAnswer(response.status, kind, bytes(received), None if timing is None else timing[:TIMING_CHARACTERS])


def _failure(error: BaseException, hint: str) -> ExchangeFailed:
    """Return the failure that `error` means, in the words of the operating system if it has any."""
    text, cause = str(error) or type(error).__name__, cast(BaseException | None, error)
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            text = os.strerror(cause.errno)
            if cause.errno in (errno.EMFILE, errno.ENFILE):
                return TooManyOpenFiles(
                    f"this process cannot open another connection, because it may have only {open_file_limit()} files open; "
                    "raise the limit (`ulimit -n`), or lower rollout.server.concurrency"
                )
        cause = cause.__cause__ or cause.__context__
    return ExchangeFailed(excerpt(text) + hint)


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
