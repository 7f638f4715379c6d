"""Name, publish, lock and delete the checkpoints in a folder.

    step-00000012            a complete checkpoint
    step-00000012.partial    a checkpoint that is being written, or that an interrupted save left
    step-00000012.deleted-*  being deleted; it is renamed first, so that a half-deleted one never looks complete
    step-00000012.abandoned  set aside: the run went back, and then saved a checkpoint of the same or an earlier step

Anything else in the folder is left alone.
"""

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from tepo_megatron.base.storage import sync

_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(partial|deleted-\w+)")


def complete(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of a step."""
    return folder / f"step-{step:08d}"


def partial(folder: Path, step: int) -> Path:
    """Return the path at which the checkpoint of a step is written."""
    return folder / f"step-{step:08d}.partial"


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in ascending order; none for a missing folder. Raises OSError."""
    if not folder.exists():
        return []
    matches = (_COMPLETE.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def prepare(folder: Path, step: int) -> Path:
    """Create an empty folder in which to write the checkpoint of a step, and return its path."""
    if not folder.exists():
        folder.mkdir(parents=True)
        sync(folder.parent)
    target = partial(folder, step)
    if target.exists():
        _to_deleted(target)
    target.mkdir()
    return target


def publish(folder: Path, step: int) -> list[Path]:
    """Turn the partial folder of a step into its checkpoint: sync everything to disk, then rename.

    Returns:
        New paths of the complete checkpoints that were set aside. They are those of this step and of later ones, which the run
        abandoned by going back.
    """
    source, target = partial(folder, step), complete(folder, step)
    for inner in (source, *(path for path in source.rglob("*") if path.is_dir())):
        sync(inner)
    aside = [_set_aside(target)] if target.exists() else []
    source.rename(target)
    sync(folder)
    aside += [_set_aside(complete(folder, later)) for later in steps(folder) if later > step]
    sync(folder)
    return aside


def prune(folder: Path, keep_last: int, keep_every: int | None, best: int | None = None) -> None:
    """Delete the checkpoints that no retention rule keeps and that nobody holds (`hold`), and what `sweep` deletes.

    Args:
        keep_every: keep checkpoints whose step is a multiple of this too; None: no such rule.
        best: keep the checkpoint of this step too; None: no such rule.
    """
    for step in steps(folder)[:-keep_last]:
        if step != best and not (keep_every and step % keep_every == 0):
            with _alone(complete(folder, step)) as alone:
                if alone:
                    _to_deleted(complete(folder, step))
    sweep(folder)


def sweep(folder: Path, writing: int | None = None) -> None:
    """Delete what earlier saves and deletions left unfinished."""
    for path in folder.iterdir():
        if _LEFT_OVER.fullmatch(path.name) and (writing is None or path != partial(folder, writing)):
            shutil.rmtree(path if ".deleted-" in path.name else _to_deleted(path))


def finish_deletions(folder: Path) -> None:
    """Delete what a killed process had begun to delete: a run that is resumed after its last step saves nothing more."""
    for path in folder.glob("step-*.deleted-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Protect a checkpoint from `prune` within the block, if the file system supports locks."""
    with _opened(path) as folder:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        if not path.exists():  # renamed between opening and locking
            raise FileNotFoundError(2, os.strerror(2), str(path))
        yield


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Yield whether nobody holds `path`. If so, nobody can hold it within the block."""
    with _opened(path) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError as e:
            alone = not isinstance(e, BlockingIOError)  # any other error: the file system has no locks
        yield alone


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # closing it, or the end of the process, releases its lock
    try:
        yield folder
    finally:
        os.close(folder)


def _set_aside(path: Path) -> Path:
    target = path.with_name(f"{path.name}.abandoned")
    if target.exists():
        _to_deleted(target)
    return path.rename(target)


def _to_deleted(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name.partition('.')[0]}.deleted-{uuid.uuid4().hex}"))
