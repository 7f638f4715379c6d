"""The limits of every HTTP client of the package, each held against a server that exceeds it, from raw sockets.

The path of a request, /KIND, selects what the server does. A kind that lasts does so far longer than a client may wait.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest

from tepo_megatron.utils.exchange import ERROR_BYTES, BadAnswer, BlockingHttpClient, TimedOut

LASTS = 60.0  # seconds, at most
MIB = 2**20
_SPACES = b" " * 65536

Kind = Callable[[socket.socket], None]
KINDS: dict[str, Kind] = {}
seen: list[str] = []  # kind of each request


def kind(function: Kind) -> Kind:
    """Register a function as a kind."""
    KINDS[function.__name__] = function
    return function


def _head(*lines: str, status: str = "200 OK", type: str | None = "application/json", length: int | None = None) -> bytes:
    """Return the head of a response; None omits a header."""
    fields = [f"HTTP/1.1 {status}", *lines]
    fields += [] if type is None else [f"Content-Type: {type}"]
    fields += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join(fields) + "\r\n\r\n").encode()


def _whole(connection: socket.socket, body: bytes, *lines: str, status: str = "200 OK", type: str = "application/json") -> None:
    """Send a complete response."""
    connection.sendall(_head(*lines, status=status, type=type, length=len(body)) + body)


@functools.cache
def bomb() -> bytes:
    """Return a quarter of a MiB that unpacks to 256 MiB."""
    unpacker, spaces = zlib.compressobj(wbits=31), b" " * MIB
    return b"".join([*(unpacker.compress(spaces) for _ in range(256)), unpacker.flush()])


def _for_ever(connection: socket.socket, piece: bytes, pause: float = 0.0) -> None:
    """Send a piece again and again, `pause` seconds apart, until the client hangs up."""
    end = time.monotonic() + LASTS
    while time.monotonic() < end:
        connection.sendall(piece)
        time.sleep(pause)


@kind
def drip(connection: socket.socket) -> None:
    connection.sendall(_head(length=10**6))
    _for_ever(connection, b"1", 0.1)


@kind
def endless_body(connection: socket.socket) -> None:
    connection.sendall(_head())
    _for_ever(connection, _SPACES)


@kind
def chunks_never_end(connection: socket.socket) -> None:
    connection.sendall(_head("Transfer-Encoding: chunked"))
    _for_ever(connection, b"10000\r\n" + _SPACES + b"\r\n")


@kind
def gzip_bomb(connection: socket.socket) -> None:
    _whole(connection, bomb(), "Content-Encoding: gzip")


@kind
def nested_gzip(connection: socket.socket) -> None:
    _whole(connection, gzip.compress(bomb()), "Content-Encoding: gzip, gzip")


@kind
def length_absurd(connection: socket.socket) -> None:
    connection.sendall(_head(length=10**18))
    _for_ever(connection, _SPACES)


@kind
def redirects_elsewhere(connection: socket.socket) -> None:
    port = connection.getsockname()[1]
    _whole(connection, b"", f"Location: http://127.0.0.1:{port}/was_redirected/x", status="307 Temporary Redirect")


def was_redirected(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [1]}', status="418 No Place For A Key")


@kind
def error_with_endless_body(connection: socket.socket) -> None:
    connection.sendall(_head(status="500 Oops"))
    _for_ever(connection, _SPACES)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(LASTS)
        asked = b""
        with contextlib.suppress(OSError):  # the client has gone
            while b"\r\n\r\n" not in asked and (read := self.request.recv(65536)):
                asked += read
            begin, _, body = asked.partition(b"\r\n\r\n")
            lines = begin.decode(errors="replace").split("\r\n")
            if len(lines[0].split()) < 2:
                return
            fields = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines[1:]}
            while len(body) < int(fields.get("content-length", 0)) and (read := self.request.recv(65536)):
                body += read
            name = lines[0].split()[1].strip("/").partition("/")[0]
            seen.append(name)
            KINDS.get(name, was_redirected)(self.request)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: a client that hangs up is the expected outcome."""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Yield the URL below which the kinds are served."""
    bomb()
    server = _Server(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_each_limit_holds_by_itself() -> None:
    """With a deadline that no busy machine meets, so that it cannot hide a size that is not limited."""
    seen.clear()
    with serving() as url, contextlib.closing(BlockingHttpClient(url)) as http:
        for name in ("endless_body", "chunks_never_end", "length_absurd"):
            with pytest.raises(BadAnswer, match=r"^more than 1048576 bytes"):
                http.exchange("GET", f"/{name}", seconds=50.0, most_bytes=MIB)
        for name in ("gzip_bomb", "nested_gzip"):
            with pytest.raises(BadAnswer, match="a body that is compressed"):
                http.exchange("GET", f"/{name}", seconds=50.0)
        assert len(http.exchange("GET", "/error_with_endless_body", seconds=50.0).body) == ERROR_BYTES
        assert http.exchange("GET", "/redirects_elsewhere", seconds=50.0).status == 307
        with pytest.raises(TimedOut):
            http.exchange("GET", "/drip", seconds=0.5)
    assert set(seen) == set(KINDS), "somebody went where a redirect led"
