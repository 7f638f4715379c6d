"""Runs whose ranks are killed and started again while their rollout service lives on. The test's process is the launcher."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.base.processes import ATTEMPT
from tepo_megatron.config import Config
from tepo_megatron.monitor import run_dir
from tepo_megatron.service.messages import CONNECTION
from tests.parallel.resume_worlds import FollowingEngine, Kill, journal_rows, run_rank, without_report
from tests.services import ForkedService
from tests.waiting import lives, until
from tests.worlds import run_world


def restarted(cfg: Config, journal: Path, *kills: Kill, configs: tuple[Config, ...] = ()) -> None:
    """Run to the end: the ranks are killed as `kills` say, and started again after each. One service serves all of them."""
    run_dir.prepare(cfg)
    service = ForkedService(functools.partial(FollowingEngine, journal=journal, attempt=0), before=without_report)
    with pytest.MonkeyPatch.context() as patch:
        for number, kill in enumerate((*kills, None)):
            patch.setenv(ATTEMPT, str(number))
            given = (configs or (cfg,))[min(number, max(0, len(configs) - 1))]
            given = replace(given, resume=True) if number else given
            with service.connect().connection as connection:  # the ranks inherit it
                patch.setenv(CONNECTION, f"{connection.fileno()},{service.pid}")
                try:
                    run_world(given.parallel.world_size, run_rank, given, journal, 0, kill, timeout=120.0)
                except AssertionError:
                    killed = [row["killed"] for row in journal_rows(journal) if "killed" in row]
                    if kill is None or len(killed) != number + 1:
                        raise
                    assert lives(service.pid), "the service did not outlive the ranks"
                else:
                    assert kill is None, f"the run ended before the kill {kill}"
    until(lambda: not lives(service.pid))
