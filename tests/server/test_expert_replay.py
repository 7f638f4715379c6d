"""The experts that a real SGLang server on the CPU chose are those that Megatron's routers choose from the same weights.

vLLM returns none on a CPU (`tests/unit/rollout/test_expert_replay.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.inference.engine_api import LaunchSpec
from tepo_megatron.inference.engines import build_engine
from tepo_megatron.types import NO_EXPERT, Rollout, Routing, TrainBatch
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_expert_replay import own_choices
from tests.server.served import SAMPLING, make_prompts
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.worlds import run_world

pytestmark = [pytest.mark.server, pytest.mark.full]
ROUTING = Routing(num_layers=3, sparse_layers=(0, 1, 2), per_token=2, number=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("experts") / "model"
    config = Qwen3MoeConfig(  # without dense layers: SGLang 0.5.23 takes every layer of this family for one with experts
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=6, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    tiny_model(out, config, seed=1, scale=2.0)
    return out


def megatrons(rank: int, cfg: Any, batch: TrainBatch) -> tuple[list[Tensor], Tensor]:
    """Return the choices of Megatron's routers, and the log-probs with the engine's choices."""
    actor = open_actor(cfg)
    return own_choices(actor, batch), actor.attach_old_stats(batch).old_logprobs_N


def test_the_engines_experts_are_those_of_the_same_weights(model: Path, tmp_path: Path) -> None:
    server = ServerConfig(kv_cache_gib=0.25, restarts=0)
    rollout = RolloutConfig(engine="sglang", replay_experts=True, server=server)
    launch = LaunchSpec(model, max_model_len=128, platform="cpu", precision="fp32", seed=0, returns_experts=True)
    sampling = replace(SAMPLING, temperature=cases.TEMPERATURE, routing=ROUTING)
    with build_engine(rollout, launch, tmp_path / "server.log") as engine:
        engine.start()
        engine.wait_ready()
        rollouts = engine.generate(make_prompts(12, seed=1), sampling, seed=3)
        again = engine.generate(make_prompts(12, seed=1)[:2], sampling, seed=3)  # prompts that its cache holds
        (free,) = engine.generate(make_prompts(1, seed=2), replace(sampling, samples=1, routing=None), seed=3)
    assert free.experts_LKT is None
    assert all(torch.equal(a.experts_LKT, b.experts_LKT) for a, b in zip(again, rollouts, strict=False))

    cfg = cases.run_config(model, {})
    cfg = replace(cfg, rollout=replace(cfg.rollout, replay_experts=True))
    batch = TrainBatch.build(rollouts, torch.zeros(len(rollouts)))
    ((own, logprobs_N),) = run_world(1, megatrons, cfg, batch)
    assert (logprobs_N - batch.rollout_logprobs_N).abs().max() <= 1e-4
    assert agreement(rollouts, own) >= 0.99
    # experts shifted by a token, or of other layers, would agree by chance
    assert agreement(rollouts, [e.roll(1, dims=0) for e in own]) < 0.9 and agreement(rollouts, [e.flip(1) for e in own]) < 0.9


def agreement(rollouts: list[Rollout], own: list[Tensor]) -> float:
    """Share of tokens for which engine and Megatron chose the same experts in every layer, in whatever order."""
    same = []
    for rollout, mine_LKT in zip(rollouts, own, strict=True):
        assert rollout.experts_LKT is not None and bool((rollout.experts_LKT[-1] == NO_EXPERT).all())
        engines_LKT = rollout.experts_LKT[:-1].sort(dim=-1).values
        same.append((engines_LKT == mine_LKT[:-1].sort(dim=-1).values).all(dim=-1).all(dim=-1))
    return torch.cat(same).double().mean().item()
