"""What `tepo plan` says of memory against real actors: parameters, gradients and optimizer to the byte, activations to 15 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tepo_megatron.config import Config
from tepo_megatron.config_io import plain, validate
from tepo_megatron.plan.activations import ON_CPU, Recompute, final_norm_bytes, layer_bytes, output_bytes
from tepo_megatron.plan.memory import ELEMENT, Model, state_bytes, training
from tepo_megatron.plan.models import read_model
from tepo_megatron.plan.parameters import held
from tepo_megatron.types import Rollout, TrainBatch
from tests.marks import slow_but
from tests.parallel import cases
from tests.parallel.test_families import MODELS, shaped
from tests.tiny import tiny_model
from tests.worlds import run_world

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {}, "fp32"),
    ("qwen3", {"tp": 2, "sequence_parallel": True}, "bf16"),
    ("qwen2", {"pp": 2}, "bf16"),  # tied: the first and the last stage have the table
    ("qwen2", {"tp": 2, "pp": 2}, "fp32"),
    ("qwen2 deep", {"pp": 2, "vpp": 2}, "bf16"),
    ("llama", {"dp": 2, "cp": 2}, "bf16"),
    ("mistral", {"tp": 2, "dp": 2}, "bf16"),
    ("qwen3_moe", {"ep": 2, "dp": 2}, "bf16"),
    ("qwen3_moe", {"ep": 2, "dp": 4}, "bf16"),
    ("mixtral", {"ep": 2, "cp": 2}, "fp32"),
    ("mixtral", {"tp": 2, "ep": 2, "dp": 2, "sequence_parallel": True}, "bf16"),
    ("qwen3_moe 7/1", {"pp": 2}, "bf16"),
]


def config(folder: Path, layout: dict[str, Any], precision: str, **training: Any) -> Config:
    tree = plain(cases.run_config(folder, layout, **training))
    tree["model"]["precision"] = precision
    return validate(tree)


def built(rank: int, cfg: Config) -> dict[str, int]:
    """In a forked rank: bytes of the buffers and of the optimizer's tensors after one step with gradients of zero."""
    from tepo_megatron import parallel
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.platform import activate

    groups = parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed)
    actor = Actor(cfg, groups)
    actor.optimizer.step()
    buffers = [b for chunk in actor.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {b.param_data.untyped_storage()._cdata: b.param_data.untyped_storage() for b in buffers}
    optimizer = {t.untyped_storage()._cdata: t.untyped_storage() for t in actor._offload._tensors("optimizer") if t.numel()}
    out = {
        "pp": groups.pp.rank,
        "dp_cp": groups.dp_cp.rank,
        "parameters": sum(p.numel() for chunk in actor.chunks for p in chunk.parameters()),
        "weights": sum(s.nbytes() for s in weights.values()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(s.nbytes() for key, s in optimizer.items() if key not in weights),
    }
    parallel.shutdown()
    return out


@pytest.mark.parametrize(("model", "layout", "precision"), slow_but(CASES[1:5] + CASES[8:9], CASES), ids=lambda x: str(x))
def test_states_to_the_byte(tmp_path: Path, model: str, layout: dict[str, Any], precision: str) -> None:
    tiny_model(tmp_path, MODELS[model]())
    cfg = config(tmp_path, layout, precision)
    family, arch = read_model(tmp_path)
    for rank in run_world(cfg.parallel.world_size, built, cfg):
        mine = held(family.rows, arch, cfg.parallel, rank["pp"], rank["dp_cp"])
        assert mine.parameters == rank["parameters"]
        assert state_bytes(mine, precision) == {k: rank[k] for k in ("weights", "gradients", "optimizer")}


WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 640}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
LENGTHS, PROMPT, TABLE = (256, 250, 240, 152), 50, 512
KEPT: list[tuple[str, dict[str, Any], str, Recompute]] = [
    ("qwen3", {}, "bf16", "none"),
    ("qwen3", {}, "bf16", "selective"),
    ("qwen3", {}, "bf16", "full"),
    ("qwen3", {"cp": 2}, "bf16", "none"),
    ("qwen2", {}, "fp32", "none"),
    ("qwen2", {"tp": 2}, "bf16", "none"),
    ("qwen2", {"tp": 2, "sequence_parallel": True}, "bf16", "none"),
    ("moe", {}, "bf16", "none"),
]


def wide(model: str) -> PretrainedConfig:
    """Wide enough that activations, and not what is counted by rows, decide."""
    kinds = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "moe": Qwen3MoeConfig}
    experts = EXPERTS if model == "moe" else {}
    return shaped(kinds[model], WIDE, experts, num_hidden_layers=4, vocab_size=TABLE)


def one_batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    rollouts = [
        Rollout(
            prompt_id=i,
            token_ids_L=torch.randint(1, TABLE, (n,), generator=generator),
            response_mask_L=torch.arange(n) >= PROMPT,
            rollout_logprobs_L=torch.zeros(n),
            policy_version=0,
            stop_reason="stop",
        )
        for i, n in enumerate(LENGTHS)
    ]
    rows = sum(LENGTHS) - PROMPT * len(LENGTHS)
    return TrainBatch(tuple(rollouts), torch.ones(len(LENGTHS)), torch.zeros(rows), torch.zeros(rows), update=1)


def kept(rank: int, cfg: Config, recompute: Recompute) -> int:
    """In a forked rank: bytes of all storages that the forward pass of one microbatch saves, but for the parameters'."""
    from tepo_megatron import parallel
    from tepo_megatron.actor import build
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.losses import build_objective
    from tepo_megatron.platform import activate

    groups = parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed)
    if recompute != "none":  # no key of ours turns it on: Megatron's own
        ours = build.transformer_config

        def recomputing(*args: Any) -> Any:
            config = ours(*args)
            config.recompute_granularity, config.recompute_modules = recompute, ["core_attn"]
            if recompute == "full":
                config.recompute_method, config.recompute_num_layers = "uniform", 1
            return config

        build.transformer_config = recomputing
    actor = Actor(cfg, groups)
    weights = {p.untyped_storage()._cdata for chunk in actor.chunks for p in chunk.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        in_backward = torch._C._current_graph_task_id() != -1  # what is computed again is not kept
        if not in_backward and storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    actor.start_step(1)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        actor.backward(one_batch(), build_objective(cfg.objective))
    out = sum(storage.nbytes() for storage in saved.values())
    parallel.shutdown()
    return out


@pytest.mark.parametrize(
    ("model", "layout", "precision", "recompute"), slow_but([KEPT[0], KEPT[2], KEPT[6]], KEPT), ids=lambda x: str(x)
)
def test_activations(tmp_path: Path, model: str, layout: dict[str, Any], precision: str, recompute: Recompute) -> None:
    tiny_model(tmp_path, wide(model))
    cfg = config(tmp_path, layout, precision)
    _, arch = read_model(tmp_path)
    element, tokens = ELEMENT[precision], sum(LENGTHS) // cfg.parallel.cp
    rows = (sum(LENGTHS) - PROMPT * len(LENGTHS)) // cfg.parallel.cp
    layer = layer_bytes(arch, cfg.parallel, element, recompute, ON_CPU, sparse=arch.experts is not None, sequence=max(LENGTHS))
    planned = tokens * (arch.num_layers * layer + final_norm_bytes(arch, cfg.parallel, element, ON_CPU))
    planned += output_bytes(arch, cfg.parallel, rows, element, None)[0]
    measured = run_world(cfg.parallel.world_size, kept, cfg, recompute)[0]
    assert planned == pytest.approx(measured, rel=0.05)


def test_the_plan_of_a_stage_is_made_of_these(tmp_path: Path) -> None:
    """`training` adds up what the tests above measured: layers x tokens of a full microbatch, and the last norm."""
    tiny_model(tmp_path, wide("qwen3"))
    cfg = config(tmp_path, {}, "bf16")
    family, arch = read_model(tmp_path)
    parts = training(cfg, Model(family, arch, kernels=ON_CPU), cfg.parallel).parts
    layer = layer_bytes(arch, cfg.parallel, 2, "none", ON_CPU, sequence=cfg.sequence_tokens)
    each = 4 * layer + final_norm_bytes(arch, cfg.parallel, 2, ON_CPU)
    assert parts["activations"] == pytest.approx(cfg.training.max_tokens_per_microbatch * each)
    halves = training(cfg, Model(family, arch, kernels=ON_CPU), replace(cfg.parallel, pp=2, dp=1)).parts
    of_layers = cfg.training.max_tokens_per_microbatch * 4 * layer  # of the first stage: half of them, of two microbatches
    assert halves["activations"] == pytest.approx(of_layers)
