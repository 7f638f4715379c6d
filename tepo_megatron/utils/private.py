"""Folders that only their owner can enter, through which the processes of one run communicate on one machine.

This module imports nothing heavy, because every process of a run uses it.
"""

import os
import stat
import tempfile
from pathlib import Path

from tepo_megatron.errors import ConfigError
from tepo_megatron.utils.scratch import PrivateFolder, new_name

SHORT = Path("/tmp")  # the parent of folders with sockets where TMPDIR is too long
WORLD_FOLDER = "TEPO_WORLD_FOLDER"  # environment variable: the folder through which the ranks of a launch connect


def make_private_folder(purpose: str, longest: int | None = None) -> PrivateFolder:
    """Create an empty folder of mode 0700 in the system's folder for temporary files (TMPDIR).

    The caller removes the folder. If the caller is killed, the next start does. `longest`: maximum length of the folder's path
    in bytes, for sockets; /tmp is used where TMPDIR is too long for it. Raises ConfigError if another user could replace the
    folder, or it cannot be created.
    """
    parent = Path(tempfile.gettempdir())
    where, wanted = f"TMPDIR={parent}", "writable"
    if longest is not None and len(os.fsencode(parent / new_name(purpose))) > longest:
        where, wanted = f"{SHORT} (TMPDIR={parent} is too long for sockets)", "writable and has a shorter path"
        parent = SHORT
    try:
        held = parent.stat()
        replaceable = held.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not held.st_mode & stat.S_ISVTX
        if replaceable or held.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{where}: other users can replace what this run creates there; set TMPDIR to a folder of your "
                "own, or set the folder's sticky bit (chmod +t)"
            )
        return PrivateFolder.create(purpose, parent)
    except OSError as e:
        raise ConfigError(f"{where}: cannot create a folder there ({e}); set TMPDIR to a folder that is {wanted}") from None


def check_private(folder: Path) -> None:
    """Raise ConfigError unless `folder` is a folder of this user that nobody else can enter."""
    try:
        found = folder.lstat()
    except OSError as e:
        raise ConfigError(f"{folder}: the private folder of this run is gone ({e.strerror})") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: expected a folder of user {os.geteuid()} with mode 0700, found mode "
            f"{stat.S_IMODE(found.st_mode):04o} of user {found.st_uid}; what lies in it is not trusted"
        )
