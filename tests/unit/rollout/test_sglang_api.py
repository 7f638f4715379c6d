"""The requests to SGLang, and that no answer other than the requested one is accepted. No server."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import ServerConfig
from tepo_megatron.errors import ConfigError, RolloutError
from tepo_megatron.inference.engine import INITIAL_VERSION
from tepo_megatron.inference.engine_api import LaunchSpec, StaleWeights
from tepo_megatron.inference.partial import GenerationRequest
from tepo_megatron.inference.samples import prompt_seed
from tepo_megatron.inference.sglang import SglangApi, generate_request
from tepo_megatron.types import Prompt, Rollout, SamplingParams
from tepo_megatron.utils.exchange import HttpAnswer
from tepo_megatron.weight_sync.receiver.sglang_server import hide, murmur_hash32

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


def test_an_answer_becomes_rollouts_in_the_order_of_the_samples() -> None:
    first, second = parse(answer(), version=3)
    assert first.token_ids_L.tolist() == [4, 5, 6, 8, 2] and first.token_ids_L.dtype == torch.int64
    assert first.response_mask_L.tolist() == [False, False, False, True, True]
    assert first.rollout_logprobs_L.tolist() == [0, 0, 0, -0.5, -0.25]
    assert (first.stop_reason, second.stop_reason) == ("stop", "length")
    assert (first.prompt_id, first.answer, first.policy_version, first.status) == (7, "9", 3, "ungraded")
    assert second.response_ids == [8, 9, 10]


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


@pytest.mark.parametrize("bad", [{}, None, [], answer()[:1]])
def test_an_answer_without_its_samples_is_refused(bad: Any) -> None:
    with pytest.raises(RolloutError, match="prompt 7"):
        parse(bad, version=0)


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


def command(cfg: ServerConfig, launch: LaunchSpec) -> list[str]:
    return SglangApi().command(cfg, launch, port=1)


def test_the_cache_holds_what_fits_and_no_more_than_can_be_asked_for(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    token = 2 * 3 * 2 * 32 * 4  # keys and values, layers, heads, their width, bytes
    cfg = ServerConfig(python=str(python), kv_cache_gib=1000 * token / 2**30, extra_args=["--watchdog-timeout", "9"])
    asked = command(cfg, launch(tmp_path))
    assert asked[asked.index("--max-total-tokens") + 1] == "1000" and asked[-1] == "9" and asked[0] == str(python)
    half = command(cfg, launch(tmp_path, "bf16"))
    assert half[half.index("--max-total-tokens") + 1] == "2000"
    ample = command(ServerConfig(python=str(python)), launch(tmp_path))
    assert ample[ample.index("--max-total-tokens") + 1] == str(256 * 64)


def test_a_model_in_fp8_has_no_weights_yet(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    cfg, plain = ServerConfig(python=str(python)), launch(tmp_path)
    assert [word for word in command(cfg, replace(plain, in_fp8=True)) if word not in command(cfg, plain)] == [
        "--load-format",
        "dummy",
    ]


def test_the_key_and_torchrun_stay_where_they_belong(tmp_path: Path) -> None:
    inherited = {"PATH": "/bin", "RANK": "0", "MASTER_PORT": "29500"}
    env = SglangApi().environment(ServerConfig(), launch(tmp_path), inherited, "sekrit")
    assert "sekrit" in env.values() and env["PATH"] == "/bin" and "RANK" not in env and env["MASTER_PORT"] != "29500"


def test_its_processes_meet_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The file is in TMPDIR, which is private to a server; another start has another file. They listen on loopback."""
    made = [SglangApi().environment(ServerConfig(), launch(tmp_path), {"TMPDIR": str(tmp_path)}, "sekrit") for _ in range(2)]
    files = {env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] for env in made}
    assert len(files) == 2 and all(file.startswith(f"file://{tmp_path}/") for file in files)
    assert all(env["GLOO_SOCKET_IFNAME"] == "lo" and env["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] == "0" for env in made)


def test_a_missing_environment_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Python with SGLang at .*nowhere; run `make sglang`"):
        command(ServerConfig(python=str(tmp_path / "nowhere")), launch(tmp_path))


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole 4-byte blocks: Appleby's algorithm on Python's integers."""

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) % 2**32

    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 % 2**32
        h = (rotated(h ^ rotated(k, 15) * 0x1B873593 % 2**32, 13) * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_the_hash_of_seeded_sampling_is_murmur3() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # a published vector: the reference is right
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, 2**62, (20,), generator=generator)
    positions, columns = torch.arange(20) * 37, torch.tensor([0, 1, 63, 151935])
    hashed = murmur_hash32(seeds.to(torch.uint64), positions, columns).to(torch.int64)
    for n, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for m, column in enumerate(columns.tolist()):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert hashed[n, m] == murmur3(data)


def test_the_key_is_hidden_from_the_log(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        hide("sekrit")
        logging.getLogger("sglang").warning("server_args=%s", {"api_key": "sekrit"})
        logging.getLogger("sglang").warning("100%% fine %s", "text")
    finally:
        logging.setLogRecordFactory(before)
    assert [r.getMessage() for r in caplog.records] == ["server_args={'api_key': '***'}", "100% fine text"]
