"""The process of a rank: `tepo train` starts `python -m tepo_megatron.trainer.worker runs/NAME/config.yaml` once for each."""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tepo_megatron.base.errors import RunStopped, TepoError, escaped
from tepo_megatron.base.processes import LAUNCHER, die_with_parent, quiet_upstream
from tepo_megatron.base.storage import disk_fault, replace_file
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config

if TYPE_CHECKING:
    from tepo_megatron.dist.platform import Platform

FOLDER = "TEPO_RANK_LOGS"  # environment variable with the folder of the ranks' logs
ERROR_FILE = "TEPO_ERROR_FILE"  # environment variable with the JSON file for a rank's last message


def run_rank(cfg: Config, work: "Callable[[Config, Platform], None] | None" = None) -> int:
    """Train as this process's rank; return the exit status: 0, 1 after an error, 75 (rank 0) if the run was asked to end.

    SIGINT and SIGTERM end a rank at once: it may be in a collective that no Python handler can interrupt, and all its files are
    written atomically. It also ends when its launcher ends for any reason.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if LAUNCHER in os.environ:
        die_with_parent(int(os.environ[LAUNCHER]))
    redirect_output()
    quiet_upstream()
    # one hardware queue, so that kernels start in the order that Megatron-Core's overlap of tp communication needs
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from tepo_megatron.dist.platform import activate

    try:
        platform = activate(cfg.platform)
        if work is not None:
            work(cfg, platform)
            return 0
        from tepo_megatron.trainer.train import train  # imports Megatron-Core, so the platform must be active first

        train(cfg, platform, on_hang=_end_at_once)
    except TepoError as e:
        leave_message(str(e), expected=True, restarts=False)
        return os.EX_TEMPFAIL if isinstance(e, RunStopped) else 1
    except Exception as e:
        fault = disk_fault(e, cfg.run_dir, written=False)
        leave_message(fault or traceback.format_exc().rstrip(), expected=fault is not None, restarts=fault is None)
        return 1
    return 0


def leave_message(message: str, expected: bool, restarts: bool) -> None:
    """Write a rank's last message for the launcher; to stderr if there is none.

    Args:
        expected: Whether it is an error message of ours; False: a traceback.
    """
    try:
        if (path := os.environ.get(ERROR_FILE)) is not None:
            # the monotonic clock is the same for all processes of a machine, and nobody sets it
            content = {"message": message, "expected": expected, "restarts": restarts, "time": time.monotonic()}
            replace_file(Path(path), json.dumps(content).encode(), durable=False)
            return
    except OSError:  # for example because the disk for temporary files is full
        pass
    print(f"tepo: rank {os.environ.get('RANK', '0')}: {escaped(message)}", file=sys.stderr, flush=True)


def _end_at_once(message: str) -> NoReturn:
    leave_message(message, expected=True, restarts=True)
    os._exit(1)


def redirect_output() -> None:
    """Append the output of this rank to rank-N.log in the folder that TEPO_RANK_LOGS names; rank 0 keeps its output.

    Without the variable, or if the file cannot be written, nothing changes.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "0")
    if not folder or rank == "0":
        return
    with contextlib.suppress(OSError):  # the output is then in the log of the machine
        file = os.open(os.path.join(folder, f"rank-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)


if __name__ == "__main__":
    sys.exit(run_rank(load_config(sys.argv[1])))
