"""The process that starts the ranks of this machine, and may restart them: our launcher, or torchrun's agent.

This module imports nothing heavy, because every process of a run uses it.
"""

import contextlib
import os
from pathlib import Path

from tepo_megatron.utils.atomic import replace_file

LAUNCHER = "TEPO_LAUNCHER_PID"  # environment variable with our launcher's process ID, for the ranks that it starts
ATTEMPT = "TEPO_ATTEMPT"  # environment variable with the number of restarts by our launcher
AGENT = "TORCHELASTIC_RUN_ID"  # environment variable that torchrun's agent sets for its ranks
AGENT_FILE = "TORCHELASTIC_ERROR_FILE"  # the same for the file from which it reads a rank's last message
_AGENT_LIMIT, _AGENT_ATTEMPT = "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"


def supervisor() -> int | None:
    """Return the pid of the process that restarts this rank if it fails; None if nobody does."""
    if LAUNCHER in os.environ:
        return int(os.environ[LAUNCHER])
    if AGENT in os.environ and int(os.environ.get(_AGENT_LIMIT, "0")) > 0:
        return os.getppid()
    return None


def restart_count() -> int:
    """Return how often the ranks were restarted, as their supervisor counts; 0 without a supervisor."""
    return int(os.environ.get(ATTEMPT, os.environ.get(_AGENT_ATTEMPT, "0")))


def is_restart() -> bool:
    """Return whether this rank replaces one that failed."""
    return restart_count() > 0


def leave_verdict(why: str) -> None:
    """Note why ranks that torchrun restarts on this machine would only fail again; it restarts them after any error."""
    path = _verdict_path()
    if path is not None:
        with contextlib.suppress(OSError):
            replace_file(path, why.encode(), durable=False)


def read_verdict() -> str | None:
    """Return why this rank, which torchrun restarted, would only fail again; None if it may succeed."""
    path = _verdict_path()
    if path is not None:
        with contextlib.suppress(OSError):
            return path.read_text()
    return None


def _verdict_path() -> Path | None:
    """Return the path of the note in the agent's own folder; None if no agent restarts ranks.

    The agent of each machine has a new temporary folder for each job; it holds attempt_N/LOCAL_RANK/error.json (torch 2.13).
    """
    if LAUNCHER in os.environ or AGENT_FILE not in os.environ or supervisor() is None:
        return None
    return Path(os.environ[AGENT_FILE]).parents[2] / "verdict"
