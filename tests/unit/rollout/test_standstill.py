"""Trainer and servers in turns on machines where `tepo serve` keeps the servers. Real processes behind real HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.inference.servers.fleet import Fleet
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, ids
from tests.unit.rollout.test_remote import (  # noqa: F401
    Serving,
    killed_trainer,
    record_of,
    scripted,
    server_process,
    serving,
    trainer,
)
from tests.unit.rollout.test_sleep import released, wake
from tests.waiting import until

BOTH_PARTS = ["weights", "kv_cache"]


def servers_of(serve: Serving) -> int:
    """First processes of servers that live under this `tepo serve`, on their way or up."""
    return sum("tepo_megatron.inference.servers.guard" in line for line in serve.lines().values())


def versions(fleet: Fleet) -> set[int]:
    return {r.policy_version for r in fleet.generate(PROMPTS, SAMPLING, seed=7)}


@pytest.mark.full
def test_a_server_that_dies_in_the_trainers_turn_is_started_after_it(
    serving: Callable[..., Serving],  # noqa: F811
    tmp_path: Path,
) -> None:
    serves = [serving(servers=1, colocate=True) for _ in range(2)]
    rendezvous = serves[0].rendezvous
    with trainer(tmp_path, servers=2, colocate=True, rendezvous=str(rendezvous.folder)) as fleet:
        fleet.update_weights([], version=1)
        expected = ids(fleet.generate(PROMPTS, SAMPLING, seed=7))
        fleet.sleep()
        assert [released(fleet, i) for i in range(2)] == [BOTH_PARTS] * 2
        dead = serves[0].records()[0]
        serve = next(s for s in serves if s.process.pid == dead.pid)
        server_process(serve, dead).kill()
        until(lambda: not all(slot.up for slot in fleet.slots))
        until(lambda: "is started again" in serve.log.read_text())  # it would be, 0.05 s later
        time.sleep(1.0)
        assert servers_of(serve) == 0 and len(serve.records()) == 1
        wake(fleet, version=2)
        assert versions(fleet) == {2}  # version of the other server
        until(lambda: fleet.needs_weights)
        fleet.update_weights([], version=2)
        fleet.sleep()
        assert [released(fleet, i) for i in range(2)] == [BOTH_PARTS] * 2
        wake(fleet, version=3)
        rollouts = fleet.generate(PROMPTS, SAMPLING, seed=7)
        assert ids(rollouts) == expected and {r.policy_version for r in rollouts} == {3}
    assert rendezvous.leases.current() is None
    for serve in serves:
        serve.process.terminate()
        assert serve.process.wait(60) == 0, serve.log.read_text()
    assert {path.name for path in rendezvous.folder.iterdir() if path.suffix != ".log"} == {"key"}


@pytest.mark.full
def test_a_killed_trainers_turn_ends_when_its_run_is_resumed(
    serving: Callable[..., Serving],  # noqa: F811
    tmp_path: Path,
) -> None:
    serve = serving(servers=1, colocate=True)
    settings: dict[str, Any] = {"colocate": True, "rendezvous": str(serve.rendezvous.folder)}
    killed_trainer(tmp_path, settings, after="sleep")
    turn = serve.rendezvous.leases.current()
    assert turn is not None and turn.run == str(tmp_path / "run")
    with trainer(tmp_path, **settings) as resumed:
        assert serve.rendezvous.leases.current() is None
        resumed.update_weights([], version=1)
        assert versions(resumed) == {1}
        resumed.sleep()
        assert released(resumed, 0) == BOTH_PARTS
