"""The process that starts the ranks of this machine, and may restart them: our launcher, or torchrun's agent.

This module imports nothing heavy, because every process of a run uses it.
"""

import os

LAUNCHER = "TEPO_LAUNCHER_PID"  # environment variable with our launcher's process ID, for the ranks that it starts
ATTEMPT = "TEPO_ATTEMPT"  # environment variable with the number of restarts by our launcher
AGENT = "TORCHELASTIC_RUN_ID"  # environment variable that torchrun's agent sets for its ranks
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
