"""Stores through which the trainer's ranks and the server processes form a group for `sync.transport=group`.

On one machine a store is a folder of mode 0700. PyTorch's TCPStore has no authentication: any local user could list, read and
change its contents, including the addresses of members. Between machines the store is a TCPStore on the interface that leads to
the servers (docs/security.md). This module runs in the trainer and inside the servers.
"""

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


class KeyValueStore(Protocol):
    """The methods that both kinds of store have."""

    def add(self, key: str, amount: int) -> int:
        """Add a key; when this returns, every process sees it."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class FolderNotPrivate(RuntimeError):
    """A folder belongs to another user, or others can write in it."""


class FolderStore:
    """A store that keeps keys as empty files."""

    def __init__(self, folder: Path) -> None:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise FolderNotPrivate(
                f"{folder}: not a folder of mode 0700 that user {os.getuid()} owns; run the servers as the user who trains"
            )
        self.folder = folder

    def add(self, key: str, amount: int = 1) -> int:
        """Add a key, see `KeyValueStore.add`. Returns 1, however often the key was added."""
        (self.folder / _file(key)).touch(mode=0o600)
        return 1

    def check(self, keys: Sequence[str]) -> bool:
        return all((self.folder / _file(key)).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it existed."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / _file(key)).unlink()
            return True
        return False

    def of_group(self, name: str) -> dist.Store:
        """Return a store for the members of one process group, in a file of its own."""
        return dist.FileStore(str(self.folder / f"group-{_file(name)}"), -1)


def _file(key: str) -> str:
    return key.replace("/", "-")


def open_store(address: str) -> dist.TCPStore:
    """Return a TCPStore that listens only on this machine's interface `address`, at a free port. Raise OSError."""
    door = socket.create_server((address, 0))
    port = door.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())


def connect(address: str, port: int, seconds: float) -> dist.TCPStore:
    """Return a client of a TCPStore."""
    timeout = datetime.timedelta(seconds=seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`, without sending anything. Raise OSError for an unknown host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
