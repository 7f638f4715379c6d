"""Which checkpoints a folder holds, and which of them may go.

    step-00000012            complete
    step-00000012.partial    being written, or what was left of that
    step-00000012.deleted-*  on its way out: renamed first, so that a half-deleted one never looks complete
    step-00000012.abandoned  later than a checkpoint that was saved after it: the run went back and took another course

Anything else in it is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from tepo_megatron.checkpoint.files import sync_folder

_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(partial|deleted-\w+)")


def complete(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, once it is complete."""
    return folder / f"step-{step:08d}"


def partial(folder: Path, step: int) -> Path:
    """Where it is written."""
    return folder / f"step-{step:08d}.partial"


def steps(folder: Path) -> list[int]:
    """Of the complete checkpoints, ascending. Raises OSError for a folder that cannot be read; a missing one has none."""
    if not folder.exists():
        return []
    found = (_COMPLETE.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def prepare(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` to. What an earlier save left unfinished no longer has a valid name."""
    if not folder.exists():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    target = partial(folder, step)
    if target.exists():
        _to_deleted(target)
    target.mkdir()
    return target


def publish(folder: Path, step: int) -> list[Path]:
    """What was written becomes the checkpoint of `step`: by renaming, with all of it on disk.

    Returns what was set aside: complete checkpoints of this and of later steps, which the run has left by going back.
    """
    source, target = partial(folder, step), complete(folder, step)
    for inner in (source, *(path for path in source.rglob("*") if path.is_dir())):
        sync_folder(inner)
    aside = [_set_aside(target)] if target.exists() else []
    source.rename(target)
    sync_folder(folder)
    aside += [_set_aside(complete(folder, later)) for later in steps(folder) if later > step]
    sync_folder(folder)
    return aside


def prune(folder: Path, keep_last: int, keep_every: int | None, best: int | None = None) -> None:
    """Delete the checkpoints that neither `keep_last` nor `keep_every` keeps, but for that of the step `best` and one that
    somebody holds (`hold`).
    """
    for step in steps(folder)[:-keep_last]:
        if step != best and not (keep_every and step % keep_every == 0):
            with _alone(complete(folder, step)) as alone:
                if alone:
                    _to_deleted(complete(folder, step))
    sweep(folder)


def sweep(folder: Path, writing: int | None = None) -> None:
    """Delete what earlier saves and deletions left unfinished. writing: a step whose partial folder is in use."""
    for path in folder.iterdir():
        if _LEFT_OVER.fullmatch(path.name) and (writing is None or path != partial(folder, writing)):
            shutil.rmtree(path if ".deleted-" in path.name else _to_deleted(path))


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Within, nobody prunes this checkpoint, as far as the file system has locks. Raises FileNotFoundError when it is gone."""
    with _opened(path) as folder:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        if not path.exists():  # renamed between opening and locking
            raise FileNotFoundError(2, os.strerror(2), str(path))
        yield


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody holds `path`; if so, nobody gets hold of it within."""
    with _opened(path) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError as e:
            alone = not isinstance(e, BlockingIOError)  # else the file system has no locks
        yield alone


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # the kernel drops its lock when it is closed, or the process ends
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
