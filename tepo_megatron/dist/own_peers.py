"""Verify that the members of a gloo process group on this machine are processes of the same user.

gloo has no authentication: a member accepts whoever connects first and sends the small number of the expected member. On
loopback any local user could connect, and the data would be taken for weights or unpickled. (gloo's TLS is not in PyTorch's
wheels.) The kernel knows the user behind each end of a connection within one machine, and publishes it in /proc/net/tcp. All
facts refer to PyTorch 2.13.
"""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPBACK_INTERFACE = "lo"
READS, READ_SECONDS = 10, 0.05  # between reads: the kernel's table is not read atomically, so a row may be missing
_LISTENS, _ESTABLISHED, _CLOSE_WAIT = "0A", "01", "08"
_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address in the IPv6 table


class ForeignPeer(RuntimeError):
    """A process group may have a member on this machine that is not a process of this user."""


@dataclass(frozen=True)
class _Row:
    """One line of /proc/net/tcp."""

    local: str
    remote: str
    state: str
    user: int
    inode: str

    @property
    def port(self) -> str:
        return self.local.rpartition(":")[2]


@contextlib.contextmanager
def own_peers_only() -> Iterator[None]:
    """Check the gloo process groups formed in this block. Members on other machines are not checked.

    Raises ForeignPeer if a port opened in the block has a connection from this machine whose other end belongs to another user
    or is gone. The groups must not be used. Another user's mere attempt to connect raises this too.
    """
    before = _listening()
    yield
    for left in reversed(range(READS)):
        if not (new := _listening() - before):
            return
        users, known = _users_of_peers(new)
        if users or not (left or known):
            who = f"user {min(users)}" if users else "a process that has ended"
            raise ForeignPeer(
                f"{who} of this machine connected to a process group of pid {os.getpid()} that was being formed; only this "
                f"user's processes may, so nothing was exchanged in it"
            )
        if known:
            return
        time.sleep(READ_SECONDS)


def _users_of_peers(listening: set[str]) -> tuple[set[int], bool]:
    """Return the other users with a connection from this machine to sockets, and whether all such connections were found."""
    mine, rows = _sockets(), []
    for table in ("tcp", "tcp6"):
        rows += _rows(table)
        ends = {(row.local, row.remote): row for row in rows}
        port_of = {row.inode: row.port for row in rows if row.state == _LISTENS and row.inode in listening}
        ports = set(port_of.values())
        taken = [row for row in rows if row.inode in mine and row.port in ports and row.state in (_ESTABLISHED, _CLOSE_WAIT)]
        others = [(row, ends.get((row.remote, row.local))) for row in taken]
        here = [other for row, other in others if other is not None or _is_loopback(row.remote)]
        users = {other.user for other in here if other is not None} - {os.getuid(), os.geteuid()}
        known = port_of.keys() == listening and all(other is not None and other.state == _ESTABLISHED for other in here)
        if users or known:
            break
    return users, known


def guard_process_groups() -> None:
    """Form every later process group of this process under `own_peers_only` if gloo is bound to loopback."""
    import torch.distributed.distributed_c10d as c10d

    original = c10d._new_process_group_helper
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("GLOO_SOCKET_IFNAME") != LOOPBACK_INTERFACE:
            return original(*args, **kwargs)
        with own_peers_only():
            return original(*args, **kwargs)

    c10d._new_process_group_helper = guarded


def _rows(table: str) -> list[_Row]:
    rows = []
    with contextlib.suppress(FileNotFoundError):  # no IPv6
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            local, remote = (word.removeprefix(_MAPPED) for word in words[1:3])
            rows.append(_Row(local, remote, words[3], int(words[7]), words[9]))
    return rows


def _is_loopback(address: str) -> bool:
    """Return whether an address is in 127.0.0.0/8 or is ::1. The kernel prints addresses as little-endian words."""
    host = address.rpartition(":")[0]
    return host[6:] == "7F" or host == "00000000000000000000000001000000"


def _sockets() -> dict[str, int]:
    descriptors = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                descriptors[target[8:-1]] = int(fd)
    return descriptors


def _listening() -> set[str]:
    inodes = set()
    for inode, fd in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            internet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            if internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                inodes.add(inode)
    return inodes
