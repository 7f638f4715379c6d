"""Presets of precision: each field that Megatron gets, what is refused where and why, and what stays out of FP8."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from transformers import Qwen3MoeConfig

from tepo_megatron.actor import precision
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import MegatronConfig, ModelConfig, ParallelConfig, TrainingConfig
from tepo_megatron.config.io import validate
from tepo_megatron.models.ops import Architecture, Experts
from tepo_megatron.ops.alignment import Alignment
from tests.tiny import tiny_model
from tests.worlds import run_world

BASE = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
MEGATRON = MegatronConfig()
SP = {"tp": 2, "sequence_parallel": True}
UB = {"transformer": {"tp_comm_overlap": True}}
ENDS = {"transformer": {"first_last_layers_bf16": True}}
MOMENT = {"optimizer": {"exp_avg_dtype": "fp8"}}
HOST = {"optimizer": {"optimizer_offload_fraction": 0.5}}
GPU = {"H100", "H200", "B200"}


def model(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig(path="model", precision=name, **keys)  # type: ignore[arg-type]


def qwen(**keys: Any) -> Architecture:
    sizes: dict[str, Any] = {
        "num_layers": 28, "hidden_size": 3584, "ffn_size": 18944, "num_heads": 28, "num_query_groups": 4, "head_dim": 128,
        "vocab_size": 152064, "max_positions": 32768, "norm_eps": 1e-6, "rotary_base": 1e6, "tied_embeddings": False,
        "qk_norm": False,
    }  # fmt: skip
    return Architecture(**sizes | keys)


def ddp(**fields: Any) -> dict[str, Any]:
    return {"ddp": fields}


@pytest.mark.parametrize("name", precision.PRESETS)
def test_a_preset_becomes_these_fields_of_data_parallelism_and_optimizer(name: str) -> None:
    assert precision.ddp_fields(MEGATRON, "cpu") == {
        "grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "average_in_collective": False,
        "overlap_grad_reduce": False, "overlap_param_gather": False, "bucket_size": None, "fp8_param_gather": False,
    }  # fmt: skip
    in_fp32 = name == "fp32"
    found = precision.optimizer_fields(model(name), MEGATRON, "cpu")
    assert found == {
        "params_dtype": torch.float32 if in_fp32 else torch.bfloat16, "bf16": not in_fp32, "use_distributed_optimizer": True,
        "overlap_param_gather": False, "main_params_dtype": torch.float32, "main_grads_dtype": torch.float32,
    }  # fmt: skip
    built = MegatronOptimizerConfig(**found)
    assert (built.exp_avg_dtype, built.exp_avg_sq_dtype, built.fp8_recipe) == (torch.float32, torch.float32, None)


@pytest.mark.parametrize("hardware", precision.PROFILES, ids=lambda h: h.name)
@pytest.mark.parametrize("name", precision.PRESETS)
def test_every_preset_runs_or_is_refused_with_a_reason(name: Any, hardware: precision.Hardware) -> None:
    runs = not name.startswith("fp8") or (hardware.name in GPU and (name, hardware.name) != ("fp8-blockwise", "B200"))
    if runs:
        precision.check_hardware(model(name), hardware)
        return
    with pytest.raises(ConfigError) as refused:
        precision.check_hardware(model(name), hardware)
    said = str(refused.value)
    assert said.startswith(f"model.precision={name} on {hardware.name}: ") and "; use bf16" in said
    assert ("emulates it there by MXFP8" if hardware.name == "B200" else "need a GPU") in said


@pytest.mark.parametrize(
    ("name", "architecture", "tp", "said"),
    [
        ("fp8-blockwise", qwen(), 4, None),
        ("fp8-current", qwen(ffn_size=18950), 1, r"multiples of 16, and with parallel.tp=1 its part of ffn_size is 18950"),
        ("fp8-blockwise", qwen(ffn_size=2368 * 4), 4, r"multiples of 128, .*ffn_size is 2368; .* model.precision=fp8-current"),
        ("bf16", qwen(ffn_size=18950), 1, None),
        ("fp8-blockwise", qwen(experts=Experts(8, 2, 704, True, tuple(range(28)))), 1, r"the experts' ffn_size is 704"),
    ],
)
def test_shapes_that_a_preset_cannot_split_are_refused(
    name: str, architecture: Architecture, tp: int, said: str | None
) -> None:
    parallel = ParallelConfig(tp=tp)
    if said is None:
        precision.check_shapes(architecture, model(name), parallel)
        return
    with pytest.raises(ConfigError, match=said):
        precision.check_shapes(architecture, model(name), parallel)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"path": "m", "precision": "fp8-current"}, "platform": "cpu"}, "fp8-current needs platform=cuda; use bf16"),
        ({"model": {"path": "m", "precision": "fp8-current", "attention": "sdpa"}}, "attention=sdpa builds .* to auto"),
        ({"megatron": ENDS}, "first_last_layers_bf16=true: model.precision=bf16 has no FP8 layers"),
        ({"megatron": ddp(overlap_param_gather=True, overlap_grad_reduce=False)}, "gather=true needs overlap_grad_reduce"),
        ({"megatron": ddp(overlap_param_gather=True), "platform": "cpu"}, "gather=true speaks of buckets, .* to false"),
        ({"megatron": ddp(bucket_size=5), "platform": "cpu"}, "megatron.ddp.bucket_size=5 .* on a CPU.* this to null"),
        ({"megatron": ddp(bucket_size=5, overlap_grad_reduce=False)}, "=5 .*reduce=false there is one"),
        ({"megatron": UB}, "tp_comm_overlap=true needs parallel.sequence_parallel=true"),
        ({"parallel": SP, "megatron": UB, "platform": "cpu"}, "tp_comm_overlap=true needs platform=cuda; use false"),
        (
            {"parallel": SP, "megatron": UB, "model": {"path": "m", "attention": "sdpa"}},
            "tp_comm_overlap=true is Transformer Engine's, .* to auto",
        ),
        ({"megatron": MOMENT, "platform": "cpu"}, "optimizer.exp_avg_dtype=fp8 needs platform=cuda; use fp32"),
        ({"megatron": HOST, "platform": "cpu"}, "optimizer_offload_fraction=0.5 needs platform=cuda; use 0"),
        ({"megatron": {"optimizer": HOST["optimizer"] | MOMENT["optimizer"]}}, "exp_avg_dtype=fp8 and .*_fraction=0.5"),
        ({"megatron": MOMENT, "checkpoint": {"every": 2}}, "exp_avg_dtype=fp8 with checkpoint.every=2: .* to fp32"),
        ({"megatron": HOST}, "fraction=0.5 with checkpoint.every=30 min"),
        ({"megatron": HOST, "checkpoint": {"every": 0}, "resume": True}, "fraction=0.5 with resume=true: .*fraction to 0"),
        ({"megatron": HOST, "checkpoint": {"every": 0}, "rollout": {"colocate": True}}, "fraction=0.5 with .*colocate=true"),
        ({"rollout": {"replay_experts": True}, "training": {"recompute": "full"}}, "recompute=full: routers that compute"),
    ],
)  # fmt: skip
def test_contradictions_name_key_value_reason_and_fix(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(BASE | change)


@pytest.mark.parametrize(
    ("name", "parallel", "multiple"),
    [
        ("bf16", {}, 1),
        ("bf16", {"tp": 4, "sequence_parallel": True}, 4),
        ("fp8-current", {"tp": 4}, 16),
        ("fp8-current", {"tp": 4, "sequence_parallel": True}, 64),
        ("fp8-blockwise", {"tp": 2, "sequence_parallel": True}, 256),
        ("fp8-blockwise", {"cp": 2}, 128),
    ],
)
def test_packed_tokens_of_a_rank_are_padded_to_the_presets_multiple(name: str, parallel: dict[str, Any], multiple: int) -> None:
    mesh = ParallelConfig(**parallel)
    alignment = precision.alignment(model(name), mesh)
    assert alignment == Alignment(cp=mesh.cp, total=multiple)
    for lengths in ([1], [5, 17, 30], [512] * 3, [127, 129]):
        padded = alignment.padded(lengths)
        assert sum(padded) // mesh.cp % multiple == 0
        assert all(a >= b and a % alignment.sequence == 0 for a, b in zip(padded, lengths, strict=True))
        assert sum(padded) - sum(lengths) < multiple * mesh.cp + len(lengths) * alignment.sequence


def _router(rank: int, path: Path) -> list[tuple[Any, ...]]:
    from tepo_megatron.actor import build
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate
    from tepo_megatron.models.families import find_family, read_config

    groups = parallel.initialize(ParallelConfig(), activate("cpu"), 0)
    found = read_config(path)
    architecture = find_family(found).architecture(found)
    out = []
    for name in ("fp32", "bf16"):
        cfg = ModelConfig(path=str(path), precision=name)
        config = build.transformer_config(architecture, cfg, ParallelConfig(), groups.device)
        out.append((config.moe_router_dtype, config.moe_router_load_balancing_type, config.moe_aux_loss_coeff))
    parallel.shutdown()
    return out


def test_experts_are_chosen_in_fp32_whatever_the_precision(tmp_path: Path) -> None:
    """Rounded to bf16, close calls of the router fall otherwise than in the engine, which computes them in fp32 as well."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32, **sizes)
    tiny_model(tmp_path / "model", config)
    assert run_world(1, _router, tmp_path / "model") == [[("fp32", "none", 0.0)] * 2]


@pytest.mark.parametrize("cp", [1, 2])
def test_fixed_length_pads_every_microbatch_to_one_length(cp: int) -> None:
    """The length does not depend on the content, and is padded further where it is no multiple of what the mesh requires."""
    parallel = ParallelConfig(cp=cp, tp=2, sequence_parallel=True)
    training = TrainingConfig(max_tokens_per_microbatch=1000)
    alignment = precision.alignment(model("fp8-current"), parallel, training.max_tokens_per_microbatch)
    assert {sum(alignment.padded(lengths)) for lengths in ([1], [17, 400], [333] * 3, [1000])} == {1024}
    assert training.tokens_without_grad(MegatronConfig(**UB).fixed_length) == 1000
    assert training.tokens_without_grad(MEGATRON.fixed_length) == 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_norm_is_the_formula(dtype: torch.dtype) -> None:
    """x / sqrt(mean x^2 + eps) * w, values and gradients, against fp64."""
    from tepo_megatron.actor.layer_spec import RMSNorm

    config = TransformerConfig(num_layers=1, hidden_size=48, num_attention_heads=4, params_dtype=dtype)
    norm, generator = RMSNorm(config, 48, eps=1e-6), torch.Generator().manual_seed(0)
    x = (3 * torch.randn(7, 5, 48, generator=generator)).to(dtype).requires_grad_()
    upstream = torch.randn(7, 5, 48, generator=generator).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(48, generator=generator))
    exact, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    out = norm(x)
    out.backward(upstream)
    expected.backward(upstream.double())
    assert out.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for a, b in ((out, expected), (x.grad, exact.grad), (norm.weight.grad, weight.grad)):
        assert ((a.double() - b).norm() / b.norm()).item() < tolerance
