"""Run one training job from its checks to its end. The checks are made before any process is started."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tepo_megatron.base.errors import escaped
from tepo_megatron.base.processes import die_with_parent, reap
from tepo_megatron.command.nodes import ONE_MACHINE, Nodes, refuse_torchrun
from tepo_megatron.monitor import run_dir

if TYPE_CHECKING:  # heavy imports come later, where an interrupt is reported in one line
    from tepo_megatron.config import Config

END_SECONDS = 5.0  # limit since SIGTERM to `tepo watch`: it holds nothing; then SIGKILL


def start(cfg: "Config", worker: str | None = None, watched: bool = False, nodes: Nodes = ONE_MACHINE) -> None:
    """Make one run, or this machine's part of it, in processes of its own and wait for it. `preflight` has checked it.

    Args:
        worker: Module that a rank runs. None: the one that trains.
    Raises:
        TepoError: It is also written to the run's log.txt.
    """
    from tepo_megatron.command.launcher import RanksFailed, launch

    refuse_torchrun()
    launched: Callable[..., None] = functools.partial(launch, cfg, nodes=nodes)
    if worker is not None:
        launched = functools.partial(launched, worker=worker, service=())
    if not nodes.is_first:
        launched()
        return
    page = live_page(cfg.run_dir, lambda text: print(text, flush=True)) if watched else contextlib.nullcontext()
    with run_dir.claim(cfg) as lock, page:
        try:
            launched(inherit=[lock.file])
        except RanksFailed as e:
            if lock.holds():  # otherwise the folder belongs to another run, or is gone
                with contextlib.suppress(OSError), (cfg.run_dir / "log.txt").open("a") as log:  # the disk may be at fault
                    log.write(f"error: {escaped(str(e))}\n")
            raise


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
