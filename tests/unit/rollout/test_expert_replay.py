"""Experts that an engine chose, from its answer to packed microbatches, and where they are refused. No server."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from tepo_megatron.actor.pipeline import on_device
from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.base.exchange import HttpAnswer
from tepo_megatron.base.types import NO_EXPERT, Prompt, Rollout, Routing, SamplingParams
from tepo_megatron.config import Config, ServerConfig
from tepo_megatron.config.io import validate
from tepo_megatron.engines.engine import ABORTED, GenerationRequest, continuation, merge
from tepo_megatron.engines.engine_api import EngineApi, LaunchSpec
from tepo_megatron.engines.engines import replayed_routing
from tepo_megatron.engines.samples import checked_rollout
from tepo_megatron.engines.sglang import SglangApi, generate_request
from tepo_megatron.engines.vllm import VllmApi
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack
from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE, Sample, encode, ids_crc

PROMPT = Prompt(id=7, token_ids=(4, 5, 6), answer="9")
ROUTING = Routing(num_layers=3, sparse_layers=(0, 2), per_token=2, number=300)
SAMPLING = SamplingParams(samples=1, max_tokens=3, stop_token_ids=(2,), routing=ROUTING)
GIVEN = np.arange(4 * 3 * 2).reshape(4, 3, 2) + 270  # tokens that were an input, all layers; more than a byte holds


def vllms(experts: np.ndarray | None) -> Any:
    choice = {"index": 0, "token_ids": [8, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop"}
    file = io.BytesIO()
    if experts is not None:
        np.save(file, experts.astype(np.uint16))
    encoded = None if experts is None else base64.b64encode(file.getvalue()).decode()
    return {"choices": [choice | {"prompt_token_ids": [4, 5, 6], "routed_experts": encoded}]}


def sglangs(experts: np.ndarray | None) -> Any:
    given = [[-0.5, 8, None], [-0.25, 2, None]]
    meta: dict[str, Any] = {"output_token_logprobs": given, "finish_reason": {"type": "stop"}, "prompt_tokens": 3}
    if experts is not None:
        meta["routed_experts"] = base64.b64encode(experts.astype(np.int32).tobytes()).decode()
    return [{"output_ids": [8, 2], "meta_info": meta | {"weight_version": "3"}}]


def binary(experts: np.ndarray | None) -> bytes:
    ids, logprobs = np.array([8, 2], np.int32), np.array([-0.5, -0.25], np.float32)
    return encode([Sample("stop", "3", 3, ids_crc(PROMPT.token_ids), ids, logprobs, experts)])


def parse(api: EngineApi, answer: Any, sampling: SamplingParams) -> list[Rollout]:
    is_binary = isinstance(answer, bytes)
    body = answer if is_binary else json.dumps(answer).encode()
    given = HttpAnswer(200, CONTENT_TYPE if is_binary else "application/json", body)
    return api.decode(given, GenerationRequest(PROMPT, sampling, 0), 3)


ENGINES = pytest.mark.parametrize(
    ("api", "answer", "name"),
    [(VllmApi(), vllms, "vLLM"), (SglangApi(), sglangs, "SGLang"), (VllmApi(), binary, "vLLM")],
    ids=["vllm", "sglang", "binary"],
)


@ENGINES
def test_the_layers_with_experts_are_kept_and_the_last_token_has_none(api: EngineApi, answer: Any, name: str) -> None:
    (rollout,) = parse(api, answer(GIVEN % 300), SAMPLING)
    assert rollout.experts_LKT.dtype == torch.int16 and rollout.experts_LKT.shape == (5, 2, 2)
    assert rollout.experts_LKT[:4].tolist() == (GIVEN % 300)[:, [0, 2]].tolist()
    assert (rollout.experts_LKT[4] == NO_EXPERT).all()
    (unasked,) = parse(api, answer(GIVEN), replace(SAMPLING, routing=None))
    assert unasked.experts_LKT is None


@ENGINES
@pytest.mark.parametrize(
    ("experts", "complaint"),
    [
        (None, "start its server with --enable-return-routed-experts"),
        (GIVEN[:3], r"(of shape \[3, 3, 2\] instead of \[4, 3, 2\])"),
        (np.concatenate((GIVEN, GIVEN)), r"of shape \[8, 3, 2\] instead of \[4, 3, 2\]"),
        (GIVEN[:, :2], "shape|size"),
        (GIVEN + 10, "experts 280 to 303 of a model that has 300"),
        (np.zeros_like(GIVEN), "chosen twice"),
        (GIVEN % 300 + 2**15 * (GIVEN == 280), "of a model that has 300"),
    ],
    ids=["none", "a token less", "too many", "a layer less", "of no such expert", "twice", "that 16 bits cannot hold"],
)
def test_anything_else_is_refused(api: EngineApi, answer: Any, name: str, experts: Any, complaint: str) -> None:
    with pytest.raises(RolloutError, match=f"prompt 7: .*({complaint}).*{name}"):
        parse(api, answer(experts), SAMPLING)


def test_servers_are_started_and_asked_for_them_only_where_they_are_replayed(tmp_path: Path) -> None:
    flag, runner = "--enable-return-routed-experts", "VLLM_USE_V2_MODEL_RUNNER"
    cfg = ServerConfig(python=str(tmp_path / "python"))
    (tmp_path / "python").touch()
    for wanted in (False, True):
        launch = LaunchSpec(tmp_path, 64, platform="cuda", precision="bf16", seed=0, returns_experts=wanted)
        assert all((flag in api.command(cfg, launch, 1)) is wanted for api in (VllmApi(), SglangApi()))
        assert (runner in VllmApi().environment(cfg, launch, {}, "key")) is wanted
        sampling = SAMPLING if wanted else replace(SAMPLING, routing=None)
        assert generate_request(PROMPT, sampling, 0)["return_routed_experts"] is wanted


def test_a_response_that_new_weights_interrupt_has_the_experts_of_the_last_ones() -> None:
    """The last weights computed its whole context again, so they chose for every token."""
    sampling = replace(SAMPLING, max_tokens=4, stop_token_ids=())
    cut = checked_rollout(PROMPT, [8, 9], [-0.5, -0.5], ABORTED, sampling, 1, GIVEN % 300)
    assert cut.experts_LKT is None
    ask = continuation(cut, PROMPT, sampling, 0)
    given = np.arange(6 * 3 * 2).reshape(6, 3, 2)
    end = checked_rollout(ask.prompt, [10, 11], [-0.5, -0.5], "length", ask.sampling, 2, given)
    cut, end = (replace(r, servers=((0, name),)) for r, name in ((cut, "a"), (end, "b")))
    assert merge(cut, end).servers == ((0, "a"), (5, "b")) and merge(cut, replace(end, servers=cut.servers)).servers == (
        (0, "a"),
    )
    whole = merge(cut, end)
    assert whole.experts_LKT is not None and whole.experts_LKT[:-1].tolist() == given[:, [0, 2]].tolist()
    assert whole.experts_LKT.shape[0] == whole.token_ids_L.numel() == 7 and whole.later_versions == ((5, 2),)


def sampled(lengths: list[int], seed: int = 0, routing: Routing = ROUTING) -> list[Rollout]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i, n in enumerate(lengths):
        experts_LKT = torch.rand(n, 2, routing.number, generator=generator).argsort(-1)[..., :2]
        experts_LKT[-1] = NO_EXPERT
        experts_LKT = experts_LKT.to(routing.dtype)
        out.append(Rollout(i, torch.arange(n), torch.arange(n) > 0, -torch.ones(n), 0, "stop", experts_LKT=experts_LKT))
    return out


NARROW = replace(ROUTING, number=255)


@pytest.mark.parametrize("routing", [ROUTING, NARROW])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_experts_lie_where_their_tokens_lie(cp: int, routing: Routing) -> None:
    """The token ids name the experts: over the context-parallel ranks each has its own experts."""
    rollouts, order = sampled([9, 2, 17, 5], routing=routing), [2, 0, 3]
    ids = [r.token_ids_L + 100 * i + 1 for i, r in enumerate(rollouts)]  # padding is 0
    experts = [e for r in rollouts if (e := r.experts_LKT) is not None]
    found: dict[int, Tensor] = {}
    for rank in range(cp):
        m = pack(ids, [r.response_mask_L for r in rollouts], [0] * 4, order, Alignment(cp, 2), rank, experts)
        assert m.experts_SKT is not None and m.experts_SKT.shape == (m.tokens_S.numel(), 2, 2)
        assert m.experts_SKT.dtype == routing.dtype and int(m.experts_SKT.max()) < routing.number
        assert on_device(m, torch.device("cpu")).experts_SKT is not None
        for token, experts_KT in zip(m.tokens_S[0].tolist(), m.experts_SKT, strict=True):
            assert bool((experts_KT >= 0).all()) and bool((experts_KT[:, 0] != experts_KT[:, 1]).all())
            found[token] = experts_KT
    for i in order:
        for token, experts_KT in list(zip(ids[i].tolist(), experts[i], strict=True))[:-1]:
            assert torch.equal(found[token], experts_KT)


def written(folder: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder


def asking(model: Path, **changes: Any) -> Any:
    rollout = {"replay_experts": True, "engine": "sglang"} | changes.pop("rollout", {})
    base = {"name": "run", "platform": "cpu", "model": {"path": str(model)}, "data": {"train": "t"}}
    return validate(base | {"rollout": rollout} | changes)


def routing_of(cfg: Config) -> Routing | None:
    return replayed_routing(cfg.rollout, cfg.model.path, cfg.platform)


def test_what_cannot_replay_them_is_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1], "moe_intermediate_size": 32}
    moe = written(tmp_path / "moe", Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **small, **experts))
    dense = written(tmp_path / "dense", Qwen3Config(architectures=["Qwen3ForCausalLM"], **small))
    assert routing_of(asking(moe)) == Routing(3, (0, 2), 2, 6)
    assert routing_of(asking(moe, platform="cuda", rollout={"engine": "vllm"})) is not None
    assert routing_of(asking(moe, rollout={"engine": "vllm", "replay": "recorded"})) is not None
    assert routing_of(asking(dense, rollout={"replay_experts": False})) is None
    with pytest.raises(ConfigError, match=r"rollout\.replay_experts=true, and the model in .*dense has none; set it to false"):
        routing_of(asking(dense))
    with pytest.raises(ConfigError, match=r"vLLM 0\.32 .* needs Triton .*platform=cpu; use rollout\.engine=sglang"):
        routing_of(asking(moe, rollout={"engine": "vllm"}))
    with pytest.raises(ConfigError, match=r"rollout: replay_experts=true and function=f\.py:f: .*set replay_experts to false"):
        asking(moe, rollout={"function": "f.py:f"})
