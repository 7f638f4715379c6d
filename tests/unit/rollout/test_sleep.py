"""A fleet of real processes that sleep and wake, and die, refuse and come back meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import RolloutError
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.servers.fleet import Fleet
from tepo_megatron.inference.servers.local import LocalServer
from tepo_megatron.inference.sglang import SglangApi
from tepo_megatron.inference.vllm import VllmApi
from tests.direct_requests import ask
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, behave, expected, fleet, ids, process, until  # noqa: F401

pytestmark = pytest.mark.slow


def released(fleet: Fleet, server: int) -> list[str]:
    """Return the parts that the server itself reports as released."""
    released: list[str] = ask(fleet, server, "GET", "/health")["asleep"]
    return released


def wake(fleet: Fleet, version: int) -> None:
    fleet.wake("weights")
    fleet.update_weights([], version)
    fleet.wake("kv_cache")


def test_all_sleep_and_wake_in_turn_and_serve_the_weights_that_they_are_given(
    expected: list[list[int]],  # noqa: F811
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        for version in (1, 2):  # the same version again, too: what it was of is gone
            two.sleep()
            assert [released(two, i) for i in range(2)] == [["weights", "kv_cache"]] * 2
            two.wake("weights")
            assert [released(two, i) for i in range(2)] == [["kv_cache"]] * 2
            two.update_weights([], version)
            two.wake("kv_cache")
            rollouts = two.generate(PROMPTS, SAMPLING, seed=7)
            assert ids(rollouts) == expected and {r.policy_version for r in rollouts} == {version}
        assert two.take_events() == [] and not two.needs_weights


@pytest.mark.full
def test_requests_in_flight_are_aborted_for_a_sleep_that_does_not_wait(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        for i in range(2):
            behave(two, i, slow=60.0)
        two.open().add(PROMPTS[:8], SAMPLING, seed=7)
        until(lambda: sum(slot.endpoint.in_flight for slot in two.slots) == 8)
        started = time.monotonic()
        two.sleep(abort=True)
        assert time.monotonic() - started < 30
        assert [released(two, i) for i in range(2)] == [["weights", "kv_cache"]] * 2
    assert two.restarts == 0


def test_what_is_out_of_turn_is_refused_and_nothing_is_sent(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=1) as one:
        one.update_weights([], version=1)
        for part in ("weights", "kv_cache"):
            with pytest.raises(RolloutError, match=f"the engine is awake and its {part} cannot be woken: it is awake already"):
                one.wake(part)
        one.sleep()
        with pytest.raises(RolloutError, match="cannot go to sleep from being asleep; wake all of it first"):
            one.sleep()
        with pytest.raises(RolloutError, match="is asleep and its kv_cache cannot be woken: wake its weights first"):
            one.wake("kv_cache")
        with pytest.raises(RolloutError, match="the engine is asleep and cannot take weights; wake its weights first"):
            one.begin_update(2)
        one.wake("weights")
        with pytest.raises(RolloutError, match="cannot go to sleep from being awake but for its KV cache"):
            one.sleep()
        for use in (lambda: one.generate(PROMPTS, SAMPLING, 0), one.open):
            with pytest.raises(RolloutError, match="awake but for its KV cache, and sampling needs it to be awake"):
                use()
        one.update_weights([], 2)
        one.wake("kv_cache")
        assert {r.policy_version for r in one.generate(PROMPTS, SAMPLING, 0)} == {2} and one.take_events() == []


@pytest.mark.full
def test_sleep_waits_for_what_is_being_sampled(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        for i in range(2):
            behave(two, i, slow=0.5)
        first = PROMPTS[:4]  # no more than are sampled at once
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(len(two.generate(first, SAMPLING, seed=7))))
        asking.start()
        until(lambda: any(slot.endpoint.in_flight for slot in two.slots))
        two.sleep()
        asking.join()
        assert answers == [12] and two.take_events() == []


def test_a_server_that_dies_asleep_is_started_when_the_others_are_awake(
    expected: list[list[int]],  # noqa: F811
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        two.sleep()
        process(two, 0).kill()
        until(lambda: not two.slots[0].up)
        two.wake("weights")
        time.sleep(0.3)  # several times what it would wait before a start
        assert not two.slots[0].endpoint.server.running
        two.update_weights([], 2)
        two.wake("kv_cache")
        rollouts = two.generate(PROMPTS, SAMPLING, seed=7)
        assert ids(rollouts) == expected and {r.policy_version for r in rollouts} == {2}
        until(lambda: two.needs_weights)  # it came back
        two.update_weights([], 2)
        two.sleep()
        assert released(two, 0) == ["weights", "kv_cache"]
        wake(two, 3)
        assert ids(two.generate(PROMPTS, SAMPLING, seed=7)) == expected


@pytest.mark.full
@pytest.mark.parametrize(("at", "how"), [("/sleep", "refuse"), ("/wake/weights", "die"), ("/wake/kv_cache", "refuse")])
def test_a_server_that_fails_at_it_is_ended_and_comes_back(
    at: str,
    how: str,
    expected: list[list[int]],  # noqa: F811
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        first = process(two, 0)
        behave(two, 0, **{how: True, "at": at})
        two.sleep()
        if at == "/sleep":
            assert not first.is_running() and not two.slots[0].endpoint.server.running, "it may hold memory still"
        wake(two, 2)
        assert ids(two.generate(PROMPTS, SAMPLING, seed=7)) == expected
        until(lambda: two.needs_weights)
        assert process(two, 0).pid != first.pid
        two.update_weights([], 2)
        assert any("server 0" in event and "restart 1" in event for event in two.take_events())


@pytest.mark.full
def test_a_server_that_is_being_started_is_waited_for_and_then_put_to_sleep(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fleet(tmp_path, servers=2) as two:
        two.update_weights([], version=1)
        monkeypatch.setenv("TEPO_SCRIPTED_START_SECONDS", "3")  # for servers that start from here on
        first, behind = process(two, 0), two.endpoints[0].server
        assert isinstance(behind, LocalServer)
        before = behind.process
        first.kill()
        until(lambda: behind.process is not before)
        coming = two.slots[0]
        assert coming.endpoint.server.running and not coming.up  # launched again
        two.sleep()
        assert two.slots[0].up and [released(two, i) for i in range(2)] == [["weights", "kv_cache"]] * 2
        wake(two, 2)
        assert not two.needs_weights  # the update was of both


def test_too_few_that_sleep_end_the_run(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=1, restarts=0) as one:
        behave(one, 0, refuse=True, at="/sleep")
        with pytest.raises(RolloutError, match="answered /sleep with 500: cannot do that"):
            one.sleep()


def test_the_servers_memory_is_counted(tmp_path: Path) -> None:
    with fleet(tmp_path, servers=2) as two:
        both = sum(process(two, i).memory_info().rss for i in range(2))
        assert two.resident_bytes() == pytest.approx(both, rel=0.1) and both > 2**24
    assert two.resident_bytes() == 0


class Script:
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []

    async def __call__(self, method: str, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        return self.answers.pop(0)


@pytest.mark.parametrize(("platform", "flags"), [("cuda", True), ("cpu", False)])
@pytest.mark.parametrize("sleeps", [True, False])
def test_engines_are_started_for_it_on_gpus(platform: Any, flags: bool, sleeps: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}')
    launch = LaunchSpec(tmp_path, max_model_len=64, platform=platform, precision="bf16", seed=0, sleeps=sleeps)
    cfg = ServerConfig(python="python3")
    released = VllmApi().command(cfg, launch, 1)[-2:] == ["--enable-sleep-mode", "--sleep-mode-offload-cudagraph"]
    assert released is (flags and sleeps)
    assert ("--enable-memory-saver" in SglangApi().command(cfg, launch, 1)) is (flags and sleeps)


PARSER = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

args, others = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(sys.argv[1:])
print(args.enable_sleep_mode, args.sleep_mode_offload_cudagraph, args.enable_nccl_comm_suspend, others)
"""


@pytest.mark.full
def test_the_vllm_that_is_installed_knows_the_options_of_sleep(tmp_path: Path) -> None:
    launch = LaunchSpec(tmp_path, max_model_len=64, platform="cuda", precision="bf16", seed=0, sleeps=True)
    words = VllmApi().command(ServerConfig(), launch, 1)
    engine = words[words.index("--model") : words.index("--served-model-name")] + words[-2:]
    read = subprocess.run(
        [sys.executable, "-P", "-c", PARSER, *engine], capture_output=True, text=True, timeout=120, check=True
    )
    assert read.stdout.splitlines()[-1] == "True True False []"


async def _vllm() -> None:
    send = Script({"status": "sleeping", "level": 2}, {"status": "sleeping", "tags": ["weights"]}, {"status": "sleeping"})
    api = VllmApi()
    await api.sleep(send)
    await api.wake(send, "weights")
    with pytest.raises(RolloutError, match="when it should have said that it is awake"):
        await api.wake(send, "kv_cache")
    assert [path for path, _ in send.asked] == ["/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


def test_vllm_that_is_not_awake_afterwards_is_found_out() -> None:
    asyncio.run(_vllm())
