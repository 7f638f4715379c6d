"""What a conversion tells while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], object]


@contextlib.contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Advance]:
    """A bar on stderr, on a terminal only; yields a function to call with the number of bytes done since the last call."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda n: progress.advance(task, n)
