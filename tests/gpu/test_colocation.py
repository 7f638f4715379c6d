"""The actor's parts, and a server's weights and KV cache, really leave a GPU, and come back."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import RolloutConfig, ServerConfig
from tepo_megatron.dist.platform import memory
from tests.tiny import tiny_qwen3

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_actor_leaves_the_gpu_and_comes_back_bit_for_bit(alone: Any, tmp_path: Path, precision: str) -> None:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.checkpoint.optimizer import shards
    from tepo_megatron.config.io import plain, validate
    from tepo_megatron.losses import build_objective
    from tests.parallel import cases

    case = cases.make_case(tmp_path, tied=True)
    tree = plain(cases.run_config(case.model, {})) | {"platform": "cuda"}
    tree["model"]["precision"] = precision
    cfg = validate(tree)
    before = torch.cuda.memory_allocated(DEVICE)
    actor, objective = Actor.open(cfg, alone), build_objective(cfg.objective)
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


def test_page_locked_memory_is_what_the_plan_says(alone: Any, tmp_path: Path) -> None:
    """The plan is exact to the byte: none of it comes from PyTorch's allocator, which rounds up. Seconds are printed (`-s`)."""
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.checkpoint.state import saved_slices
    from tepo_megatron.checkpoint.tensors import HostCopy
    from tepo_megatron.config.io import plain, validate
    from tepo_megatron.doctor.plan.command import read_model
    from tepo_megatron.doctor.plan.memory import offload_bytes
    from tepo_megatron.doctor.plan.parameters import held
    from tests.parallel import cases

    case = cases.make_case(tmp_path, tied=True)
    tree = plain(cases.run_config(case.model, {})) | {"platform": "cuda"}
    tree["model"]["precision"] = "bf16"
    tree["megatron"]["ddp"] |= {"overlap_grad_reduce": False, "overlap_param_gather": False}  # one bucket, as the plan counts
    cfg = validate(tree)
    actor = Actor.open(cfg, alone)
    actor.optimizer.step()  # there are moments from here on
    theirs = torch.cuda.host_memory_stats().get("allocated_bytes.allocated", 0)
    for _ in range(3):
        start = time.perf_counter()
        actor.offload()
        middle = time.perf_counter()
        copies = actor.offloader.copies
        assert copies and all(copy.is_pinned() for copy in copies)
        actor.load()
        print(f"offload {middle - start:.4f} s, load {time.perf_counter() - middle:.4f} s, {actor.offloader.host_bytes} bytes")
    family, arch = read_model(case.model)
    assert actor.offloader.host_bytes == offload_bytes(held(family.rows, arch, cfg.parallel, 0, 0), "bf16")
    copied = HostCopy().take(list(saved_slices(actor)))
    assert all(box.data.is_pinned() for box in copied if box.data.numel())
    assert torch.cuda.host_memory_stats().get("allocated_bytes.allocated", 0) == theirs


def test_host_memory_is_unlocked_and_locked_again() -> None:
    """An address that was freed can be locked by the next arena; asynchronous copies there and back keep every bit."""
    from tepo_megatron.dist.platform.memory import HostArena

    x = torch.randint(0, 256, (50_000_001,), dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        arena = HostArena(DEVICE)
        (small,) = arena.pieces([4097])
        (piece,) = arena.pieces([x.numel()])
        assert small.is_pinned() and piece.is_pinned() and piece[12345:].is_pinned()
        piece.copy_(x, non_blocking=True)
        back = torch.empty_like(x).copy_(piece, non_blocking=True)
        assert torch.equal(back, x)
        del arena, small, piece


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_leaves_the_gpu_and_serves_what_it_is_given_when_it_is_back(tmp_path: Path) -> None:
    from tepo_megatron.engines.engine_api import LaunchSpec
    from tepo_megatron.engines.engines import build_engine
    from tests.server.served import SAMPLING, logprob_diff, make_prompts, save_weights

    tiny_qwen3(tmp_path / "model", tied=True, seed=0)
    other = tiny_qwen3(tmp_path / "other", tied=True, seed=1)
    files, prompts = save_weights(other, tmp_path, files=2), make_prompts(16, seed=0)
    cfg = RolloutConfig(engine="vllm", colocate=True, server=ServerConfig(extra_args=["--gpu-memory-utilization", "0.5"]))
    launch = LaunchSpec(tmp_path / "model", max_model_len=128, platform="cuda", precision="fp32", seed=0, sleeps=True)
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
