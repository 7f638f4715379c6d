"""What really leaves a GPU: the actor's parts, and a server's weights and KV cache; and that both come back."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.platform import memory
from tepo_megatron.rollout.engine import Launch
from tepo_megatron.rollout.engines import build_engine
from tests.tiny import tiny_qwen3

DEVICE = torch.device("cuda", 0)
MIB = 2**20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_actor_leaves_the_gpu_and_comes_back_bit_for_bit(alone: Any, tmp_path: Path, precision: str) -> None:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.checkpoint.optimizer import shards
    from tepo_megatron.config_io import plain, validate
    from tepo_megatron.losses import build_objective
    from tests.parallel import cases

    case = cases.make_case(tmp_path, tied=True)
    tree = plain(cases.run_config(case.model, {})) | {"platform": "cuda"}
    tree["model"]["precision"] = precision
    cfg = validate(tree)
    before = torch.cuda.memory_allocated(DEVICE)
    actor, objective = Actor(cfg, alone), build_objective(cfg.objective)
    actor.start_step(1)
    actor.update(case.batches[0], objective)

    def state() -> list[torch.Tensor]:
        return [t.clone().cpu() for shard in shards(actor.optimizer) for t in (shard.weight, *shard.state.values())]

    kept, full = state(), torch.cuda.memory_allocated(DEVICE) - before
    actor.offload("gradients", "optimizer")
    parameters = torch.cuda.memory_allocated(DEVICE) - before
    actor.offload("parameters")
    left = torch.cuda.memory_allocated(DEVICE) - before
    size = sum(b.parameter.nbytes for b in actor.bindings)
    assert size <= parameters < 0.5 * full and left <= parameters - size
    actor.load()
    assert all(torch.equal(a, b) for a, b in zip(state(), kept, strict=True))
    assert actor.update(case.batches[1], objective).metrics["actor/grad_norm"][0] > 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_leaves_the_gpu_and_serves_what_it_is_given_when_it_is_back(tmp_path: Path) -> None:
    from tests.server.served import SAMPLING, logprob_diff, make_prompts, save_weights

    tiny_qwen3(tmp_path / "model", tied=True, seed=0)
    other = tiny_qwen3(tmp_path / "other", tied=True, seed=1)
    files, prompts = save_weights(other, tmp_path, files=2), make_prompts(16, seed=0)
    cfg = RolloutConfig(engine="vllm", colocate=True, server=ServerConfig(extra_args=["--gpu-memory-utilization", "0.5"]))
    launch = Launch(tmp_path / "model", max_model_len=128, platform="cuda", precision="fp32", seed=0, sleeps=True)
    with build_engine(cfg, launch, tmp_path / "server.log") as engine:
        engine.start()
        engine.wait_ready()
        held = []
        for version in (1, 2):
            held.append(_in_use())
            engine.sleep()
            held.append(_in_use())
            engine.wake("weights")
            engine.update_weights(files, version)
            held.append(_in_use())
            engine.wake("kv_cache")
            rollouts = engine.generate(prompts, SAMPLING, seed=version)
            assert logprob_diff(other, rollouts, SAMPLING.temperature) < 1e-3
            assert {r.policy_version for r in rollouts} == {version}
        total = torch.cuda.mem_get_info(DEVICE)[1]
        for awake, asleep, with_weights in (held[:3], held[3:]):
            assert asleep <= with_weights < awake and awake - asleep > 0.3 * total, "it holds on to its KV cache"


def _in_use() -> int:
    used = memory.usage(DEVICE).device
    assert used is not None
    return used
