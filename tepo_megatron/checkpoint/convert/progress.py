"""Show the progress of a conversion."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], object]


@contextlib.contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Advance]:
    """Show a progress bar on stderr within the block, if that is a terminal.

    Args:
        total_bytes: bytes of the whole conversion.
    Yields:
        A function to call with the number of bytes done since its last call.
    """
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda n: progress.advance(task, n)
