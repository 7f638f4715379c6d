"""Servers whose memory grows: real processes that hold more on request, and are started again between two steps."""

from pathlib import Path

import pytest

from tepo_megatron.engines.servers.fleet import Fleet
from tests.direct_requests import ask
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, behave, fleet, ids, process

pytestmark = pytest.mark.slow
MIB = 100  # by which servers may grow here: more than an idle Python varies by
LIMIT = {"restart_after_growth_gib": MIB / 1024, "restarts": 0}  # a restart that counted would be the end of the fleet


def step(fleet: Fleet, version: int) -> list[list[int]]:
    """Serve the weights of a version and sample with them: the trainer's part of a step."""
    fleet.update_weights([], version)
    assert not fleet.needs_weights
    rollouts = fleet.generate(PROMPTS, SAMPLING, seed=7)
    assert {r.policy_version for r in rollouts} == {version}
    return ids(rollouts)


def served(fleet: Fleet) -> list[int]:
    """The versions that the servers themselves say they have."""
    return [ask(fleet, server, "GET", "/about")["version"] for server in range(len(fleet.endpoints))]


def test_one_that_has_grown_is_restarted_before_the_next_weights_and_gets_them(
    expected: list[list[int]], tmp_path: Path
) -> None:
    with fleet(tmp_path, servers=2, **LIMIT) as two:
        two.update_weights([], version=0)
        behave(two, 0, grow=2 * MIB)  # before its first requests are answered: what is set up once is no growth
        assert [step(two, version) for version in (1, 2, 3)] == [expected] * 3 and two.restarts == 0
        for times in (1, 2):  # the process that came back is measured again
            first, other = process(two, 0), process(two, 1)
            behave(two, 0, grow=2 * MIB)
            assert ids(two.generate(PROMPTS, SAMPLING, seed=7)) == expected
            assert first.is_running() and two.restarts == times - 1, "it is ended in the midst of a step"
            assert step(two, 10 * times) == expected
            assert not first.is_running() and process(two, 1) == other
            assert served(two) == [10 * times] * 2 and two.restarts == times
            (event,) = two.take_events()
            assert "server 0 holds 0." in event and "after its first requests" in event
            assert "restart_after_growth_gib=0.0976562" in event and event.endswith("server 0 is started again")
            assert [step(two, 10 * times + more) for more in (1, 2)] == [expected] * 2 and two.take_events() == []
