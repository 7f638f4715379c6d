"""Run one training job from its checks to its end. The checks are made before any process is started."""

import contextlib
from typing import TYPE_CHECKING

from tepo_megatron.observability import run_dir
from tepo_megatron.utils import service_guard
from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.supervisor import is_restart, supervisor

if TYPE_CHECKING:  # heavy imports come later, where an interrupt is reported in one line
    from tepo_megatron.config import Config


def service_holds_folder() -> bool:
    """Return whether torchrun restarted this rank, and the former one's rollout service lives on and holds the folder."""
    supervised = supervisor()
    return is_restart() and supervised is not None and service_guard.folder_of(supervised).exists()


def start(cfg: "Config", worker: str | None = None, watched: bool = False) -> None:
    """Make one run, already checked by `preflight`, in processes of its own and wait for it.

    Args:
        worker: Module that a rank runs. None: the one that trains.
    Raises:
        TepoError: It is also written to the run's log.txt.
    """
    from tepo_megatron.launcher.launcher import RanksFailed, launch
    from tepo_megatron.launcher.live_page import live_page

    page = live_page(cfg.run_dir, lambda text: print(text, flush=True)) if watched else contextlib.nullcontext()
    with run_dir.claim(cfg) as lock, page:
        try:
            if worker is None:
                launch(cfg, inherit=[lock.file])
            else:
                launch(cfg, worker, inherit=[lock.file])
        except RanksFailed as e:
            if lock.holds():  # otherwise the folder belongs to another run, or is gone
                with contextlib.suppress(OSError), (cfg.run_dir / "log.txt").open("a") as log:  # the disk may be at fault
                    log.write(f"error: {escaped(str(e))}\n")
            raise
