"""The key that every server requires: from the environment, or from a file of the rendezvous folder."""

import os
import secrets
from pathlib import Path

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.engines.servers.rendezvous import check_owner, read_private, write_private

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
