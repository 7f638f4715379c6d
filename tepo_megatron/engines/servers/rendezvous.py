"""The folder in which a run and each `tepo serve` that serves it find each other, and the key that every server requires.

All their machines see the folder.

    key       the key of servers and links, unless TEPO_SERVER_KEY gives it
    run.json  where the run that wants servers listens (`RunAddress`)

The servers write their logs there. The folder and both files belong to one user alone: whoever could write in it would be sent
the weights.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from tepo_megatron.base.errors import ConfigError

ADDRESS_FILE = "run.json"


@dataclass(frozen=True)
class RunAddress:
    """Where a run listens for `tepo serve`. `hosts`: name and addresses of its machine, some of which may lead elsewhere."""

    run: str  # its folder
    hosts: list[str]
    port: int


def create(folder: Path) -> None:
    """Make the folder if it is missing. Raises ConfigError if others could write in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"rollout.server.rendezvous={folder}: cannot be made ({e.strerror}); give another") from None
    check_owner(folder)


def check_owner(folder: Path) -> None:
    """Raise ConfigError unless only this user or root can change the folder. A folder that does not exist passes."""
    name = f"rollout.server.rendezvous={folder}"
    try:
        if folder.is_symlink():
            raise ConfigError(f"{name}: is a symbolic link, which may lead elsewhere tomorrow; give the folder it leads to")
        stat = folder.stat()
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"{name}: cannot be read ({e.strerror}); run as the user who serves") from None
    if stat.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{name}: belongs to user {stat.st_uid}; give a folder of your own, or run as the user who serves")
    if stat.st_mode & 0o022:
        raise ConfigError(f"{name}: others can write in it; chmod 700 it, or give another")


def read_private(path: Path) -> str | None:
    """Return the content of a file that this user or root alone can read; None if it is missing, or replaced right now.

    The owner is checked per file: where others can rename folders above, their file may lie at this path for a moment. Raises
    ConfigError.
    """
    check_owner(path.parent)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            stat, text = os.fstat(file.fileno()), file.read()
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: over NFS
            return None
        what = "is a symbolic link, which no part of a rendezvous is" if e.errno == errno.ELOOP else e.strerror
        raise ConfigError(f"{path}: {what}; remove it, or run as the user who serves") from None
    if stat.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path}: belongs to user {stat.st_uid}, so it is not read; run as the user who serves")
    if stat.st_mode & 0o077:
        raise ConfigError(f"{path}: others can read it; remove it and start the servers again")
    return text


def write_private(path: Path, text: str) -> bool:
    """Write a file of mode 0600, which is complete when it appears. Return False if there is one, which stays."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True


def read_address(folder: Path) -> RunAddress | None:
    """Return the address of the run that wants servers; None if there is none. Raises ConfigError."""
    path = folder / ADDRESS_FILE
    try:
        text = read_private(path)
        return None if text is None else RunAddress(**json.loads(text))
    except (json.JSONDecodeError, TypeError) as e:
        raise ConfigError(f"{path}: not the address of a run ({e}); remove it, or use one version of `tepo`") from None


def write_address(folder: Path, address: RunAddress) -> bool:
    """Have each `tepo serve` connect to this run from now on. Return False if another run's address is there."""
    return write_private(folder / ADDRESS_FILE, json.dumps(dataclasses.asdict(address)) + "\n")


def remove_address(folder: Path, address: RunAddress) -> None:
    """Remove the address unless another run has replaced it, or the folder is gone."""
    with contextlib.suppress(OSError, ConfigError):
        if read_address(folder) == address:
            (folder / ADDRESS_FILE).unlink()


def own_addresses() -> list[str]:
    """Return this machine's name and its addresses, loopback last."""
    nics = psutil.net_if_addrs().values()
    addresses = {a.address for nic in nics for a in nic if a.family in (socket.AF_INET, socket.AF_INET6)}
    outer = [a for a in sorted(addresses) if "%" not in a and not ipaddress.ip_address(a).is_loopback]
    return [socket.gethostname(), *outer, "127.0.0.1"]


KEY_VARIABLE = "TEPO_SERVER_KEY"
KEY_FILE = "key"
SHORTEST_KEY = 16  # characters


def make_key(folder: Path) -> str:
    """Return the servers' key: TEPO_SERVER_KEY, or the content of the key file, which is made if it is missing."""
    check_owner(folder)
    if (key := key_from_environment()) is not None:
        return key
    path = folder / KEY_FILE
    if (text := read_private(path)) is None:
        write_private(path, secrets.token_urlsafe(32) + "\n")
        text = read_private(path) or ""
    return checked_key(text.strip(), str(path))


def key_from_environment() -> str | None:
    """Return the key in TEPO_SERVER_KEY; None if it is not set. Raises ConfigError for an unusable key."""
    key = os.environ.get(KEY_VARIABLE)
    return None if key is None else checked_key(key, KEY_VARIABLE)


def checked_key(key: str, source: str) -> str:
    """Return `key`. Raise ConfigError if an HTTP header cannot hold it or it could be guessed."""
    if len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{source}: the servers' key has {SHORTEST_KEY} printable characters at least, and no space; make a new one"
        )
    return key
