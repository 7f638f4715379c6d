"""Servers that misbehave: every kind of answer that a client must survive, from raw sockets.

The path of a request, /KIND/..., selects the kind. A kind that lasts does so far longer than any client may wait.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import socket
import socketserver
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator

LASTS = 60.0  # seconds, at most
MIB = 2**20
_SPACES = b" " * 65536

Kind = Callable[[socket.socket], None]
KINDS: dict[str, Kind] = {}
# kinds that answer for a while or for ever, so that a client must give up by itself
ENDLESS: set[str] = set()
seen: list[tuple[str, str | None]] = []  # (kind, authorization) of each request


def kind(endless: bool = False) -> Callable[[Kind], Kind]:
    """Register a function as a kind.

    Args:
        endless: Whether it answers for a while or for ever, so that the client must give up by itself.
    """

    def add(function: Kind) -> Kind:
        KINDS[function.__name__] = function
        if endless:
            ENDLESS.add(function.__name__)
        return function

    return add


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


@kind(endless=True)
def drip(connection: socket.socket) -> None:
    connection.sendall(_head(length=10**6))
    _for_ever(connection, b"1", 0.1)


@kind(endless=True)
def slow_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    _for_ever(connection, b"1", 0.1)


@kind(endless=True)
def never_answers(connection: socket.socket) -> None:
    with contextlib.suppress(TimeoutError):
        connection.settimeout(LASTS)
        connection.recv(1)


@kind(endless=True)
def continues_flood(connection: socket.socket) -> None:
    _for_ever(connection, b"HTTP/1.1 100 Continue\r\n\r\n" * 64, 0.01)


@kind()
def endless_body(connection: socket.socket) -> None:
    connection.sendall(_head())
    _for_ever(connection, _SPACES)


@kind()
def endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    _for_ever(connection, b"X-Header: " + b"1" * 1000 + b"\r\n")


@kind()
def endless_header_line(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    _for_ever(connection, b"1" * 65536)


@kind()
def chunks_never_end(connection: socket.socket) -> None:
    connection.sendall(_head("Transfer-Encoding: chunked"))
    _for_ever(connection, b"10000\r\n" + _SPACES + b"\r\n")


@kind(endless=True)
def tiny_chunks(connection: socket.socket) -> None:
    connection.sendall(_head("Transfer-Encoding: chunked"))
    _for_ever(connection, b"1;extension=" + b"x" * 100 + b"\r\n \r\n", 0.01)


@kind()
def gzip_bomb(connection: socket.socket) -> None:
    _whole(connection, bomb(), "Content-Encoding: gzip")


@kind()
def nested_gzip(connection: socket.socket) -> None:
    _whole(connection, gzip.compress(bomb()), "Content-Encoding: gzip, gzip")


@kind()
def unasked_deflate_of_an_error(connection: socket.socket) -> None:
    _whole(connection, bomb(), "Content-Encoding: deflate", status="500 Oops")


@kind(endless=True)
def length_too_long(connection: socket.socket) -> None:
    connection.sendall(_head(length=1000) + b'{"rewards": [1]}')
    never_answers(connection)


@kind()
def length_too_long_and_closed(connection: socket.socket) -> None:
    connection.sendall(_head(length=1000) + b'{"rewards": [1]}')


@kind()
def length_too_short(connection: socket.socket) -> None:
    connection.sendall(_head(length=5) + b'{"rewards": [1]}')


@kind()
def length_absurd(connection: socket.socket) -> None:
    connection.sendall(_head(length=10**18))
    _for_ever(connection, _SPACES)


@kind()
def length_negative(connection: socket.socket) -> None:
    connection.sendall(_head(length=-5) + b"{}")


@kind()
def hangs_up(connection: socket.socket) -> None:
    """Close the connection without an answer."""


@kind()
def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@kind()
def redirects_elsewhere(connection: socket.socket) -> None:
    port = connection.getsockname()[1]
    _whole(connection, b"", f"Location: http://127.0.0.1:{port}/was_redirected/x", status="307 Temporary Redirect")


@kind()
def redirects_in_circles(connection: socket.socket) -> None:
    _whole(connection, b"", "Location: ?", status="308 Permanent Redirect")


def was_redirected(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [1]}', status="418 No Place For A Key")


@kind()
def not_json(connection: socket.socket) -> None:
    _whole(connection, b"what is this")


@kind()
def truncated_json(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [1')


@kind()
def deep_nesting(connection: socket.socket) -> None:
    _whole(connection, b"[" * 100_000 + b"]" * 100_000)


@kind()
def many_values(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [' + b"{}," * 2_000_000 + b"1]}")


@kind()
def huge_number(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [1' + b"0" * 400 + b'], "max_model_len": 1' + b"0" * 400 + b"}")


@kind()
def huge_exponent(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [1e99999], "version": 1e99999}')


@kind()
def more_digits_than_are_converted(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [' + b"9" * MIB + b"]}")


@kind()
def not_a_number(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [NaN], "version": NaN}')


@kind()
def infinity(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": [-Infinity], "version": Infinity}')


@kind()
def wrong_types(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": {"0": 1}, "version": [], "data": 3, "weight_version": {}}')


@kind()
def a_list(connection: socket.socket) -> None:
    _whole(connection, b"[[], {}, null]")


@kind()
def wrong_count(connection: socket.socket) -> None:
    _whole(connection, json.dumps({"rewards": [1] * 1000, "choices": [{}] * 1000}).encode())


@kind()
def huge_string(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": "' + "\U0001f600".encode() + b"1" * (7 * MIB) + b'", "version": "2"}')


@kind()
def invalid_utf8(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": ["\xff\xfe\x80"]}')


@kind()
def lone_surrogates(connection: socket.socket) -> None:
    _whole(connection, b'{"rewards": ["\\ud800"], "version": "\\udfff"}')


@kind()
def html(connection: socket.socket) -> None:
    _whole(connection, b"<html><script>alert(1)</script>" + b"x" * MIB, type="text/html; charset=utf-8")


@kind()
def error_with_endless_body(connection: socket.socket) -> None:
    connection.sendall(_head(status="500 Oops"))
    _for_ever(connection, _SPACES)


@kind(endless=True)
def error_that_drips(connection: socket.socket) -> None:
    connection.sendall(_head(status="503 Later", length=10**6))
    _for_ever(connection, b"1", 0.1)


ANSI = b"\x1b]0;owned\x07\x1b[2J\x1b[31mred \xc2\x9b31m \xe2\x80\xae reversed \r over"


@kind()
def terminal_codes(connection: socket.socket) -> None:
    _whole(connection, ANSI * 100, status="400 Bad", type="text/plain")


@kind()
def terminal_codes_in_json(connection: socket.socket) -> None:
    text = json.dumps({"error": {"message": ANSI.decode()}, "message": ANSI.decode()})
    _whole(connection, text.encode(), status="422 Bad")


@kind()
def terminal_codes_as_values(connection: socket.socket) -> None:
    text = json.dumps({"rewards": [ANSI.decode()], "version": ANSI.decode(), "weight_version": ANSI.decode()})
    _whole(connection, text.encode())


@kind()
def terminal_codes_in_the_status(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 \x1b[31m red\r\n\r\n")


@kind()
def http_0_9(connection: socket.socket) -> None:
    connection.sendall(b"<html>no headers at all\r\n")


@kind()
def garbage(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 64)


@kind()
def cookies(connection: socket.socket) -> None:
    fields = [f"Set-Cookie: c{i}={'x' * 900}" for i in range(80)]
    _whole(connection, b"{}", *fields)


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
            seen.append((name, fields.get("authorization")))
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
