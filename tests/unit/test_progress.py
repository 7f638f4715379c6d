"""The time for which a process has done nothing. tests/unit/rollout/test_server.py has what counts as progress."""

import os
from types import SimpleNamespace

import pytest

from tepo_megatron.base import progress


def test_a_pause_of_the_looker_is_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped for an hour and goes on has lost nothing."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(progress.StartProgress, "_work", lambda self: (0, 0, 0.0))
    start = progress.StartProgress(os.getpid())
    for passed, idle in ((progress.LOOK_SECONDS, progress.LOOK_SECONDS), (3600.0, 3 * progress.LOOK_SECONDS)):
        clock.now += passed
        assert start.idle_seconds() == idle
