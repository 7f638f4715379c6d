"""Decide whether ranks that failed are started again, from the newest checkpoint, next to a living rollout service."""

from collections.abc import Mapping
from pathlib import Path

from tepo_megatron.launcher.ranks import RankFailure, cause_of, was_killed
from tepo_megatron.utils.memory_kills import MemoryKills


class RestartPolicy:
    """Counts the restarts without progress. Progress is a newer complete checkpoint.

    Args:
        limit: Number of consecutive restarts without progress; 0: none.
    """

    def __init__(self, limit: int, checkpoints: Path) -> None:
        self._limit, self._checkpoints = limit, checkpoints
        self._newest, self._count = self._step(), 0

    def allow(self, failures: Mapping[int, RankFailure], kills: MemoryKills) -> str | None:
        """Count a failure of the ranks. Return how they are restarted, as text; None if they are not."""
        if not self._limit or not is_recoverable(failures, kills):
            return None
        newest = self._step()
        if newest > self._newest:
            self._newest, self._count = newest, 0
        self._count += 1
        if self._count > self._limit:
            return None
        where = f"from the checkpoint of step {newest}" if newest else "from the start, because there is no checkpoint yet"
        return f"the ranks are restarted {where} (restart {self._count} of {self._limit} without a newer checkpoint)"

    def _step(self) -> int:
        from tepo_megatron.checkpoint.folder import steps

        return max(steps(self._checkpoints), default=0)


def is_recoverable(failures: Mapping[int, RankFailure], kills: MemoryKills) -> bool:
    """Return whether ranks may succeed where these failed: one was killed, hung, or failed unexpectedly.

    An error that is raised on purpose (a `TepoError`) would come again, unless a rank was killed, which may have caused it.
    """
    if any(was_killed(failure) for failure in failures.values()):
        return True
    message = failures[cause_of(failures, kills)].message
    return message is None or bool(message["restarts"])
