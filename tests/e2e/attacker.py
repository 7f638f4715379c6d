"""Attacks on a run by somebody without any rights: `python -m tests.e2e.attacker UID TARGETS` (JSON of `Targets`).

Prints a JSON list of attacks: the attempt, its result, and whether it succeeded. An attack succeeds when something was read or
changed that is the owner's. Code that runs shows in the folder of `Targets.canary`, whoever runs it.
"""

import base64
import contextlib
import ctypes
import encodings.idna  # noqa: F401 (another user may not read what would be imported later)
import json
import os
import pickle
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from datetime import timedelta
from http.client import HTTPConnection, HTTPException

import torch.distributed as dist

SECONDS, TOTAL_SECONDS = 3.0, 40.0
PTRACE_ATTACH = 16


@dataclass(frozen=True)
class Targets:
    """The targets of the attacks.

    Attributes:
        host: Address at which the ports are tried.
        ports: Ports of TCP listeners.
        server: Port of the inference server.
        link: Port for `tepo serve`. None: there is none.
        metrics: Port of the metrics endpoint. None: there is none.
        routes: Routes of the inference server that control something.
        page: Port of the live page.
        pages: Routes of the live page, each with a wrong secret in the place of SECRET.
        sockets: Paths of Unix sockets.
        canary: A folder in which everybody may create files.
    """

    host: str
    ports: list[int]
    server: int
    link: int | None
    metrics: int | None
    routes: list[str]
    page: int
    pages: list[str]
    sockets: list[str]
    files: list[str]
    folders: list[str]
    pids: list[int]
    canary: str


@dataclass(frozen=True)
class Attack:
    """One attempt. `read` holds what the attacker got to see, so that the test can search it for secrets."""

    name: str
    result: str
    succeeded: bool
    read: str = ""


class Payload:
    """An object that leaves a file in the folder of canaries when it is unpickled."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.canary}/$$-$(id -u)",)


def attacks(targets: Targets) -> list[tuple[str, Callable[[], Attack]]]:
    payload = pickle.dumps(Payload(targets.canary))
    made: list[tuple[str, Callable[[], Attack]]] = []

    def add(name: str, attempt: Callable[[], tuple[str, bool, str]]) -> None:
        made.append((name, lambda: Attack(name, *attempt())))

    for port in targets.ports:
        add(f"store at port {port}: set pickles", lambda port=port: in_store(targets.host, port, payload))
        add(f"port {port}: say what a member of gloo would", lambda port=port: as_member(targets.host, port, payload))
    if (door := targets.link) is not None:
        for name, words in LINK_ATTACKS.items():
            add(f"port for `tepo serve`: {name}", lambda words=words: on_link(targets.host, door, words))
        add("port for `tepo serve`: keep silent", lambda: keep_silent(targets.host, door))
    for route in targets.routes:
        for method in ("POST", "GET"):
            for key in (None, "wrong"):
                with_key = "without a key" if key is None else "with a wrong key"
                add(
                    f"{method} {route} {with_key}",
                    lambda route=route, key=key, method=method: over_http(targets.host, targets.server, method, route, key),
                )
    for route in targets.pages:
        for method in ("GET", "POST"):
            add(
                f"{method} {route} of the live page",
                lambda route=route, method=method: over_http(targets.host, targets.page, method, route, None),
            )
    for key in (None, "wrong") if targets.metrics is not None else ():
        port = targets.metrics
        add(
            f"scrape the metrics with key {key}",
            lambda key=key, port=port: over_http(targets.host, port, "GET", "/metrics", key),
        )
    for path in targets.sockets:
        add(f"connect to {path}", lambda path=path: to_unix(path, payload))
    for path in targets.files:
        add(f"read {path}", lambda path=path: reading(path))
        add(f"write {path}", lambda path=path: writing(path))
        add(f"replace {path}", lambda path=path: replacing(path))
    for path in targets.folders:
        add(f"list {path}", lambda path=path: listing(path))
        add(f"make a file in {path}", lambda path=path: writing(f"{path}/planted"))
    for pid in targets.pids:
        for what in ("environ", "mem", "maps"):
            add(f"read /proc/{pid}/{what}", lambda pid=pid, what=what: reading(f"/proc/{pid}/{what}"))
        add(f"enter the files of {pid} by /proc", lambda pid=pid: listing(f"/proc/{pid}/fd"))
        add(f"ptrace {pid}", lambda pid=pid: tracing(pid))
        add(f"send {pid} a signal", lambda pid=pid: signalling(pid))
    return made


def in_store(host: str, port: int, payload: bytes) -> tuple[str, bool, str]:
    """Write a pickle, plain and in base 64, into every key of a store, and into those of PyTorch's launcher."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), SECONDS):
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
            keys = store.list_keys()
            for key in keys:
                store.set(key, base64.b64encode(payload) if "rendezvous" in key else payload)
        except RuntimeError as e:
            return f"no store ({str(e).splitlines()[0][:60]})", False, ""
        return f"a store: {len(keys)} keys read and set", True, " ".join(keys)
    return "no connection", False, ""


LINK_ATTACKS = {
    "garbage": [os.urandom(1000).replace(b"\n", b"") + b"\n"],
    "a giant line": [b"x" * 10_000_000],
    "a wrong key": [b'{"nonce": "a"}\n', b'{"proof": "' + b"0" * 64 + b'"}\n', b'{"kind": "hello"}\n'],
    "no proof": [b'{"kind": "hello", "host": "h", "pid": 1}\n', b'{"kind": "held", "number": 1}\n'],
}


def on_link(host: str, port: int, lines: list[bytes]) -> tuple[str, bool, str]:
    """Send lines to the port for `tepo serve`. More than a nonce and a proof as an answer is a success."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), SECONDS) as connection:
        connection.settimeout(SECONDS)
        for line in lines:
            connection.sendall(line)
        while data := connection.recv(4096):
            answer += data
    kinds = re.findall(rb'"kind": "(\w+)"', answer)
    return f"{kinds}", not {*kinds} <= {b"nonce", b"proof"}, answer.decode("latin-1")


def keep_silent(host: str, port: int) -> tuple[str, bool, str]:
    """Open more connections than are served at once, and keep them."""
    doors = []
    for _ in range(200):
        with contextlib.suppress(OSError):
            doors.append(socket.create_connection((host, port), SECONDS))
    time.sleep(SECONDS)
    return f"{len(doors)} connections", False, ""


def as_member(host: str, port: int, payload: bytes) -> tuple[str, bool, str]:
    """Pretend to be a member of a process group: send its number first, then a message."""
    answer = b""
    for number in range(4):
        try:
            with socket.create_connection((host, port), SECONDS) as connection:
                connection.settimeout(0.3)
                connection.sendall(struct.pack("<q", number) + struct.pack("<QQ", 64, len(payload)) + payload)
                with contextlib.suppress(TimeoutError):
                    answer += connection.recv(4096)
        except OSError as e:
            return f"no connection ({e})", False, answer.decode("latin-1")
    return "said; nothing came of it unless a canary is there", False, answer.decode("latin-1")


def over_http(host: str, port: int, method: str, route: str, key: str | None) -> tuple[str, bool, str]:
    """Call a route that could change the samples or show them."""
    connection = HTTPConnection(host, port, timeout=SECONDS)
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    try:
        connection.request(method, route, b"{}", headers)
        answer = connection.getresponse()
        body = answer.read(65536).decode("latin-1")
    except (OSError, HTTPException) as e:
        return f"no answer ({type(e).__name__})", False, ""
    finally:
        connection.close()
    return f"status {answer.status}", answer.status not in (401, 403, 405), body


def to_unix(path: str, payload: bytes) -> tuple[str, bool, str]:
    """Connect to a Unix socket. A connection is a success, since the listener unpickles what it receives."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(SECONDS)
            connection.connect("\0" + path[1:] if path.startswith("@") else path)
            connection.sendall(payload)
        except OSError as e:
            return e.strerror or str(e), False, ""
    return "connected", True, ""


def attempt(act: Callable[[], str]) -> tuple[str, bool, str]:
    try:
        return "done", True, act()
    except OSError as e:
        return e.strerror or str(e), False, ""


def reading(path: str) -> tuple[str, bool, str]:
    """Read a file. This is no success by itself: the owner may let everybody read it. The test searches it for secrets."""

    def act() -> str:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("latin-1")

    result, _, read = attempt(act)
    return result, False, read


def writing(path: str) -> tuple[str, bool, str]:
    def act() -> str:
        with open(path, "ab") as file:
            file.write(b"planted")
        return ""

    return attempt(act)


def replacing(path: str) -> tuple[str, bool, str]:
    def act() -> str:
        os.rename(path, f"{path}.moved")
        return ""

    return attempt(act)


def listing(path: str) -> tuple[str, bool, str]:
    result, _, read = attempt(lambda: " ".join(os.listdir(path)))
    return result, False, read


def tracing(pid: int) -> tuple[str, bool, str]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0:
        return "attached", True, ""
    return os.strerror(ctypes.get_errno()), False, ""


def signalling(pid: int) -> tuple[str, bool, str]:
    def act() -> str:
        os.kill(pid, signal.SIGCONT)
        return ""

    return attempt(act)


def main(user: int, targets: Targets) -> None:
    """Become that user, and try everything at once."""
    todo = attacks(targets)
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    threads, end = ThreadPoolExecutor(len(todo)), time.monotonic() + TOTAL_SECONDS
    begun = [(name, threads.submit(act)) for name, act in todo]
    results = []
    for name, future in begun:
        try:
            results.append(future.result(max(0.0, end - time.monotonic())))
        except FutureTimeout:  # a store's client waits for ever for the answer of what is no store (PyTorch 2.13)
            results.append(Attack(name, f"no answer in {TOTAL_SECONDS:g} s", succeeded=False))
    print(json.dumps([asdict(result) for result in results]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Targets(**json.loads(sys.argv[2])))
