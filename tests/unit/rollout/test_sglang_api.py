"""The requests to SGLang, and that no answer other than the requested one is accepted. No server."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine import INITIAL_VERSION, GenerationRequest
from tepo_megatron.engines.engine_api import LaunchSpec, StaleWeights
from tepo_megatron.engines.samples import prompt_seed
from tepo_megatron.engines.sglang import SglangApi, generate_request
from tepo_megatron.wire.receiver.sglang_server import hide

PROMPT = Prompt(id=7, token_ids=(4, 5, 6), answer="9")
SAMPLING = SamplingParams(samples=2, temperature=0.7, max_tokens=3, stop_token_ids=(2,))


def sample(ids: list[int], logprobs: list[float], reason: str) -> dict[str, Any]:
    given = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    meta = {"output_token_logprobs": given, "finish_reason": {"type": reason}, "prompt_tokens": 3, "weight_version": "3"}
    return {"output_ids": ids, "meta_info": meta}


def answer() -> list[dict[str, Any]]:
    return [sample([8, 2], [-0.5, -0.25], "stop"), sample([8, 9, 10], [-0.5, -1.0, 0.0], "length")]


def parse(value: Any, version: int) -> list[Rollout]:
    body = HttpAnswer(200, "application/json", json.dumps(value).encode())
    return SglangApi().decode(body, GenerationRequest(PROMPT, SAMPLING, seed=0), version)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (sample([], [], "stop"), "0 response tokens"),
        (sample([8, 9, 10, 11], [-1.0] * 4, "length"), "4 response tokens, max_tokens=3"),
        (sample([8, 2], [-0.5, float("nan")], "stop"), "JSON is malformed"),
        (sample([8, 2], [-0.5, -1e300], "stop"), "not finite"),
        (sample([8, 2], [-0.5, 0.1], "stop"), "positive"),
        (sample([8, 9], [-0.5, -0.1], "stop"), "stopped at token 9, which is none of the stop tokens"),
        (sample([8, 2], [-0.5, -0.1], "error"), "finish_reason='error'"),
        (sample([8, 2], [-0.5, -0.1], "stop") | {"output_ids": [8, 9]}, "of other tokens"),
        ({"output_ids": [8, 2], "meta_info": {}}, "missing required field `finish_reason`"),
    ],
)
def test_anything_else_is_refused(bad: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RolloutError, match=f"prompt 7: .*{complaint}.*SGLang"):
        parse([answer()[0], bad], version=0)


def test_samples_of_other_weights_are_refused() -> None:
    for version in (INITIAL_VERSION, 2, 4):
        with pytest.raises(StaleWeights, match=f"of version {version}"):
            parse(answer(), version)


def test_nothing_but_the_temperature_shapes_the_distribution() -> None:
    request = generate_request(PROMPT, SAMPLING, seed=0)
    assert request["input_ids"] == [[4, 5, 6]] * 2 and request["return_logprob"]
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "temperature": 0.7, "max_new_tokens": 3}
    first = prompt_seed(0, 7, 2)
    expected = [neutral | {"stop_token_ids": [2], "sampling_seed": first + k} for k in range(2)]
    assert request["sampling_params"] == expected


def launch(folder: Path, precision: Any = "fp32") -> LaunchSpec:
    config = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return LaunchSpec(folder, max_model_len=64, platform="cpu", precision=precision, seed=0)


CUDA = LaunchSpec(Path("model"), max_model_len=64, platform="cuda", precision="bf16", seed=0)


def command(cfg: ServerConfig, launch: LaunchSpec) -> list[str]:
    return SglangApi().command(cfg, launch, port=1)


def test_the_key_and_torchrun_stay_where_they_belong(tmp_path: Path) -> None:
    inherited = {"PATH": "/bin", "RANK": "0", "MASTER_PORT": "29500"}
    env = SglangApi().environment(ServerConfig(), launch(tmp_path), inherited, "sekrit")
    assert "sekrit" in env.values() and env["PATH"] == "/bin" and "RANK" not in env and env["MASTER_PORT"] != "29500"


def test_it_gives_nothing_up_before_its_run_does(tmp_path: Path) -> None:
    cfg = ServerConfig(ready_seconds=3600.5, heartbeat_timeout=90.5, python=sys.executable)
    env, words = SglangApi().environment(cfg, launch(tmp_path), {}, "key"), command(cfg, CUDA)
    assert (env["SGLANG_WARMUP_TIMEOUT"], env["SGLANG_HEALTH_CHECK_TIMEOUT"]) == ("3600.5", "91")
    assert float(words[words.index("--watchdog-timeout") + 1]) > 365 * 86400


def test_the_key_is_hidden_from_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        hide("sekrit")
        logging.getLogger("sglang").warning("server_args=%s", {"api_key": "sekrit"})
        logging.getLogger("sglang").warning("100%% fine %s", "text")
    finally:
        logging.setLogRecordFactory(before)
    assert [r.getMessage() for r in caplog.records] == ["server_args={'api_key': '***'}", "100% fine text"]
