"""The stores through which a trainer's ranks and the processes of its servers meet for `sync.transport=group`.

On one machine a store is a folder of mode 0700: PyTorch's TCPStore knows no key, so that every local user could list, read and
change what is in it, the addresses of members included. Between machines it is a TCPStore on the interface that leads
to the servers (docs/security.md). Runs in the trainer and inside the servers.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch.distributed as dist


class Store(Protocol):
    """What both kinds do."""

    def add(self, key: str, amount: int) -> int:
        """Put a key into the store, where all see it once this has returned."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these are there."""
        ...

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        ...


class NotPrivate(RuntimeError):
    """Others could write in a folder, or have made it."""


class FolderStore:
    """Keys as empty files: one that a killed process left half written, as PyTorch's FileStore can, holds up nobody.

    Args:
        folder: of mode 0700 and this user's.

    Raises:
        NotPrivate: it is another's, or others may enter it.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise NotPrivate(
                f"{folder}: not a folder of mode 0700 that user {os.getuid()} owns; run the servers as the user who trains"
            )
        self.folder = folder

    def add(self, key: str, amount: int = 1) -> int:
        """See `Store.add`. Returns 1, however often a key was added."""
        (self.folder / _file(key)).touch(mode=0o600)
        return 1

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        return all((self.folder / _file(key)).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        """See `Store.delete_key`. Whether it was there."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / _file(key)).unlink()
            return True
        return False

    def of_group(self, name: str) -> dist.Store:
        """A store for the members of one process group, in a file of its own."""
        return dist.FileStore(str(self.folder / f"group-{_file(name)}"), -1)


def _file(key: str) -> str:
    return key.replace("/", "-")


def open_store(address: str) -> dist.TCPStore:
    """A store on this machine's interface with `address`, and on no other, at a port that was free. Raises OSError."""
    door = socket.create_server((address, 0))
    port = door.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())


def connect(address: str, port: int, seconds: float) -> dist.TCPStore:
    """The store that listens there. Raises RuntimeError when it cannot be reached."""
    timeout = datetime.timedelta(seconds=seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(host: str) -> str:
    """This machine's address on the way to another, or to itself. Sends nothing. Raises OSError for an unknown host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
