"""Runs whose ranks are killed and started again while their rollout service lives on. The test's process is the supervisor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.config import Config
from tepo_megatron.observability import run_dir
from tepo_megatron.utils import service_guard
from tepo_megatron.utils.processes import ATTEMPT, LAUNCHER
from tests.parallel.resume_worlds import Kill, journal_rows, run_rank
from tests.worlds import run_world


def service_pid() -> int | None:
    """Return the pid of the living service of this process's ranks."""
    pids = service_guard.read_pids(service_guard.folder_of(os.getpid()))
    return None if pids is None else pids[1]


@contextlib.contextmanager
def supervised() -> Iterator[pytest.MonkeyPatch]:
    """Be the supervisor of the ranks inside the block; the service ends with it."""
    folder = service_guard.folder_of(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAUNCHER, str(os.getpid()))
        try:
            yield patch
        finally:
            service_guard.end(folder, 20.0)
            assert not folder.exists()


def restarted(cfg: Config, journal: Path, *kills: Kill, configs: tuple[Config, ...] = ()) -> None:
    """Run to the end: the ranks are killed as `kills` say, and started again after each. One service serves all of them."""
    run_dir.prepare(cfg)
    services = set()
    with supervised() as patch:
        for number, kill in enumerate((*kills, None)):
            patch.setenv(ATTEMPT, str(number))
            given = (configs or (cfg,))[min(number, max(0, len(configs) - 1))]
            given = replace(given, resume=True) if number else given
            try:
                run_world(given.parallel.world_size, run_rank, given, journal, 0, kill, timeout=120.0)
            except AssertionError:
                killed = [row["killed"] for row in journal_rows(journal) if "killed" in row]
                if kill is None or len(killed) != number + 1:
                    raise
                services.add(service_pid())
            else:
                assert kill is None, f"the run ended before the kill {kill}"
    assert None not in services and len(services) <= 1, "the service did not outlive the ranks"
