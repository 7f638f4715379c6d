"""Run `tepo watch` while a run lasts."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tepo_megatron.utils.processes import die_with_parent, reap

END_SECONDS = 5.0  # limit since SIGTERM to `tepo watch`: it holds nothing; then SIGKILL


@contextlib.contextmanager
def live_page(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the live page of a run inside of the block. If the page cannot be served, it says so, and the block goes on."""
    page = subprocess.Popen(
        [sys.executable, "-m", "tepo_megatron", "watch", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which then ends the page
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    assert page.stdout is not None
    threading.Thread(target=_tell, args=(page.stdout, say), daemon=True).start()
    try:
        yield
    finally:
        page.terminate()
        try:
            page.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            page.kill()
            reap(page)


def _tell(output: IO[str], say: Callable[[str], None]) -> None:
    """Say the URL, which is the first line, and read on until the page ends."""
    url = output.readline().strip()
    if url:
        say(f"live page until the run ends, for this machine alone: {url}")
    output.read()
