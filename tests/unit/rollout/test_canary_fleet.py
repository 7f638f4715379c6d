"""A fleet of scripted servers that are asked about canaries: who is ended, who serves, and when the run ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import SyncConfig
from tepo_megatron.errors import SyncError
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.types import Canaries
from tests.scripted_api import canary_logprobs
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, behave, fleet, ids, until

pytestmark = pytest.mark.slow
CANARIES = Canaries(sequences=(tuple(range(60)), tuple(range(60))), cached_from=(50, 50))


def expect(fleet: Fleet, *versions: int) -> None:
    for version in versions:
        fleet.expect_scores(version, canary_logprobs(version, CANARIES.num_tokens).tolist())


def use(fleet: Fleet, **sync: Any) -> None:
    fleet.use_canaries(CANARIES, SyncConfig(canaries=2, **sync), same_precision=True)


def deliver(fleet: Fleet, version: int) -> None:
    expect(fleet, version)
    fleet.update_weights([Path("w")], version)


def test_one_of_four_servers_is_wrong_and_samples_nothing_with_it(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=4) as four:
        use(four)
        deliver(four, 0)
        expected = ids(four.generate(PROMPTS, SAMPLING, seed=3))
        behave(four, 2, serves=0)
        deliver(four, 1)
        rollouts = four.generate(PROMPTS, SAMPLING, seed=3)
        assert ids(rollouts) == expected and "server 2" not in {name for r in rollouts for _, name in r.servers}
        until(lambda: four.needs_weights)
        four.update_weights([Path("w")], 1)
        rollouts = four.generate(PROMPTS, SAMPLING, seed=3)
        assert "server 2" in {name for r in rollouts for _, name in r.servers}
        said = "\n".join(four.take_events())
        assert (
            "canaries of server 2: it serves the weights of version 0 instead of 1" in said
            and "server 2 is started again" in said
        )
        metrics = four.canary_metrics()
        assert metrics["canary/checks"] == 9 and metrics["canary/wrong"] == 1 and metrics["canary/distinct"] == 1
        assert four.canary_metrics()["canary/checks"] == 0


def test_a_server_that_is_wrong_again_after_a_restart_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(tmp_path, servers=2) as two:
        use(two)
        deliver(two, 0)
        behave(two, 1, serves=0)
        monkeypatch.setenv("TEPO_SCRIPTED_SERVES", "0")
        deliver(two, 1)
        until(lambda: two.needs_weights)
        with pytest.raises(SyncError, match=r"canaries of server 1: .* of version 0 instead of 1 .* It was wrong before"):
            two.update_weights([Path("w")], 1)
        with pytest.raises(SyncError, match="the engine can no longer be used"):
            two.generate(PROMPTS, SAMPLING, seed=0)


def test_a_right_answer_in_between_makes_the_next_wrong_one_the_first(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        use(two)
        deliver(two, 0)
        for version in (1, 2):
            behave(two, 1, serves=0)
            deliver(two, version)
            until(lambda: two.needs_weights)
            two.update_weights([Path("w")], version)
        assert two.restarts == 2 and two.canary_metrics()["canary/wrong"] == 2


def test_one_server_alone_is_restarted_and_several_that_are_all_wrong_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with fleet(tmp_path / "one", servers=1) as one:
        use(one)
        deliver(one, 0)
        behave(one, 0, serves=0)
        deliver(one, 1)
        until(lambda: one.needs_weights)
        one.update_weights([Path("w")], 1)
        assert one.generate(PROMPTS[:2], SAMPLING, seed=0)[0].policy_version == 1
    with fleet(tmp_path / "two", servers=2) as two:
        use(two)
        deliver(two, 0)
        for server in range(2):
            behave(two, server, serves=0)
        with pytest.raises(
            SyncError, match=r"all 2 inference servers are wrong:\ncanaries of server 0: .*\ncanaries of server 1"
        ):
            deliver(two, 1)


def test_a_server_that_loses_its_weights_is_found_while_it_samples(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=3) as three:
        use(three, canary_every=0.1)
        deliver(three, 0)
        deliver(three, 1)
        behave(three, 1, serves=0, slow=5.0)  # what it samples is lost with it, and sampled by others
        rollouts = three.generate(PROMPTS, SAMPLING, seed=3)
        assert {name for r in rollouts for _, name in r.servers} == {"server 0", "server 2"}
        assert "canaries of server 1: it serves the weights of version 0 instead of 1" in "\n".join(three.take_events())
        until(lambda: three.needs_weights)
        three.update_weights([Path("w")], 1)


@pytest.mark.parametrize("on_weight_update", ["finish", "continue"])
def test_questions_while_weights_come_are_no_false_alarms(tmp_path: Path, on_weight_update: str) -> None:
    with fleet(tmp_path, servers=2, on_weight_update=on_weight_update) as two:
        use(two, canary_every=0.001)
        for server in range(2):
            behave(two, server, loading=0.05)
        for version in range(8):
            deliver(two, version)
            two.generate(PROMPTS[:4], SAMPLING, seed=version)
        metrics = two.canary_metrics()
        assert metrics["canary/checks"] > 20 and metrics["canary/wrong"] == 0
        assert two.restarts == 0 and two.take_events() == []


def test_a_sleeping_server_is_asked_when_it_wakes(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        use(two, canary_every=0.05)
        deliver(two, 0)
        two.sleep()
        time.sleep(0.3)
        two.canary_metrics()
        two.wake("weights")
        expect(two, 1)
        behave(two, 1, serves=0)
        two.update_weights([Path("w")], 1)
        assert two.canary_metrics()["canary/checks"] == 0, "its KV cache sleeps"
        two.wake("kv_cache")
        assert {name for r in two.generate(PROMPTS, SAMPLING, seed=0) for _, name in r.servers} == {"server 0"}
        assert two.canary_metrics()["canary/wrong"] == 1


def test_a_server_that_cannot_be_asked_ends_the_run_with_the_fix(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        use(two)
        behave(two, 1, cannot_score=True)
        with pytest.raises(SyncError, match=r"server 1 answered /score with 404.*set sync.canaries=0"):
            deliver(two, 0)


def test_without_canaries_nobody_is_asked(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        behave(two, 1, cannot_score=True)
        two.update_weights([Path("w")], 0)
        assert two.canary_metrics() == {} and not two.needs_weights


@pytest.mark.parametrize("fault", ["die", "refuse"])
def test_a_server_that_fails_when_it_is_asked_is_not_used_before_it_has_answered(tmp_path: Path, fault: str) -> None:
    with fleet(tmp_path, servers=2) as two:
        use(two)
        deliver(two, 0)
        behave(two, 1, at="/score", **{fault: True})
        deliver(two, 1)
        rollouts = two.generate(PROMPTS, SAMPLING, seed=0)
        assert {name for r in rollouts for _, name in r.servers} == {"server 0"}
        until(lambda: two.needs_weights)
        two.update_weights([Path("w")], 1)
        assert not two.needs_weights and two.restarts == (fault == "die")
        assert two.canary_metrics()["canary/wrong"] == 0


def test_a_server_that_fails_when_it_is_asked_after_its_sleep_needs_weights(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        use(two)
        deliver(two, 0)
        two.sleep()
        two.wake("weights")
        deliver(two, 1)
        behave(two, 1, at="/score", refuse=True)
        two.wake("kv_cache")
        assert two.needs_weights
        assert {name for r in two.generate(PROMPTS, SAMPLING, seed=0) for _, name in r.servers} == {"server 0"}
        two.update_weights([Path("w")], 1)
        assert not two.needs_weights and two.restarts == 0
