"""The limits of the HTTP client of the package, each held against a server that exceeds it, from raw sockets."""

import asyncio
import contextlib
import gzip
import socketserver
import threading
import time
import zlib
from collections.abc import Iterator

import pytest

from tepo_megatron.base.exchange import ERROR_BYTES, BadAnswer, HttpClient, TimedOut

MIB = 2**20
SPACES = b" " * 65536
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LASTS = 60.0  # seconds, at most: far longer than a client may wait
# What /KIND is answered: the beginning, and what then follows again and again until the client hangs up.
KINDS = {
    "drip": (OK + b"Content-Length: 1000000\r\n\r\n", b"1"),
    "endless_body": (OK + b"\r\n", SPACES),
    "chunks_never_end": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + SPACES + b"\r\n"),
    "length_absurd": (OK + b"Content-Length: 1000000000000000000\r\n\r\n", SPACES),
    "error_with_endless_body": (OK.replace(b"200 OK", b"500 Oops") + b"\r\n", SPACES),
    "redirects_elsewhere": (b"HTTP/1.1 307 There\r\nLocation: /was_redirected\r\nContent-Length: 0\r\n\r\n", b""),
}


class Handler(socketserver.StreamRequestHandler):
    """One connection, on which several requests without a body may come."""

    timeout = LASTS

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            while line := self.rfile.readline():
                kind = line.split()[1].decode().strip("/")
                while self.rfile.readline().strip():
                    pass
                self.server.seen.append(kind)  # type: ignore[attr-defined]
                head, piece = self.server.kinds.get(kind, (OK + b"Content-Length: 0\r\n\r\n", b""))  # type: ignore[attr-defined]
                self.wfile.write(head)
                end = time.monotonic() + LASTS
                while piece and time.monotonic() < end:
                    self.wfile.write(piece)
                    time.sleep(0.1 if piece == b"1" else 0)


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    unpacker = zlib.compressobj(wbits=31)
    bomb = b"".join([*(unpacker.compress(b" " * MIB) for _ in range(256)), unpacker.flush()])  # a quarter of a MiB
    packed = {"gzip": bomb, "gzip, gzip": gzip.compress(bomb)}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.seen = []  # type: ignore[attr-defined]
        server.kinds = KINDS | {  # type: ignore[attr-defined]
            name.replace(", ", "_"): (
                OK + f"Content-Encoding: {name}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body,
                b"",
            )
            for name, body in packed.items()
        }
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


def test_each_limit_holds_by_itself(server: socketserver.ThreadingTCPServer) -> None:
    """With a deadline that no busy machine meets, so that it cannot hide a size that is not limited."""

    async def exchanges() -> None:
        http = HttpClient(f"http://127.0.0.1:{server.server_address[1]}")
        for name in ("endless_body", "chunks_never_end", "length_absurd"):
            with pytest.raises(BadAnswer, match=r"^more than 1048576 bytes"):
                await http.exchange("GET", f"/{name}", seconds=50.0, most_bytes=MIB)
        for name in ("gzip", "gzip_gzip"):
            with pytest.raises(BadAnswer, match="a body that is compressed"):
                await http.exchange("GET", f"/{name}", seconds=50.0)
        assert len((await http.exchange("GET", "/error_with_endless_body", seconds=50.0)).body) == ERROR_BYTES
        assert (await http.exchange("GET", "/redirects_elsewhere", seconds=50.0)).status == 307
        with pytest.raises(TimedOut):
            await http.exchange("GET", "/drip", seconds=0.5)
        await http.close()

    asyncio.run(exchanges())
    assert set(server.seen) == set(server.kinds), "somebody went where a redirect led"  # type: ignore[attr-defined]
