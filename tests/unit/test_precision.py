"""Presets of precision: each field that Megatron gets, what is refused where and why, and what stays out of FP8."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from transformers import Qwen3MoeConfig

from tepo_megatron.actor import kernels, precision
from tepo_megatron.config import MegatronConfig, ModelConfig, ParallelConfig, TrainingConfig
from tepo_megatron.config.io import validate
from tepo_megatron.errors import ConfigError
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.weights.ops import Architecture, Experts
from tests.tiny import tiny_model, tiny_qwen3
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
    """Qwen2.5-7B."""
    sizes: dict[str, Any] = {
        "num_layers": 28, "hidden_size": 3584, "ffn_size": 18944, "num_heads": 28, "num_query_groups": 4, "head_dim": 128,
        "vocab_size": 152064, "max_positions": 32768, "norm_eps": 1e-6, "rotary_base": 1e6, "tied_embeddings": False,
        "qk_norm": False,
    }  # fmt: skip
    return Architecture(**sizes | keys)


IN_BF16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
IN_FP8 = IN_BF16 | {
    "fp8_param": False, "fp8_wgrad": True, "fp8_dot_product_attention": False, "fp8_multi_head_attention": False,
    "first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0,
}  # fmt: skip
FIELDS = {
    "fp32": {"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "bf16": False},
    "bf16": IN_BF16,
    "fp8-delayed": IN_FP8
    | {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    "fp8-current": IN_FP8 | {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-blockwise": IN_FP8 | {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


@pytest.mark.parametrize("name", precision.PRESETS)
def test_a_preset_becomes_these_fields_of_the_transformer(name: str) -> None:
    found = precision.transformer_fields(model(name))
    assert found == FIELDS[name]
    built = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=4, **found)
    assert {key: getattr(built, key) for key in found} == found, "Megatron keeps them as they are"


def ddp(**fields: Any) -> dict[str, Any]:
    return {"ddp": fields}


def in_bf16(number: int) -> MegatronConfig:
    """Return the fields that keep a number of layers in bf16 at each end."""
    ends = {"num_layers_at_start_in_bf16": number, "num_layers_at_end_in_bf16": number}
    return MegatronConfig(transformer={"first_last_layers_bf16": True, **ends})


def test_layers_at_the_ends_that_stay_in_bf16() -> None:
    found = precision.transformer_fields(model("fp8-current"), in_bf16(2))
    wanted = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}
    assert found == FIELDS["fp8-current"] | wanted
    TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=4, **found)


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


def test_overlap_becomes_these_fields() -> None:
    megatron = MegatronConfig(ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 7})
    built = DistributedDataParallelConfig(**precision.ddp_fields(megatron, "cpu"))
    assert (built.overlap_grad_reduce, built.overlap_param_gather, built.bucket_size) == (True, True, 7)
    assert precision.optimizer_fields(model("bf16"), megatron, "cpu")["overlap_param_gather"]
    for keys, on in (
        ({}, (True, True)),
        ({"overlap_param_gather": False}, (True, False)),
        ({"overlap_grad_reduce": False}, (False, False)),
    ):
        by_default = precision.ddp_fields(MegatronConfig(ddp=keys), "cuda")
        assert (by_default["overlap_grad_reduce"], by_default["overlap_param_gather"]) == on, "GPUs overlap unless told not to"


def both_moments(kind: str) -> MegatronConfig:
    return MegatronConfig(optimizer={"exp_avg_dtype": kind, "exp_avg_sq_dtype": kind})


@pytest.mark.parametrize(("moments", "dtype"), [("bf16", torch.bfloat16), ("fp8", torch.uint8)])
def test_moments_become_these_fields(moments: Any, dtype: torch.dtype) -> None:
    found = precision.optimizer_fields(model("bf16"), both_moments(moments), "cpu")
    more = {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    assert found == precision.optimizer_fields(model("bf16"), MEGATRON, "cpu") | more
    assert found.keys() <= {f.name for f in dataclasses.fields(MegatronOptimizerConfig)}


def test_an_optimizer_on_the_host_becomes_these_fields() -> None:
    found = precision.optimizer_fields(model("bf16"), MegatronConfig(optimizer={"optimizer_offload_fraction": 0.25}), "cpu")
    assert found == precision.optimizer_fields(model("bf16"), MEGATRON, "cpu") | {
        "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }  # fmt: skip
    assert found.keys() <= {f.name for f in dataclasses.fields(MegatronOptimizerConfig)}


def test_recompute_becomes_these_fields() -> None:
    def fields(recompute: Any, experts: bool = False) -> dict[str, Any]:
        found = precision.recompute_fields(TrainingConfig(recompute=recompute), experts)
        TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=4, **found)
        return found

    assert fields("none") == {}
    assert fields("full") == {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert fields("selective") == {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    assert fields("selective", experts=True)["recompute_modules"] == ["mlp", "moe"]


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
    ("name", "hardware", "reason"),
    [
        ("bf16", precision.Hardware("V100", (7, 0)), "bf16 needs compute capability 8.0, and this is 7.0; use fp32"),
        ("fp8-current", precision.Hardware("A100", (8, 0), (2, 20), (13, 0)), "needs compute capability 8.9, and this is 8.0"),
        ("fp8-blockwise", precision.Hardware("L40", (8, 9), (2, 20), (13, 0)), "needs compute capability 9.0"),
        ("fp8-current", precision.Hardware("H100", (9, 0), None, (13, 0)), "needs Transformer Engine 2.2, and there is none"),
        ("fp8-blockwise", precision.Hardware("H100", (9, 0), (2, 2), (13, 0)), "needs Transformer Engine 2.3, and this is 2.2"),
        ("fp8-blockwise", precision.Hardware("H100", (9, 0), (2, 20), (12, 8)), "needs CUDA 12.9, and this is 12.8"),
    ],
)  # fmt: skip
def test_what_is_too_old_is_named(name: str, hardware: precision.Hardware, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        precision.check_hardware(model(name), hardware)


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


def test_no_more_layers_in_bf16_than_a_stage_has() -> None:
    precision.check_shapes(qwen(), model("fp8-current"), ParallelConfig(pp=4), in_bf16(7).bf16_layers)
    with pytest.raises(ConfigError, match=r"start_in_bf16=8 exceeds the 7 layers of a pipeline stage.*use at most 7"):
        precision.check_shapes(qwen(), model("fp8-current"), ParallelConfig(pp=4), in_bf16(8).bf16_layers)
    with pytest.raises(ConfigError, match=r"end_in_bf16=8 exceeds the 7 layers"):
        precision.check_shapes(qwen(), model("fp8-current"), ParallelConfig(pp=4), (7, 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"path": "m", "precision": "fp8-current"}, "platform": "cpu"}, "fp8-current needs platform=cuda; use bf16"),
        ({"model": {"path": "m", "precision": "fp8-current", "attention": "sdpa"}}, "attention=sdpa builds .* to auto"),
        ({"megatron": ENDS}, "first_last_layers_bf16=true: model.precision=bf16 has no FP8 layers"),
        ({"model": {"path": "m", "precision": "fp8-delayed"}, "megatron": ENDS}, "fp8-delayed keeps a history of scales"),
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
        ({"megatron": HOST, "resume": True}, "fraction=0.5 with resume=true: .*fraction to 0"),
        ({"megatron": HOST, "rollout": {"colocate": True}}, "fraction=0.5 with rollout.colocate=true"),
        ({"rollout": {"replay_experts": True}, "training": {"recompute": "full"}}, "recompute=full: routers that compute"),
    ],
)  # fmt: skip
def test_contradictions_name_key_value_reason_and_fix(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(BASE | change)


def test_engines_get_bf16_from_fp8() -> None:
    assert [model(name).dtype for name in precision.PRESETS] == ["fp32", "bf16", "bf16", "bf16", "bf16"]


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


def _outside(rank: int, path: Path) -> dict[str, str]:
    """Classes of the modules that hold parameters, by name, of a model with the fields of FP8."""
    from tepo_megatron.actor import build
    from tepo_megatron.distributed import parallel
    from tepo_megatron.platform import activate
    from tepo_megatron.weights.families import find_family, read_config

    groups = parallel.initialize(ParallelConfig(), activate("cpu"), 0)
    found = read_config(path)
    architecture, cfg = find_family(found).architecture(found), ModelConfig(path=str(path))
    config = build.transformer_config(architecture, cfg, ParallelConfig(), groups.device)
    (chunk,) = build.build_chunks(config, architecture, cfg, groups)
    out = {name: f"{type(m).__module__}.{type(m).__name__}" for name, m in chunk.named_modules() if list(m.parameters(False))}
    parallel.shutdown()
    return out


def _router(rank: int, path: Path) -> list[tuple[Any, ...]]:
    from tepo_megatron.actor import build
    from tepo_megatron.distributed import parallel
    from tepo_megatron.platform import activate
    from tepo_megatron.weights.families import find_family, read_config

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


def test_embedding_and_output_layer_are_not_transformer_engines(tmp_path: Path) -> None:
    """Both are GPTModel's own modules, whatever the layers are made of, so FP8 does not reach them."""
    tiny_qwen3(tmp_path / "model", tied=False)
    ((found),) = run_world(1, _outside, tmp_path / "model")
    ours = "megatron.core.tensor_parallel.layers."
    assert found["output_layer"] == ours + "ColumnParallelLinear"
    assert found["embedding.word_embeddings"] == ours + "VocabParallelEmbedding"


def test_the_page_shows_the_table_of_the_code() -> None:
    assert precision.table() in Path("docs/precision.md").read_text()


ALL = frozenset({"transformer_engine", "apex", "amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"})
APEX = ALL - {"transformer_engine"}


@pytest.mark.parametrize(
    ("keys", "device", "found", "wanted"),
    [
        ({}, "cpu", ALL, ("torch", "torch", "host", "separate")),
        ({}, "cuda", ALL, ("te", "te", "te", "apex")),
        ({"attention": "sdpa"}, "cuda", ALL, ("torch", "apex", "te", "apex")),
        ({}, "cuda", APEX, ("torch", "apex", "apex", "apex")),
        ({}, "cuda", frozenset({"transformer_engine"}), ("te", "te", "te", "torch")),
        ({}, "cuda", frozenset(), ("torch", "torch", "torch", "torch")),
    ],
)
def test_who_does_what(keys: dict[str, Any], device: str, found: frozenset[str], wanted: tuple[str, ...]) -> None:
    chosen = kernels.choose(model("bf16", **keys), MEGATRON, device, found)
    assert dataclasses.astuple(chosen) == wanted


@pytest.mark.parametrize(
    ("precision", "attention", "cp", "layers"),
    [("fp32", "auto", 2, "torch"), ("fp32", "auto", 1, "te"), ("bf16", "auto", 2, "te"), ("fp32", "sdpa", 2, "torch"),
     ("fp8-current", "auto", 2, "te")],
)  # fmt: skip
def test_no_fp32_attention_of_transformer_engine_under_context_parallelism(
    precision: str, attention: str, cp: int, layers: str
) -> None:
    cfg = ModelConfig(path="model", precision=precision, attention=attention)
    assert kernels.choose(cfg, MEGATRON, "cuda", ALL, cp=cp).layers == layers


@pytest.mark.parametrize(
    ("asked", "device", "found", "who"),
    [
        (None, "cpu", ALL, "separate"),
        (True, "cpu", ALL, "torch"),
        (None, "cuda", ALL, "apex"),
        (None, "cuda", frozenset(), "torch"),
        (False, "cuda", ALL, "separate"),
    ],
)
def test_who_accumulates_gradients(asked: bool | None, device: str, found: frozenset[str], who: str) -> None:
    megatron = MegatronConfig(transformer={} if asked is None else {"gradient_accumulation_fusion": asked})
    assert kernels.choose(model("bf16"), megatron, device, found).gradient_accumulation == who


@pytest.mark.parametrize(
    ("keys", "found", "said"),
    [
        ({"precision": "fp8-current"}, APEX, "model.precision=fp8-current, but transformer-engine is not installed.* use bf16"),
        ({"attention": "te"}, APEX, "model.attention=te, but transformer-engine is not installed.* use auto"),
        ({}, frozenset({"apex"}), "Apex is installed without its CUDA extensions"),
    ],
)
def test_a_missing_package_is_named(keys: dict[str, Any], found: frozenset[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kernels.choose(ModelConfig(path="model", **keys), MEGATRON, "cuda", found)


@pytest.mark.parametrize("fields", [MOMENT, HOST])
def test_an_optimizer_that_needs_transformer_engine(fields: dict[str, Any]) -> None:
    kernels.check_transformer_engine(MegatronConfig(**fields), ALL)
    with pytest.raises(ConfigError, match="transformer-engine is not installed"):
        kernels.check_transformer_engine(MegatronConfig(**fields), APEX)


def test_overlapped_tensor_parallelism_needs_transformer_engine() -> None:
    megatron = MegatronConfig(**UB)
    kernels.check_transformer_engine(megatron, ALL)
    with pytest.raises(ConfigError, match=r"tp_comm_overlap=true, but transformer-engine is not installed.* use false"):
        kernels.check_transformer_engine(megatron, APEX)


@pytest.mark.parametrize("cp", [1, 2])
def test_fixed_length_pads_every_microbatch_to_one_length(cp: int) -> None:
    """The length does not depend on the content, and is padded further where it is no multiple of what the mesh requires."""
    parallel = ParallelConfig(cp=cp, tp=2, sequence_parallel=True)
    training = TrainingConfig(max_tokens_per_microbatch=1000)
    alignment = precision.alignment(model("fp8-current"), parallel, training.max_tokens_per_microbatch)
    assert {sum(alignment.padded(lengths)) for lengths in ([1], [17, 400], [333] * 3, [1000])} == {1024}
    assert training.tokens_without_grad(MegatronConfig(**UB).fixed_length) == 1000
    assert training.tokens_without_grad(MEGATRON.fixed_length) == 2000


def test_what_doctor_says() -> None:
    said = str(kernels.choose(model("bf16"), MEGATRON, "cpu", kernels.installed()))
    assert said == "layers and attention: PyTorch; norms: PyTorch; Adam: this package; gradient accumulation: autograd"


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
