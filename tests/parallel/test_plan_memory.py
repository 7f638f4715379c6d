"""The memory figures of `tepo plan` are those of real actors: states to the byte, activations to 15 %."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tepo_megatron.base.hardware import arena_bytes
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tepo_megatron.doctor.plan import activations
from tepo_megatron.doctor.plan.activations import ON_CPU, final_norm_terms, kept_terms, output_bytes
from tepo_megatron.doctor.plan.command import read_model
from tepo_megatron.doctor.plan.inputs import ELEMENT, PlannedModel
from tepo_megatron.doctor.plan.memory import TrainerMemory, checkpoint_bytes, offload_bytes, state_bytes
from tepo_megatron.doctor.plan.parameters import held, kinds_of, rank_parameters
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.parallel.test_families import MODELS, shaped
from tests.tiny import hybrid_config, tiny_model
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
    ("qwen3_5", {"tp": 2}, "fp32"),
    ("qwen3_5", {"pp": 2}, "fp32"),
]


def config(folder: Path, layout: dict[str, Any], precision: str, **training: Any) -> Config:
    tree = plain(cases.run_config(folder, layout, **training))
    tree["model"]["precision"] = precision
    return validate(tree)


def built(rank: int, cfg: Config) -> dict[str, int]:
    """Return the bytes of buffers, optimizer tensors and host memory after one step with zero gradients, in a forked rank."""
    from tepo_megatron.actor.offload import ON_CUDA, Offloader, optimizer_tensors
    from tepo_megatron.checkpoint.state import saved_slices
    from tepo_megatron.checkpoint.tensors import HostCopy

    actor = open_actor(cfg)
    actor.optimizer.step()
    actor.offloader = Offloader(actor.chunks, actor.optimizer, actor.groups.device, ON_CUDA)
    actor.offload()
    actor.load()
    actor.keep_reference()
    assert actor.reference is not None
    copied, shard_slices = HostCopy(), list(saved_slices(actor))
    copied.take(shard_slices)
    buffers = [b for chunk in actor.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {b.param_data.untyped_storage()._cdata: b.param_data.untyped_storage() for b in buffers}
    optimizer = {t.untyped_storage()._cdata: t.untyped_storage() for t in optimizer_tensors(actor.optimizer) if t.numel()}
    out = {
        "pp": actor.groups.pp.rank,
        "dp_cp": actor.groups.dp_cp.rank,
        "parameters": sum(p.numel() for chunk in actor.chunks for p in chunk.parameters()),
        "weights": sum(s.nbytes() for s in weights.values()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": sum(s.nbytes() for key, s in optimizer.items() if key not in weights),
        "host": actor.offloader.host_bytes,
        "reference": actor.reference.arena.allocated,
        "checkpoint": copied.arena.allocated,
        "shard slices": len(shard_slices),
    }
    return out


@pytest.mark.parametrize(
    ("model", "layout", "precision"), full_but(CASES[1:3], CASES[4:6] + CASES[9:11], CASES), ids=lambda x: str(x)
)
def test_states_to_the_byte(tmp_path: Path, model: str, layout: dict[str, Any], precision: str) -> None:
    tiny_model(tmp_path, MODELS[model]())
    cfg = config(tmp_path, layout, precision)
    family, arch = read_model(tmp_path)
    for rank in run_world(cfg.parallel.world_size, built, cfg):
        mine = held(family.rows, arch, cfg.parallel, rank["pp"], rank["dp_cp"])
        assert mine.parameters == rank["parameters"]
        assert state_bytes(mine, precision) == {k: rank[k] for k in ("weights", "gradients", "optimizer")}
        assert offload_bytes(mine, precision) == rank["host"]
        planned = arena_bytes([checkpoint_bytes(mine, precision)])
        assert rank["checkpoint"] <= planned + arena_bytes([1] * rank["shard slices"])
        if cfg.parallel.tp * cfg.parallel.pp == 1:  # otherwise one of the ranks that hold norms and tied tables writes them
            assert rank["checkpoint"] >= planned
        ours = rank_parameters(family.rows, arch, cfg.parallel, rank["pp"])
        assert arena_bytes([p.elements * ELEMENT[precision] for p in ours]) == rank["reference"]


WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 640}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
LENGTHS, PROMPT, TABLE = (128, 124, 120, 76), 24, 512
KEPT: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("qwen3", {}, "bf16", {}),
    ("qwen3", {}, "bf16", {"recompute": "selective"}),
    ("qwen3", {}, "bf16", {"recompute": "full"}),
    ("qwen3", {}, "bf16", {"share_prompts": "always"}),
    ("qwen3", {"cp": 2}, "bf16", {}),
    ("qwen3", {"cp": 2}, "bf16", {"share_prompts": "always"}),
    ("qwen2", {}, "fp32", {}),
    ("qwen2", {"tp": 2}, "bf16", {}),
    ("qwen2", {"tp": 2, "sequence_parallel": True}, "bf16", {}),
    ("qwen2", {"tp": 2, "sequence_parallel": True}, "bf16", {"share_prompts": "always", "recompute": "selective"}),
    ("moe", {}, "bf16", {}),
    ("moe", {}, "bf16", {"recompute": "selective"}),
    ("hybrid", {}, "bf16", {}),
    ("hybrid", {"tp": 2, "sequence_parallel": True}, "bf16", {"recompute": "selective"}),
    ("hybrid", {"cp": 2}, "fp32", {}),
]
LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 48}
TOLERANCE = {"hybrid": 0.1}  # its chunks are padded, by half a chunk on average and by other amounts here


def wide(model: str) -> PretrainedConfig:
    """Wide enough that activations, and not what is counted by rows, decide."""
    if model == "hybrid":
        kinds_of_layers = ["linear_attention", "full_attention"]
        return hybrid_config(**WIDE, **LINEAR, num_hidden_layers=2, layer_types=kinds_of_layers, vocab_size=TABLE)
    kinds = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "moe": Qwen3MoeConfig}
    experts = EXPERTS if model == "moe" else {}
    return shaped(kinds[model], WIDE, experts, num_hidden_layers=2, vocab_size=TABLE)


def one_batch(shared: bool) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, TABLE, (n,), generator=generator) for n in LENGTHS]
    rollouts = [
        Rollout(
            prompt_id=0 if shared else i,
            token_ids_L=torch.cat(((ids[0] if shared else own)[:PROMPT], own[PROMPT:])),
            response_mask_L=torch.arange(own.numel()) >= PROMPT,
            rollout_logprobs_L=torch.zeros(own.numel()),
            policy_version=0,
            stop_reason="stop",
        )
        for i, own in enumerate(ids)
    ]
    rows = sum(LENGTHS) - PROMPT * len(LENGTHS)
    return TrainBatch(tuple(rollouts), torch.ones(len(LENGTHS)), torch.zeros(rows), torch.zeros(rows), update=1)


def kept(rank: int, cfg: Config) -> tuple[int, int, int]:
    """Return the bytes that the forward pass of one microbatch saves for backward, in a forked rank.

    They are: storages on the device without the parameters'; copies that `training.offload_activations` makes of tensors of
    every size; and the host memory of these copies.
    """
    from tepo_megatron.actor.offload import HostActivations
    from tepo_megatron.losses import build_objective

    actor, objective = open_actor(cfg), build_objective(cfg.objective)
    batch = one_batch(cfg.training.share_prompts == "always")
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
        actor.backward(batch, objective)
    away = actor.activations = HostActivations(actor.chunks, torch.device("cpu"), least_bytes=1)
    for _ in range(2):  # the second pass knows how much a microbatch needs
        actor.backward(batch, objective)
    return sum(storage.nbytes() for storage in saved.values()), away.moved // 2, away.memory.allocated


@pytest.mark.parametrize(("model", "layout", "precision", "training"), full_but([], [KEPT[3]], KEPT), ids=lambda x: str(x))
def test_activations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    layout: dict[str, Any],
    precision: str,
    training: dict[str, Any],
) -> None:
    """Compare the memory on the device to 5 %, and the copies in host memory, one for each tensor that saved it, to 15 %."""
    tiny_model(tmp_path, wide(model))
    cfg = config(tmp_path, layout, precision, **training)
    _, arch = read_model(tmp_path)
    shared = training.get("share_prompts") == "always"
    kernels = replace(ON_CPU, attention="shared") if shared else ON_CPU
    element, prompts = ELEMENT[precision], PROMPT * (1 if shared else len(LENGTHS))
    rows = (sum(LENGTHS) - PROMPT * len(LENGTHS)) // cfg.parallel.cp
    tokens = rows + prompts // cfg.parallel.cp
    terms = final_norm_terms(arch, cfg.parallel, kernels)
    for kind, count in kinds_of(arch).items():
        terms += count * kept_terms(arch, cfg.parallel, cfg.training.recompute, kernels, kind=kind, sequence=max(LENGTHS))
    output = output_bytes(arch, cfg.parallel, rows, element, None)[0]
    monkeypatch.setattr(activations, "LEAST_OFFLOADED", 1)
    stays = activations.kept(terms, element, tokens).device + output
    waits = activations.kept(terms, element, tokens, offloaded=True)
    measured, moved, allocated = run_world(cfg.parallel.world_size, kept, cfg)[0]
    print(f"planned {stays:.0f}, measured {measured} bytes on the device; on the host {waits.host + output:.0f} and {moved}")
    assert stays == pytest.approx(measured, rel=TOLERANCE.get(model, 0.05))
    assert waits.device == 0 and waits.host + output == pytest.approx(moved, rel=0.15), "copies on the host"
    assert moved <= allocated < 1.03 * moved, "their memory: at multiples of 64 bytes, which is little even for small tensors"


def test_the_plan_of_a_stage_is_made_of_these(tmp_path: Path) -> None:
    """`training` adds up what the tests above measured: layers x tokens of a full microbatch, and the last norm."""
    tiny_model(tmp_path, wide("qwen3"))
    cfg = config(tmp_path, {}, "bf16")
    family, arch = read_model(tmp_path)
    trainer = TrainerMemory.of(cfg, PlannedModel(family, arch, kernels=ON_CPU))
    parts = trainer.state().parts
    terms = kept_terms(arch, cfg.parallel, "none", ON_CPU, sequence=cfg.sequence_tokens)
    layer = sum(term.bytes(2) for term in terms)
    each = 2 * layer + sum(term.bytes(2) for term in final_norm_terms(arch, cfg.parallel, ON_CPU))
    assert parts["activations"] == pytest.approx(cfg.training.max_tokens_per_microbatch * each)
    halves = replace(trainer, parallel=replace(cfg.parallel, pp=2, dp=1)).state().parts
    of_layers = cfg.training.max_tokens_per_microbatch * 2 * layer  # half of the layers, two microbatches in flight
    assert halves["activations"] == pytest.approx(of_layers)
