"""What `tepo plan` says of memory against real actors: parameters, gradients and optimizer to the byte, activations to 15 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.config import Config
from tepo_megatron.config_io import plain, validate
from tepo_megatron.plan.memory import state_bytes
from tepo_megatron.plan.models import read_model
from tepo_megatron.plan.parameters import held
from tests.parallel import cases
from tests.parallel.test_families import MODELS
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
    optimizer = {
        t.untyped_storage()._cdata: t.untyped_storage() for t in actor._offload._tensors("optimizer") if t.numel()
    }
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


@pytest.mark.parametrize(("model", "layout", "precision"), CASES, ids=lambda x: str(x))
def test_states_to_the_byte(tmp_path: Path, model: str, layout: dict[str, Any], precision: str) -> None:
    tiny_model(tmp_path, MODELS[model]())
    cfg = config(tmp_path, layout, precision)
    family, arch = read_model(tmp_path)
    for rank in run_world(cfg.parallel.world_size, built, cfg):
        mine = held(family, arch, cfg.parallel, rank["pp"], rank["dp_cp"])
        assert mine.parameters == rank["parameters"]
        assert state_bytes(mine, precision) == {k: rank[k] for k in ("weights", "gradients", "optimizer")}
