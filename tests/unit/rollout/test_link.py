"""The link between a run and `tepo serve`: who does not know the key gets nowhere, and a vanished machine is noticed."""

import asyncio
import hmac
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.loop import LoopThread
from tepo_megatron.config import RendezvousServerConfig
from tepo_megatron.engines.servers import listener
from tepo_megatron.engines.servers.listener import MOST_UNPROVEN, Link, NotProven, RunListener, connect
from tepo_megatron.engines.servers.rendezvous import RunAddress, create, read_address, write_address
from tests import hosts
from tests.waiting import until

FACTS = {"engine": "vllm", "model": "m", "precision": "fp32", "tp": 1, "sleeps": False, "host": "there", "pid": 7}


class Run:
    """A run that listens, and a `tepo serve` that is connected to it."""

    def __init__(self, folder: Path) -> None:
        self.loop = LoopThread("link")
        self.listener = RunListener(folder / "run", RendezvousServerConfig(rendezvous=str(folder / "servers")))
        self.loop.run(self.listener.open())
        address = read_address(folder / "servers")
        assert address is not None
        self.port, self.key, self.starts = address.port, self.listener.key, 0
        self.serve = self.connected(self.key)
        self.serve.send("hello", **FACTS)

    def connected(self, key: str) -> Link:
        return self.loop.run(connect(["127.0.0.1"], self.port, key, 60.0))

    def next_message(self) -> dict[str, object]:
        async def receive() -> dict[str, object] | None:
            async with asyncio.timeout(60):
                return await self.serve.receive()

        return self.loop.run(receive()) or {}

    def works(self) -> bool:
        """Return whether a server that `tepo serve` tells of arrives."""
        self.starts += 1
        self.serve.send("up", start=self.starts, url="http://there:1", where="there")
        until(lambda: any(server.start == self.starts for server in self.listener.servers()))
        return True


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.loop.run(made.listener.close())
    made.loop.stop()


async def ended(link: Link) -> None:
    link.close()


def raw(run: Run) -> socket.socket:
    return socket.create_connection(("127.0.0.1", run.port), 60)


def line_of(door: socket.socket) -> bytes:
    """Return what arrives up to the end of a line, or of the connection."""
    received = b""
    try:
        while not received.endswith(b"\n") and (more := door.recv(1)):
            received += more
    except ConnectionError:
        pass
    return received


def said(run: Run, *lines: bytes) -> list[bytes]:
    """Send lines over a connection of their own; return what arrived before them, and after each."""
    with raw(run) as door:
        answers = [line_of(door)]
        for line in lines:
            try:
                door.sendall(line)
            except ConnectionError:
                break
            answers.append(line_of(door))
        return answers


def reflected(run: Run) -> list[bytes]:
    """Prove with the run's own proof."""
    with raw(run) as door:
        nonce = line_of(door)
        door.sendall(nonce)
        proof = line_of(door)
        door.sendall(proof)
        return [nonce, proof, line_of(door)]


def replayed(run: Run) -> list[bytes]:
    """Prove with what was right for another connection."""

    def proof(nonce: str) -> bytes:
        right = hmac.new(run.key.encode(), json.dumps(["serve", *sorted([nonce, "a"])]).encode(), "sha256").hexdigest()
        return json.dumps({"proof": right}).encode() + b"\n"

    with raw(run) as door:
        nonce = json.loads(line_of(door))["nonce"]
        door.sendall(b'{"nonce": "a"}\n' + proof(nonce))
        assert b"proof" in line_of(door) and json.loads(line_of(door))["kind"] == "free"  # the right proof is one
    return said(run, b'{"nonce": "a"}\n', proof(nonce))


ATTACKS: dict[str, Callable[[Run], list[bytes]]] = {
    "nothing": lambda run: said(run, b""),
    "garbage": lambda run: said(run, b"\x80\x04\x95garbage\xff\n"),
    "a number": lambda run: said(run, b"7\n"),
    "a deep list": lambda run: said(run, b"[" * 50_000 + b"\n"),
    "a giant line": lambda run: said(run, b"x" * 8_000_000),
    "no nonce, no proof": lambda run: said(run, b"{}\n", b"{}\n"),
    "a wrong proof": lambda run: said(run, b'{"nonce": "a"}\n', b'{"proof": "\xc3\xbc"}\n'),
    "the run's own proof": reflected,
    "an old proof": replayed,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_who_does_not_know_the_key_gets_no_message_and_disturbs_nobody(
    attack: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 1.0)
    assert run.works()
    answers = ATTACKS[attack](run)
    assert b"".join(answers[2:]) == b"" and run.key.encode() not in b"".join(answers)
    assert run.works() and run.next_message()["kind"] == "free"
    assert "know" in run.listener.last_note and "TEPO_SERVER_KEY" in run.listener.last_note


def test_a_wrong_key_is_named_and_silent_connections_make_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotProven, match="does not know the key"):
        run.connected("another-key-than-theirs")
    monkeypatch.setattr(listener, "GREETING_SECONDS", 1.0)
    silent = [raw(run) for _ in range(MOST_UNPROVEN + 8)]
    assert run.works()  # on the link that there is
    begun = time.monotonic()
    until(lambda: all(line_of(door) == b"" for door in silent for _ in range(2)))
    assert time.monotonic() - begun < 30
    assert run.connected(run.key).peer == "127.0.0.1"
    for door in silent:
        door.close()


def test_an_impostor_of_the_run_learns_nothing_and_gets_no_hello(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        joining = run.loop.submit(connect(["127.0.0.1"], door.getsockname()[1], run.key, 60.0))
        with door.accept()[0] as connection:
            connection.sendall(b'{"nonce": "a"}\n{"proof": "b"}\n')
            received = [line_of(connection) for _ in range(3)]
    with pytest.raises(NotProven, match="does not know the key"):
        joining.result(60)
    assert b"proof" in received[1] and received[2] == b"" and run.key.encode() not in b"".join(received)


def test_a_message_of_another_version_ends_its_link_alone(run: Run) -> None:
    second = run.connected(run.key)
    second.send("hello", **FACTS | {"pid": 8})
    second.send("up", start="seven")
    until(lambda: "use one version of `tepo`" in run.listener.last_note)
    assert run.works()


def test_a_serve_that_is_cut_off_is_waited_for_before_ranks_get_the_devices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not know yet that it must not start servers. One of the same machine takes its place, or it returns."""
    assert run.works()
    run.loop.run(ended(run.serve))
    until(lambda: not run.listener.servers())
    holding = run.loop.submit(run.listener.hold())
    successor = run.connected(run.key)
    successor.send("hello", **FACTS | {"host": "elsewhere", "pid": 9})
    successor.send("held", number=1)
    with pytest.raises(TimeoutError):
        holding.result(0.5)
    run.serve = run.connected(run.key)
    run.serve.send("hello", **FACTS | {"pid": 8})
    assert run.next_message() == {"kind": "hold", "number": 1}
    run.serve.send("held", number=1)
    holding.result(60)
    monkeypatch.setattr(listener, "GRACE_SECONDS", -1e6)  # the limit is over
    with pytest.raises(Exception, match=r"elsewhere-9, there-8 \(host and pid of `tepo serve`\) did not say"):
        run.loop.run(run.listener.hold())


END = """
import asyncio, sys, time
from tepo_megatron.engines.servers.listener import Link, connect

async def use(link):
    print("linked", flush=True)
    while await link.receive() is not None:
        pass
    print("over", flush=True)

async def accept(reader, writer):
    link = Link(reader, writer, 4.0)
    await link.greet("k" * 32, "run", "serve")
    await use(link)
    over.set()

async def main():
    global over
    over = asyncio.Event()
    if sys.argv[1] == "listen":
        await asyncio.start_server(accept, "0.0.0.0", 29411)
        print("listening", flush=True)
        await asyncio.wait_for(over.wait(), 240)
    else:
        await asyncio.wait_for(use(await connect([sys.argv[1]], 29411, "k" * 32, 4.0)), 240)

asyncio.run(main())
"""


@pytest.mark.full
def test_both_ends_notice_that_the_other_machine_has_vanished(tmp_path: Path) -> None:
    if why := hosts.missing():
        pytest.skip(why)
    with hosts.two_hosts() as two:
        ends: list[subprocess.Popen[str]] = []

        def begin(host: hosts.Host, word: str) -> subprocess.Popen[str]:
            words = [*host.enter, sys.executable, "-c", END, word]
            ends.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            return ends[-1]

        def next_word(end: subprocess.Popen[str]) -> str:
            assert end.stdout is not None
            return end.stdout.readline().strip()

        try:
            assert next_word(begin(two[0], "listen")) == "listening"
            begin(two[1], two[0].address)
            assert [next_word(end) for end in ends] == ["linked"] * 2
            time.sleep(6.0)  # more than the link survives without an answer: an idle one is kept
            assert [end.poll() for end in ends] == [None] * 2
            two[1].link("down")
            begun = time.monotonic()
            assert [next_word(end) for end in ends] == ["over"] * 2
            assert 1 < time.monotonic() - begun < 12
        finally:
            for end in ends:
                end.kill()
                end.wait(60)


@pytest.mark.parametrize("left", [False, True])
def test_of_two_runs_that_start_at_once_in_a_folder_one_is_refused(tmp_path: Path, left: bool) -> None:
    """Also where both see the address that a killed run left."""
    config = RendezvousServerConfig(rendezvous=str(tmp_path / "servers"))
    runs = [RunListener(tmp_path / name, config) for name in ("a", "b")]
    create(tmp_path / "servers")
    with socket.create_server(("127.0.0.1", 0)) as door:  # nobody listens there once it is closed
        address = RunAddress("killed", ["127.0.0.1"], door.getsockname()[1])
    assert not left or write_address(tmp_path / "servers", address)

    async def start_and_end() -> list[object]:
        outcomes = await asyncio.gather(*(run.open() for run in runs), return_exceptions=True)
        published = read_address(tmp_path / "servers")
        assert published is not None and Path(published.run).name == "ab"[outcomes.index(None)]
        await runs[outcomes.index(None)].close()
        return list(outcomes)

    refused = [outcome for outcome in asyncio.run(start_and_end()) if outcome is not None]
    assert len(refused) == 1 and isinstance(refused[0], ConfigError) and "is used by the run" in str(refused[0])
    assert read_address(tmp_path / "servers") is None
