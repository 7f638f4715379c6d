"""Allow one submission of a run at a time, and clean up after submissions whose process was killed.

A killed `launch` may leave the folder of a job that was never submitted, or a job that the scheduler took and nobody recorded.
Its other files, such as an incomplete snapshot of the code, are in PrivateFolders, which the next submission removes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from launch import jobs
from launch.jobs import JobFolder
from tepo_megatron.utils.run_lock import RunLock


@contextlib.contextmanager
def submitting(folder: Path, executor: str, find: Callable[[JobFolder], str | None]) -> Iterator[None]:
    """Hold the lock of a folder's submissions, after the cleanup.

    Args:
        find: Return the scheduler's id of the job that was submitted from a folder. None: there is none.
    Raises:
        ConfigError: Another submission of this folder is being made (the message names its process), or it cannot be written.
    """
    with RunLock(jobs.launch_folder(folder), what=f"a submission of {folder.absolute().name}") as lock:
        lock.sign()
        _clean_up(folder, executor, find)
        yield


def _clean_up(folder: Path, executor: str, find: Callable[[JobFolder], str | None]) -> None:
    for slot in jobs.unrecorded(folder):
        if id := find(slot):
            slot.record(executor, id)
            said = f"job {slot.number} ({executor} job {id}) was submitted by a `launch` that was killed; it is recorded now"
            print(f"launch: {slot.run}: {said}", file=sys.stderr)
        elif not slot.has_run():
            slot.remove()
