"""The files of a folder that other processes write to while it is read."""

import os
from pathlib import Path


def paths_below(folder: Path) -> list[Path]:
    """Return the paths of all files and folders in a folder, at any depth, sorted; what vanishes meanwhile is left out.

    `Path.rglob` raises if a subfolder is renamed or deleted under it, and a run does both: snapshots and checkpoints are
    written under a temporary name.

    Raises:
        OSError: The folder itself, or a subfolder that is still there, cannot be read.
    """

    def unless_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or Path(error.filename) == folder:
            raise error

    walk = os.walk(folder, onerror=unless_gone)
    return sorted(Path(place, name) for place, folders, files in walk for name in (*folders, *files))


def files_below(folder: Path) -> list[Path]:
    return [path for path in paths_below(folder) if path.is_file()]
