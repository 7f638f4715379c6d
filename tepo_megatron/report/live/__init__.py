"""`tepo watch`: the report's panels of runs that are under way, on a page that the loopback interface serves.

run.py         one run, its samples and their tokens
server.py      the HTTP server
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from tepo_megatron.base.errors import ConfigError


def watch(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the live page of some runs until an interrupt.

    Args:
        port: Port of the loopback interface. 0: a free one.
    Raises:
        ConfigError: There is no such folder, a run is named twice, or the port is taken.
    """
    for place, folder in enumerate(folders):
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder; give the folder of a run, runs/NAME")
        if any(folder.resolve() == other.resolve() for other in folders[:place]):
            raise ConfigError(f"{folder} is named twice; a run is shown once")
    from tepo_megatron.report.live.server import serve  # takes a moment, in which an interrupt ends in one line

    asyncio.run(serve(folders, port, lambda url: say(f"{url}\nthe page stays until Ctrl-C; only this machine can open it")))
