"""Files of a folder that several machines share: complete when they appear, and read only if this user or root owns them.

Whoever could write into the folder would be sent the servers' key and the weights, so both sides check its owner.
"""

import errno
import os
import secrets
from pathlib import Path

from tepo_megatron.base.atomic import replacing, sync
from tepo_megatron.base.errors import ConfigError, RolloutError

_READS = 5


def check_owner(folder: Path) -> None:
    """Raise ConfigError unless only this user or root can change the folder. A folder that does not exist passes."""
    name = f"rollout.server.rendezvous={folder}"
    try:
        if folder.is_symlink():
            raise ConfigError(f"{name}: is a symbolic link, which may lead elsewhere tomorrow; give the folder it leads to")
        found = folder.stat()
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"{name}: cannot be read ({e.strerror}); run as the user who serves") from None
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{name}: belongs to user {found.st_uid}; give a folder of your own, or run as the user who serves")
    if found.st_mode & 0o022:
        raise ConfigError(f"{name}: others can write in it; chmod 700 it, or give another")


def write_part(folder: Path, name: str, text: str) -> Path:
    """Write a complete file of mode 0600 under a temporary name, to be linked, and return its path."""
    path = _temporary(folder, name)
    _write_private(path, text)
    sync(path)
    return path


def replace_private(path: Path, text: str) -> None:
    """Replace a file of a shared folder atomically by one of mode 0600."""
    with replacing(path, temporary=_temporary(path.parent, path.name)) as unfinished:
        _write_private(unfinished, text)


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.{secrets.token_hex(8)}"


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def read_file(path: Path) -> str | None:
    """Return the content of a file that other processes may replace; None if it does not exist."""
    for _ in range(_READS):
        try:
            return read_owned(path)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno != errno.ESTALE:  # replaced meanwhile, over NFS
                raise
    raise RolloutError(f"{path}: replaced {_READS} times while it was read; is its file system well?")


def read_owned(path: Path) -> str:
    """Return the content of a file that belongs to this user or root.

    The owner is checked per file: where others can rename folders above, their file may lie at this path for a moment. Raises
    ConfigError for a symbolic link or another user's file; OSError.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ConfigError(f"{path}: is a symbolic link, which no part of a rendezvous is; remove it") from None
        raise
    with os.fdopen(opened) as file:
        owner = os.fstat(opened).st_uid
        if owner not in (os.geteuid(), 0):
            raise ConfigError(f"{path}: belongs to user {owner}, so it is not read; run as the user who serves")
        return file.read()
