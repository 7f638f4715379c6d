"""A fleet of real processes behind real HTTP, which die, freeze, refuse and forget on request."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tepo_megatron.base.errors import RolloutError, SyncError
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.servers import fleet as engine_fleet
from tepo_megatron.engines.servers import slot
from tepo_megatron.engines.servers.endpoint import Endpoint
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.servers.server import LocalServer
from tests.direct_requests import ask
from tests.scripted_api import ScriptedApi
from tests.waiting import until

pytestmark = pytest.mark.slow
SAMPLING = SamplingParams(samples=3, max_tokens=5)
PROMPTS = [Prompt(id=i, token_ids=(4, 5), answer="") for i in range(40)]


@contextmanager
def fleet(
    folder: Path,
    servers: int = 3,
    min_servers: int = 1,
    attempts: int = 3,
    on_weight_update: str = "finish",
    model: Path | None = None,
    takes_broadcasts: bool = False,
    **server: Any,
) -> Iterator[Fleet]:
    """Yield a fleet. It is patient where no server freezes, so that a busy machine does not look frozen."""
    (folder / "model").mkdir(exist_ok=True)
    settings = {"restarts": 3, "heartbeat_timeout": 20.0, "concurrency": 4, "ready_seconds": 60} | server
    cfg = RolloutConfig(
        servers=servers,
        min_servers=min_servers,
        max_staleness=int(on_weight_update != "finish"),
        on_weight_update=on_weight_update,
        server=ServerConfig(**settings),
    )
    launch = LaunchSpec(model or folder / "model", max_model_len=64, platform="cpu", precision="fp32", seed=0)
    endpoints = []
    for i in range(servers):
        api = ScriptedApi(takes_broadcasts=takes_broadcasts)
        server = LocalServer(f"server {i}", api, cfg.server, launch, folder / f"{i}.log")
        endpoints.append(Endpoint(server, api, cfg.server, launch.max_model_len))
    with pytest.MonkeyPatch.context() as patch, Fleet(endpoints, cfg) as made:
        patch.setattr(slot, "BACKOFF_SECONDS", 0.05)
        patch.setattr(engine_fleet, "ATTEMPTS", attempts)
        made.start()
        made.wait_ready()
        yield made


def behave(fleet: Fleet, server: int, **behaviour: Any) -> None:
    ask(fleet, server, "POST", "/behave", behaviour)


def process(fleet: Fleet, server: int) -> psutil.Process:
    behind = fleet.endpoints[server].server
    assert isinstance(behind, LocalServer)
    assert behind.process is not None and behind.process.guard_pid is not None
    return psutil.Process(behind.process.guard_pid).children()[0]


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.response_ids for r in rollouts]


def mid_sampling(fleet: Fleet, action: Callable[[], object]) -> threading.Thread:
    """Start a thread that acts as soon as every server has requests in flight, on a busy machine too."""

    def wait_and_act() -> None:
        until(lambda: all(endpoint.in_flight for endpoint in fleet.endpoints))
        action()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_the_answer_does_not_depend_on_the_number_of_servers(expected: list[list[int]], tmp_path: Path) -> None:
    with fleet(tmp_path) as three:
        began = time.monotonic()
        three.server_metrics()
        assert ids(three.generate(PROMPTS, SAMPLING, seed=7)) == expected
        assert three.take_events() == []
        load = three.server_metrics()
        least = sum(map(len, expected)) / (time.monotonic() - began)
        assert sum(load[f"server/{i}/tokens_per_second"] for i in range(3)) >= least > 0
        assert all(load[f"server/{i}/up"] == 1.0 and load[f"server/{i}/restarts"] == 0.0 for i in range(3))
        assert all(1 <= load[f"server/{i}/queue"] <= 4 for i in range(3)), "at most `concurrency` at once"
        idle = three.server_metrics()
        assert all(idle[f"server/{i}/queue"] == idle[f"server/{i}/tokens_per_second"] == 0.0 for i in range(3))


@pytest.mark.parametrize("kind", ["killed", "frozen", "errors", "stale"])
def test_a_server_that_fails_costs_no_sample(kind: str, expected: list[list[int]], tmp_path: Path) -> None:
    with fleet(tmp_path, heartbeat_timeout=2.0 if kind == "frozen" else 20.0) as three:
        three.update_weights([], version=4)
        for i in range(3):
            behave(three, i, slow=0.4)  # four times at least
        first = process(three, 1)
        faults = {
            "killed": first.kill,
            "frozen": lambda: first.send_signal(signal.SIGSTOP),
            "errors": lambda: behave(three, 1, errors=10, slow=0.4),
            "stale": lambda: behave(three, 1, version=3, slow=0.4),
        }
        fault = mid_sampling(three, faults[kind])
        rollouts = three.generate(PROMPTS, SAMPLING, seed=7)
        fault.join()
        assert ids(rollouts) == expected
        assert {r.policy_version for r in rollouts} == {4}
        events = "\n".join(three.take_events())
        assert "is sampled again" in events
        until(lambda: three.needs_weights)  # it came back without them
        assert "server 1 is started again (restart 1)" in events + "\n".join(three.take_events())
        three.update_weights([], version=4)
        assert not three.needs_weights
        assert process(three, 1).pid != first.pid
        assert ids(three.generate(PROMPTS, SAMPLING, seed=7)) == expected


def test_a_single_server_that_is_killed_comes_back_when_it_gets_its_weights(expected: list[list[int]], tmp_path: Path) -> None:
    with fleet(tmp_path, servers=1) as one:
        one.update_weights([], version=2)
        behave(one, 0, slow=0.05)
        killer = mid_sampling(one, process(one, 0).kill)
        helper = threading.Thread(target=lambda: (until(lambda: one.needs_weights), one.update_weights([], version=2)))
        helper.start()
        rollouts = one.generate(PROMPTS, SAMPLING, seed=7)
        killer.join()
        assert ids(rollouts) == expected
        assert {r.policy_version for r in rollouts} == {2}, "it was asked before it had the weights"
        helper.join()


def test_weights_that_nobody_sends_again_end_the_requests_with_the_state_of_all_servers(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2, weights_seconds=0.5) as two:
        two.update_weights([], version=3)
        before = [slot.incarnation for slot in two.slots]
        for i in range(2):
            process(two, i).kill()
        until(lambda: all(slot.up and slot.incarnation is not old for slot, old in zip(two.slots, before, strict=True)))
        waited = r"40 requests have waited 0\.5 s for the weights of version 3, and its update began \d+ s ago: "
        with pytest.raises(RolloutError, match=waited) as caught:
            generate_within(60, two)
        assert "server 0 serves its first weights; server 1 serves its first weights. Nobody sends them" in str(caught.value)
        two.update_weights([], version=3)
        assert {r.policy_version for r in two.generate(PROMPTS, SAMPLING, seed=7)} == {3}


def test_too_few_servers_end_the_run_with_one_error(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=3, min_servers=2, restarts=0) as three:
        behave(three, 2, slow=0.3)
        for i in range(2):
            process(three, i).kill()
        with pytest.raises(
            RolloutError, match=r"1 of 3 inference servers are left, fewer than rollout\.min_servers=2"
        ) as caught:
            three.generate(PROMPTS, SAMPLING, seed=0)
        assert "server 0 " in str(caught.value) and "server 1 " in str(caught.value) and "SIGKILL" in str(caught.value)


def test_a_request_that_a_server_refuses_is_not_repeated(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        with pytest.raises(RolloutError, match=r"server \d answered /generate with 400: max_tokens is too large"):
            two.generate(PROMPTS, SamplingParams(samples=1, max_tokens=101), seed=0)
        assert two.take_events() == []
        assert len(two.generate(PROMPTS[:2], SAMPLING, seed=0)) == 6


def test_refused_weights_end_the_fleet_and_lost_servers_do_not(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        behave(two, 0, die=True)
        two.update_weights([], version=1)
        assert {r.policy_version for r in two.generate(PROMPTS, SAMPLING, seed=0)} == {1}
        until(lambda: two.needs_weights)
        behave(two, 1, refuse=True)
        with pytest.raises(SyncError, match="weights of version 2: server 1 answered /update with 500: cannot load these"):
            two.update_weights([], version=2)
        for use in (lambda: two.generate(PROMPTS, SAMPLING, 0), lambda: two.update_weights([], 3)):
            with pytest.raises(SyncError, match="can no longer be used"):
                use()


def generate_within(seconds: float, fleet: Fleet) -> list[Rollout]:
    """Return the rollouts of all prompts. A fleet that takes longer is closed, and TimeoutError raised."""
    with ThreadPoolExecutor(1) as thread:
        sampled = thread.submit(fleet.generate, PROMPTS, SAMPLING, 7)
        try:
            return sampled.result(seconds)
        except TimeoutError:
            fleet.close()
            raise


def test_weights_that_come_in_mid_generation_wait_for_what_is_being_sampled(expected: list[list[int]], tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        for i in range(2):
            behave(two, i, slow=0.4)  # five times at least
        updates = mid_sampling(two, lambda: two.update_weights([], version=2))
        rollouts = generate_within(60, two)  # without end if samples of mixed weights are asked for again and again
        updates.join()
        assert ids(rollouts) == expected
        versions = [r.policy_version for r in rollouts]
        assert set(versions) == {1, 2} and two.take_events() == []
        assert {r.servers for r in rollouts} == {((0, endpoint.name),) for endpoint in two.endpoints}
        assert all(len(set(versions[i : i + 3])) == 1 for i in range(0, len(versions), 3)), "a group of two versions"


def test_groups_stream_in_as_they_are_done_and_to_close_the_stream_ends_the_rest(
    expected: list[list[int]], tmp_path: Path
) -> None:
    with fleet(tmp_path, servers=2) as two:
        groups = two.open()
        assert groups.next() is None
        groups.add(PROMPTS[:30], SAMPLING, seed=7)
        groups.add(PROMPTS[30:], SAMPLING, seed=7)
        there = {group[0].prompt_id: group for group in iter(groups.next, None)}
        assert ids([r for prompt in PROMPTS for r in there[prompt.id]]) == expected
        behave(two, 0, slow=20.0)
        started = time.monotonic()
        groups.add(PROMPTS[:8], SAMPLING, seed=7)
        first = [groups.next() or [] for _ in range(4)]  # those of the other server
        groups.close()
        assert time.monotonic() - started < 15.0
        assert all(ids(group) == expected[3 * group[0].prompt_id :][:3] for group in first)
        until(lambda: not any(slot.endpoint.in_flight for slot in two.slots), seconds=4.0)
        with pytest.raises(RolloutError, match="max_tokens is too large"):
            groups.add(PROMPTS, SamplingParams(samples=1, max_tokens=101), seed=0)
            groups.next()


@pytest.mark.parametrize(
    "on_weight_update", ["continue", *(pytest.param(x, marks=pytest.mark.full) for x in ("finish", "restart"))]
)
def test_what_is_under_way_when_new_weights_come(on_weight_update: str, expected: list[list[int]], tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2, on_weight_update=on_weight_update) as two:
        two.update_weights([], version=0)
        for i in range(2):
            behave(two, i, slow=3.0 if on_weight_update == "finish" else 15.0)  # of all five tokens
        groups = two.open()
        groups.add(PROMPTS[:8], SAMPLING, seed=7)
        until(lambda: sum(slot.endpoint.in_flight for slot in two.slots) == 8)
        time.sleep(1.0 if on_weight_update == "finish" else 4.0)
        for i in range(2):
            behave(two, i)  # the requests after these are fast
        started = time.monotonic()
        two.update_weights([], version=1)
        waited = time.monotonic() - started
        made = sorted((r for group in iter(groups.next, None) for r in group), key=lambda r: r.prompt_id)
        assert len(made) == 24 and {r.response_length for r in made} == {5} and {r.stop_reason for r in made} == {"length"}
        versions = {tuple(r.versions_L[r.response_mask_L].tolist()) for r in made}
        if on_weight_update == "finish":
            assert waited > 0.5 and versions == {(0,) * 5} and ids(made) == expected[:24]
        elif on_weight_update == "restart":
            assert waited < 8 and versions == {(1,) * 5} and ids(made) == expected[:24]
        else:
            assert waited < 8 and versions <= {(0,) * n + (1,) * (5 - n) for n in range(1, 5)}
            for r, whole in zip(made, expected, strict=False):  # tokens that were sampled stay, and the rest is sampled again
                begun = r.later_versions[0][0] - 2
                assert all(place in (0, r.later_versions[0][0]) for place, _ in r.servers) and r.servers[0][0] == 0
                assert r.response_ids[:begun] == whole[:begun] and r.response_ids != whole
            assert len({tuple(r.response_ids) for r in made}) == 24
        assert two.take_events() == []
        assert {r.policy_version for r in two.generate(PROMPTS[:4], SAMPLING, seed=7)} == {1}
