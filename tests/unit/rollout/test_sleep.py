"""A fleet of real processes that sleep and wake, and die, refuse and come back meanwhile."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.servers.fleet import Fleet
from tepo_megatron.engines.vllm import VllmApi
from tests.direct_requests import ask
from tests.unit.rollout.test_fleet import PROMPTS, SAMPLING, fleet, ids, process
from tests.waiting import until

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
    expected: list[list[int]], tmp_path: Path
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


def test_a_server_that_dies_asleep_is_started_when_the_others_are_awake(expected: list[list[int]], tmp_path: Path) -> None:
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
