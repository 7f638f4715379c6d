"""Servers whose memory grows: real processes that hold more on request, and are started again between two steps."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tepo_megatron.config import RendezvousServerConfig, RolloutConfig, ServerConfig, UrlServerConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.engines import beginning
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.inference.servers.local import LocalServer
from tests.direct_requests import ask
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, behave, expected, fleet, ids, process, until  # noqa: F401

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
    expected: list[list[int]],  # noqa: F811
    tmp_path: Path,
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


def test_without_a_limit_it_may_grow(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=1, restart_after_growth_gib=0) as one:
        step(one, 0)
        step(one, 1)
        behave(one, 0, grow=2 * MIB)
        step(one, 2)
        assert one.restarts == 0 and one.take_events() == []


def test_what_did_not_change_is_not_left_out_for_one_that_was_restarted(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2, **LIMIT) as two:
        step(two, 0)
        two.begin_update(1)
        assert two.base == 0
        two.keep_unchanged(["a"])
        two.finish_update()
        two.generate(PROMPTS, SAMPLING, seed=7)
        behave(two, 1, grow=2 * MIB)
        two.begin_update(2)
        assert two.base is None and len(two.recipients) == 2
        two.finish_update()
        assert served(two) == [2, 2] and two.restarts == 1


@pytest.mark.full
@pytest.mark.parametrize("on_weight_update", ["finish", "continue"])
def test_what_is_under_way_is_waited_for_or_cut_off_first(
    on_weight_update: str,
    expected: list[list[int]],  # noqa: F811
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, servers=1, on_weight_update=on_weight_update, **LIMIT) as one:
        step(one, 0)
        step(one, 1)
        behave(one, 0, grow=2 * MIB, slow=2.0 if on_weight_update == "finish" else 15.0)  # of all five tokens
        groups = one.open()
        groups.add(PROMPTS[:4], SAMPLING, seed=7)
        until(lambda: sum(slot.endpoint.in_flight for slot in one.slots) == 4)
        time.sleep(0.2 if on_weight_update == "finish" else 4.0)
        one.update_weights([], version=2)
        assert one.restarts == 1 and not one.needs_weights
        made = sorted((r for group in iter(groups.next, None) for r in group), key=lambda r: r.prompt_id)
        assert len(made) == 12 and {r.response_length for r in made} == {5}
        if on_weight_update == "finish":
            assert ids(made) == expected[:12] and {r.policy_version for r in made} == {1}
        else:  # the process that had the first tokens of them is gone
            assert {r.policy_version for r in made} == {1} and all(r.later_versions[0][1] == 2 for r in made)
        assert [event for event in one.take_events() if "is sampled again" in event] == []


def test_one_that_is_put_to_sleep_is_ended_and_comes_back_when_all_are_awake(
    expected: list[list[int]],  # noqa: F811
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, servers=2, **LIMIT) as two:
        for version in (0, 1):
            assert step(two, version) == expected
            two.sleep()
            two.wake("weights")
            two.update_weights([], version + 1)
            two.wake("kv_cache")
        two.generate(PROMPTS, SAMPLING, seed=7)
        first = process(two, 0)
        behave(two, 0, grow=2 * MIB)
        two.sleep()
        assert not first.is_running() and not two.slots[0].endpoint.server.running, "it holds memory still"
        two.wake("weights")
        time.sleep(0.3)
        assert not two.slots[0].endpoint.server.running, "it takes memory that is the trainer's"
        two.update_weights([], 3)
        two.wake("kv_cache")
        assert ids(two.generate(PROMPTS, SAMPLING, seed=7)) == expected
        until(lambda: two.needs_weights)
        two.update_weights([], 3)
        assert served(two) == [3, 3] and two.restarts == 1


def test_one_that_does_not_come_back_ends_the_run(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=1, **LIMIT) as one:
        step(one, 0)
        step(one, 1)
        behave(one, 0, grow=2 * MIB)
        behind = one.endpoints[0].server
        assert isinstance(behind, LocalServer)
        behind.log_path = tmp_path / "0.log" / "below a file"
        failed: list[str] = []
        waiting = threading.Thread(target=lambda: failed.append(_refusal(one)))
        waiting.start()
        waiting.join(60)
        assert len(failed) == 1 and "below a file: cannot write the log of the inference server" in failed[0]


def _refusal(fleet: Fleet) -> str:
    with pytest.raises(RolloutError) as caught:
        fleet.update_weights([], version=2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cfg", "why"),
    [
        (RolloutConfig(server=UrlServerConfig(urls=["http://there:1"])), "their memory is not known here"),
        (RolloutConfig(server=RendezvousServerConfig(rendezvous="folder")), "their memory is not known here"),
        (RolloutConfig(only=True), "no weights are sent, between which that is done"),
        (RolloutConfig(only=True, server=ServerConfig(restart_after_growth_gib=0)), None),
        (RolloutConfig(), None),
    ],
)
def test_a_run_in_which_it_cannot_work_says_so(cfg: RolloutConfig, why: str | None, tmp_path: Path) -> None:
    *lines, _ = beginning(cfg, tmp_path)
    key = "" if isinstance(cfg.server, UrlServerConfig) else " (rollout.server.restart_after_growth_gib=4)"
    line = f"servers are not restarted when they grow{key}: {why}"
    assert lines == ([] if why is None else [line])
