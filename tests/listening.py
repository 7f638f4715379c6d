"""The sockets at which processes can be reached, as the kernel lists them, and what the processes of a run have opened over its
whole life.

Linux only: /proc/PID/fd names the sockets of a process by their inodes, /proc/PID/net says what they are.
"""

import ipaddress
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.02
_LISTENS, _UNCONNECTED = "0A", "07"  # states of TCP and UDP sockets
_ACCEPTS = 0x10000  # a flag of Unix sockets


@dataclass(frozen=True, order=True)
class Listener:
    """A socket at which a process can be reached.

    Attributes:
        address: An IP address, or the path of a Unix socket: "@..." for an abstract one, which every local user reaches; empty
            for one without a name, which nobody reaches.
    """

    kind: str
    address: str
    port: int
    pid: int
    process: str

    @property
    def is_loopback(self) -> bool:
        """True if the IP address is reachable from this machine alone."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_private(self) -> bool:
        """True if other users of this machine cannot reach the Unix socket.

        It has no name, or it lies below a folder of mode 0700.
        """
        if self.kind != "unix" or self.address.startswith("@"):
            return False
        return not self.address or any(_keeps_out(folder) for folder in Path(self.address).parents)


def _keeps_out(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Return the sockets at which these processes can be reached now; a process that has ended has none."""
    found: set[Listener] = set()
    for pid in pids:
        try:
            inodes = _sockets(pid)
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            tables = {kind: Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6", "udp", "udp6", "unix")}
        except (OSError, ProcessLookupError):
            continue
        for kind, text in tables.items():
            for line in text.splitlines()[1:]:
                row = line.split()
                inode, kind_of, address, port = _unix(row) if kind == "unix" else _inet(kind, row)
                if inode in inodes:
                    found.add(Listener(kind_of, address, port, pid, command[:200].strip()))
    return found


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _unix(row: list[str]) -> tuple[str, str, str, int]:
    """Inode ("" for a socket that takes no connections), kind, path, port. Datagram sockets with a name take messages."""
    accepts = int(row[3], 16) & _ACCEPTS
    named = len(row) > 7
    datagrams = row[4] == "0002"
    inode = row[6] if accepts or (datagrams and named) else ""
    return inode, "unix", row[7] if named else "", 0


def _inet(kind: str, row: list[str]) -> tuple[str, str, str, int]:
    """Inode ("" for a socket that nobody can connect to), kind, address, port."""
    protocol = kind.rstrip("6")
    host, port = row[1].split(":")
    inode = row[9] if row[3] == (_LISTENS if protocol == "tcp" else _UNCONNECTED) else ""
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    family = socket.AF_INET6 if len(words) > 1 else socket.AF_INET
    return inode, protocol, socket.inet_ntop(family, b"".join(words)), int(port, 16)


class Watch:
    """Look at the processes of a run every POLL_SECONDS, from `with` to its end.

    Attributes:
        found: Every socket at which one of the processes could be reached.
        public: The sockets that other users of the machine, or other machines, could reach when they were seen.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        """Store the arguments; the first look happens on entry."""
        self._pids = pids
        self.found: set[Listener] = set()
        self.public: set[Listener] = set()
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch sockets", daemon=True)

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            new = listeners(self._pids()) - self.found
            self.found |= new
            self.public |= {one for one in new if not one.is_private}
            self.looks += 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
