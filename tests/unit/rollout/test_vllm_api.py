"""The requests to vLLM, and that no answer other than the requested one is accepted. No server."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.memory_kills import usable_cores
from tepo_megatron.base.processes import LAUNCHER, RANK_THREADS
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine import GenerationRequest
from tepo_megatron.engines.engine_api import LaunchSpec, StaleWeights, served_label
from tepo_megatron.engines.samples import LARGEST_SEED, prompt_seed
from tepo_megatron.engines.vllm import VllmApi, completion_request

PROMPT = Prompt(id=7, token_ids=(4, 5, 6), answer="9")
SAMPLING = SamplingParams(samples=2, temperature=0.7, max_tokens=3, stop_token_ids=(2,))
ASK = GenerationRequest(PROMPT, SAMPLING, seed=0)
CPU = LaunchSpec(Path("m"), max_model_len=64, platform="cpu", precision="fp32", seed=0)
CUDA = LaunchSpec(Path("m"), max_model_len=64, platform="cuda", precision="bf16", seed=0)


def answer() -> dict[str, Any]:
    """A good one, with its choices out of order."""
    first = {
        "index": 0,
        "token_ids": [8, 2],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "prompt_token_ids": [4, 5, 6],
        "finish_reason": "stop",
    }
    second = {
        "index": 1,
        "token_ids": [8, 9, 10],
        "logprobs": {"token_logprobs": [-0.5, -1.0, 0.0]},
        "prompt_token_ids": [4, 5, 6],
        "finish_reason": "length",
    }
    return {"choices": [second, first]}


def as_json(value: Any) -> HttpAnswer:
    return HttpAnswer(200, "application/json", json.dumps(value).encode())


def parse(value: Any, version: int) -> list[Rollout]:
    return VllmApi().decode(as_json(value), ASK, version)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("index", 1, r"samples \[1, 1\] instead of 2"),
        ("token_ids", [], "0 response tokens"),
        ("token_ids", [8, 9, 10, 11], "4 response tokens, max_tokens=3"),
        ("token_ids", None, "got `null`.*token_ids"),
        ("token_ids", [8, -1], "token id -1"),
        ("token_ids", [8, 2**70], "too large"),
        ("logprobs", {"token_logprobs": [-0.5]}, "2 tokens but 1 log-probs"),
        ("logprobs", {"token_logprobs": [-0.5, float("nan")]}, "JSON is malformed"),
        ("logprobs", {"token_logprobs": [-0.5, None]}, "got `null`"),
        ("logprobs", {"token_logprobs": [-0.5, -1e300]}, "not finite"),
        ("logprobs", {"token_logprobs": [-0.5, 0.1]}, "positive"),
        ("logprobs", None, "lacks log-probs"),
        ("prompt_token_ids", [4, 5], "prompt's tokens"),
        ("finish_reason", "error", "finish_reason='error'"),
        ("token_ids", [8, 9], "stopped at token 9, which is none of the stop tokens"),
    ],
)
def test_anything_else_is_refused(place: str, value: Any, complaint: str) -> None:
    bad = answer()
    bad["choices"][1][place] = value
    with pytest.raises(RolloutError, match=f"prompt 7: .*({complaint})"):
        parse(bad, version=0)


def test_an_answer_counts_only_if_vllm_served_the_version_that_was_asked_for() -> None:
    """Answers in JSON do not hold the version, so vLLM is asked afterwards: an update in between would have changed it."""

    async def ask(served: int) -> list[Rollout]:
        async def send(method: str, route: str, body: Any) -> Any:
            assert route == "/weight_info"
            return {"weight_version": served_label(served)}

        async def exchange(method: str, route: str, body: Any, accept: str) -> HttpAnswer:
            return as_json(answer())

        return VllmApi().decode(await VllmApi().generate(send, exchange, ASK, version=3), ASK, version=3)

    assert [rollout.policy_version for rollout in asyncio.run(ask(3))] == [3, 3]
    with pytest.raises(StaleWeights, match="when it should have served those of version 3"):
        asyncio.run(ask(2))


def test_nothing_but_the_temperature_shapes_the_distribution() -> None:
    request = completion_request(PROMPT, SAMPLING, seed=0)
    assert request["prompt"] == [4, 5, 6]
    assert (request["n"], request["max_tokens"], request["temperature"]) == (2, 3, 0.7)
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: request[name] for name in neutral} == neutral
    assert request["stop_token_ids"] == [2]
    assert request["presence_penalty"] == request["frequency_penalty"] == 0.0


def test_seeds_are_stable_and_no_two_samples_of_a_step_share_one() -> None:
    assert prompt_seed(0, 0, 8) == 744301007558025600
    assert prompt_seed(0, 0, 8) != prompt_seed(1, 0, 8)
    for samples in (1, 6, 8):
        seeds = [prompt_seed(5, i, samples) + k for i in range(512) for k in range(samples)]
        assert len(set(seeds)) == len(seeds)
        assert min(seeds) >= 0 and max(seeds) <= LARGEST_SEED
        # what torch's CPU generator makes of them
        assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_the_key_and_torchrun_stay_where_they_belong() -> None:
    inherited = {"PATH": "/bin", "RANK": "0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    env = VllmApi().environment(ServerConfig(), CPU, inherited, "sekrit")
    assert env["VLLM_API_KEY"] == "sekrit" and env["PATH"] == "/bin"
    assert not env.keys() & {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert "OMP_NUM_THREADS" not in VllmApi().environment(ServerConfig(), CUDA, inherited, "sekrit")


def test_threads_on_a_cpu_are_the_users_or_fit_the_model(tmp_path: Path) -> None:
    """The launcher's number is for ranks. A small model has one thread, others share the cores, and the user decides."""

    def threads(**inherited: str) -> str:
        launch = replace(CPU, model_path=tmp_path, servers=1)
        return VllmApi().environment(ServerConfig(), launch, {LAUNCHER: "1"} | inherited, "key")["OMP_NUM_THREADS"]

    ours = {"OMP_NUM_THREADS": "7", RANK_THREADS: "1"}
    assert threads(**ours) == "1" and threads(OMP_NUM_THREADS="7") == "7"
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**27)
    assert threads(**ours) == str(usable_cores()) and threads(OMP_NUM_THREADS="7") == "7"


def test_it_gives_nothing_up_before_its_run_does() -> None:
    env = VllmApi().environment(ServerConfig(ready_seconds=3600.5, request_seconds=900.0), CUDA, {}, "key")
    limits = env["VLLM_ENGINE_READY_TIMEOUT_S"], env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]
    assert limits == ("3601", "900")
