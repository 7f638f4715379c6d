"""Many fake vLLM servers in one process, each at its own port of the loopback address, with connections that are kept.

    python -m benchmarks.controller.fake_pool '{"servers": 64, "mean": 6000, "cap": 20000}'

The process writes the ports as one line of JSON when it is ready. Afterwards each line on its standard input asks for the
counts, which it writes as a line of JSON. It ends when its standard input does, hence with the process that started it.
"""

import asyncio
import functools
import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, cast

from benchmarks.controller.answers import json_body, json_choice, sample_answers, token_texts
from benchmarks.results import ROOT
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE, Sample, encode, ids_crc

BINARY = "binary"  # answers are binary where the request accepts that
_LENGTH = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\nconnection: *close", re.IGNORECASE)
END_SECONDS = 10.0


@dataclass(frozen=True)
class PoolSpec:
    """The answers of the servers, and their timing."""

    servers: int
    mean: float  # mean number of tokens of a sample
    cap: int
    answers: int = 64
    # least_seconds, most_seconds: each answer is sent after a random time between these
    least_seconds: float = 0.0
    most_seconds: float = 0.0
    format: str = "json"  # "json", or "binary" for requests that accept the package's binary format


@dataclass
class PoolCounts:
    """Counts since the start of the pool."""

    requests: int = 0
    answer_bytes: int = 0  # bytes of the bodies of these answers
    opened: int = 0  # most connections that one server has accepted
    at_once: int = 0  # most connections that one server has had open at the same time


class FakePool:
    """Starts the process and ends it: use it as a context manager."""

    def __init__(self, spec: PoolSpec) -> None:
        command = [sys.executable, "-m", "benchmarks.controller.fake_pool", json.dumps(asdict(spec))]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._ports: list[int] = []

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        self._ports = json.loads(self._process.stdout.readline())  # an end of the process ends the line, too
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def urls(self) -> list[str]:
        """Base URLs of the servers."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def counts(self) -> PoolCounts:
        """Return the counts so far."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return PoolCounts(**json.loads(self._process.stdout.readline()))


class _Server(asyncio.Protocol):
    """One connection to one of the servers."""

    def __init__(self, pool: "_Pool", server: int) -> None:
        self._pool, self._server, self._received = pool, server, bytearray()
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.connected(self._server, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.connected(self._server, -1)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end])
            length = int(found[1]) if (found := _LENGTH.search(head)) else 0
            if len(self._received) < end + 4 + length:
                return
            body = bytes(self._received[end + 4 : end + 4 + length])
            del self._received[: end + 4 + length]
            self._closes = _CLOSE.search(head) is not None
            self._pool.handle(self, head, body)

    def answer(self, parts: Sequence[bytes], kind: str = "application/json") -> None:
        if self._transport.is_closing():
            return
        size = sum(map(len, parts))
        self._transport.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n\r\n".encode())
        self._transport.writelines(parts)
        if self._closes:
            self._transport.close()


class _Pool:
    """The servers' state: their samples, encoded once, and the counts."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec, self.counts = spec, PoolCounts()
        self._opened, self._open = [0] * spec.servers, [0] * spec.servers
        self._answers = sample_answers(spec.answers, spec.mean, spec.cap)
        texts = token_texts()
        self._choices = [json_choice(answer, texts) for answer in self._answers]
        self._draw = random.Random(0)

    def connected(self, server: int, change: int) -> None:
        """Count a connection that was opened (1) or closed (-1)."""
        self._opened[server] += change > 0
        self._open[server] += change
        self.counts.opened = max(self.counts.opened, self._opened[server])
        self.counts.at_once = max(self.counts.at_once, self._open[server])

    def handle(self, connection: _Server, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1].partition(b"?")[0]
        if path == b"/v1/completions":
            delay = self._draw.uniform(self.spec.least_seconds, self.spec.most_seconds)
            if delay:
                asyncio.get_running_loop().call_later(delay, self._complete, connection, head, body)
            else:
                self._complete(connection, head, body)
            return
        connection.answer([json.dumps(_CONTROL.get(path, {})).encode()])

    def _complete(self, connection: _Server, head: bytes, body: bytes) -> None:
        request = json.loads(body)
        # the request alone decides the answer, so that counted bytes do not depend on timing
        first = zlib.crc32(f"{request['seed']}".encode())
        chosen = [(first + 31 * k) % len(self._answers) for k in range(request["n"])]
        parts, kind = self._encoded(chosen, request, head)
        self.counts.requests += 1
        self.counts.answer_bytes += sum(map(len, parts))
        connection.answer(parts, kind)

    def _encoded(self, chosen: Sequence[int], request: Mapping[str, Any], head: bytes) -> tuple[list[bytes], str]:
        if self.spec.format == BINARY and CONTENT_TYPE.encode() in head:
            length, crc = len(request["prompt"]), ids_crc(request["prompt"])
            answers = [self._answers[i] for i in chosen]
            samples = [Sample("stop", "default", length, crc, answer.ids, answer.logprobs) for answer in answers]
            return [encode(samples)], CONTENT_TYPE
        return json_body([self._choices[i] for i in chosen], request["prompt"]), "application/json"


_CONTROL: dict[bytes, Any] = {
    b"/version": {"version": "0.32"},
    b"/weight_info": {"weight_version": "default"},
    b"/v1/models": {"data": [{"max_model_len": 10**6}]},
}


async def _serve(spec: PoolSpec) -> None:
    loop = asyncio.get_running_loop()
    pool = _Pool(spec)
    servers = [
        await loop.create_server(functools.partial(_Server, pool, i), "127.0.0.1", 0, backlog=4096) for i in range(spec.servers)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps(asdict(pool.counts)), flush=True)
    os._exit(0)  # whoever asked is gone; open connections are not waited for


if __name__ == "__main__":
    asyncio.run(_serve(PoolSpec(**json.loads(sys.argv[1]))))
