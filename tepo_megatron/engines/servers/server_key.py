"""The key that every server requires: from the environment, or from a file of the rendezvous folder."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.engines.servers.shared_folder import check_owner, read_owned, write_part

KEY_VARIABLE = "TEPO_SERVER_KEY"
KEY_FILE = "key"
SHORTEST_KEY = 16  # characters


def read_key(folder: Path) -> str | None:
    """Return the servers' key: TEPO_SERVER_KEY, or the content of the key file; None if there is neither."""
    check_owner(folder)
    if (given := key_from_environment()) is not None:
        return given
    path = folder / KEY_FILE
    try:
        found = path.lstat()
        key = read_owned(path).strip()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the servers' key ({e.strerror}); run as the user who serves") from None
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{path}: others can read the servers' key; remove it and start the servers again")
    return checked_key(key, str(path))


def make_key(folder: Path) -> str:
    """Return the result of `read_key`, after making a key if there is none."""
    if (known := read_key(folder)) is not None:
        return known
    part = write_part(folder, KEY_FILE, secrets.token_urlsafe(32) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(part, folder / KEY_FILE)  # atomic: the file is complete when it appears, and never replaces another
    part.unlink()
    made = read_key(folder)
    assert made is not None, "it was made above"
    return made


def key_from_environment() -> str | None:
    """Return the key in TEPO_SERVER_KEY; None if it is not set. Raises ConfigError for an unusable key."""
    given = os.environ.get(KEY_VARIABLE)
    return None if given is None else checked_key(given, KEY_VARIABLE)


def checked_key(key: str, source: str) -> str:
    """Return `key`. Raise ConfigError if an HTTP header cannot hold it or it could be guessed."""
    if len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{source}: the servers' key has {SHORTEST_KEY} printable characters at least, and no space; make a new one"
        )
    return key
