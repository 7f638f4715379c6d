"""Run one training job from its checks to its end. The checks are made before any process is started."""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from tepo_megatron.launcher.nodes import ONE_MACHINE, Nodes, refuse_torchrun
from tepo_megatron.observability import run_dir
from tepo_megatron.utils.escaping import escaped

if TYPE_CHECKING:  # heavy imports come later, where an interrupt is reported in one line
    from tepo_megatron.config import Config


def start(cfg: "Config", worker: str | None = None, watched: bool = False, nodes: Nodes = ONE_MACHINE) -> None:
    """Make one run, or this machine's part of it, in processes of its own and wait for it. `preflight` has checked it.

    Args:
        worker: Module that a rank runs. None: the one that trains.
    Raises:
        TepoError: It is also written to the run's log.txt.
    """
    from tepo_megatron.launcher.launcher import RanksFailed, launch
    from tepo_megatron.launcher.live_page import live_page

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
