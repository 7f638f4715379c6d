"""Presets of precision, and Transformer Engine's and Apex's kernels next to the plain ones, on a GPU."""

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from tepo_megatron.actor import kernels, precision
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tests.parallel import cases
from tests.tiny import tiny_model

DEVICE = torch.device("cuda", 0)
HERE = kernels.hardware(DEVICE)
FP8 = [name for name in precision.PRESETS if name.startswith("fp8")]
FOUND = kernels.installed()


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(package not in FOUND, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    """Sequences of `cases`, on a model whose sizes are multiples of 128 and whose weights are those of an untrained one."""
    folder = tmp_path_factory.mktemp("case")
    found = cases.make_case(folder, tied=True)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 4}
    tiny_model(
        folder / "wide",
        Qwen3Config(
            vocab_size=cases.VOCAB, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, **sizes
        ),
        scale=1.0,
    )
    return replace(found, model=folder / "wide")


@dataclass
class Trained:
    """Log-probs before an update, its gradients, and the weights after it."""

    logprobs: Tensor
    gradients: dict[str, Tensor]
    weights: list[Tensor]
    norm: float


def config(case: cases.Case, **sections: dict[str, Any]) -> Config:
    tree = plain(cases.run_config(case.model, {})) | {"platform": "cuda"}
    tree["model"]["precision"] = "bf16"
    for name, keys in sections.items():
        tree[name] |= keys
    return validate(tree)


def trained(groups: Any, cfg: Config, case: cases.Case) -> Trained:
    from tepo_megatron.actor.actor import Actor
    from tepo_megatron.losses import build_objective

    actor, objective = Actor.open(cfg, groups), build_objective(cfg.objective)
    actor.start_step(1)
    batch = actor.attach_old_stats(replace(case.batches[0], update=0, old_logprobs_N=None, old_entropies_N=None))
    assert batch.old_logprobs_N is not None
    actor.backward(batch, objective)
    gradients = {b.name: b.parameter.main_grad.clone() for b in actor.bindings}
    norm = actor.update(batch, objective).metrics["actor/grad_norm"][0]
    return Trained(batch.old_logprobs_N.clone(), gradients, [b.parameter.detach().clone() for b in actor.bindings], norm)


@pytest.fixture(scope="module")
def in_bf16(alone: Any, case: cases.Case) -> Trained:
    return trained(alone, config(case), case)


@pytest.fixture(scope="module")
def unfused(alone: Any, case: cases.Case) -> Trained:
    """With what `offload_activations` switches off: products of weight gradients that add into the fp32 sums themselves.

    Without it they are rounded to bf16 before they are added.
    """
    cfg = config(case, megatron={"transformer": {"gradient_accumulation_fusion": False}})
    assert not cfg.megatron.fuses_gradient_accumulation("cuda", False)
    return trained(alone, cfg, case)


def apart(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def same(a: Trained, b: Trained) -> None:
    assert torch.equal(a.logprobs, b.logprobs)
    assert all(apart(a.gradients[name], b.gradients[name]) < 1e-5 for name in b.gradients)
    assert all(apart(x, y) < 1e-5 for x, y in zip(a.weights, b.weights, strict=True))


@pytest.mark.parametrize("name", FP8)
def test_fp8_trains_near_bf16_or_is_refused(alone: Any, case: cases.Case, in_bf16: Trained, name: Any) -> None:
    cfg = config(case, model={"precision": name})
    if (reason := precision.refusal(name, HERE)) is not None:
        with pytest.raises(ConfigError):
            trained(alone, cfg, case)
        pytest.skip(reason)
    found = trained(alone, cfg, case)
    assert not torch.equal(found.logprobs, in_bf16.logprobs), "something is in FP8"
    assert (found.logprobs - in_bf16.logprobs).abs().mean() < 0.05
    assert found.norm == pytest.approx(in_bf16.norm, rel=0.2)
    whole, expected = (torch.cat([t.flatten() for t in x.gradients.values()]) for x in (found, in_bf16))
    assert torch.nn.functional.cosine_similarity(whole, expected, dim=0) > 0.95
    assert all(w.dtype == torch.bfloat16 for w in found.weights), "what is sent and saved"


@needs("transformer_engine")
def test_only_the_layers_linear_modules_are_transformer_engines_products(alone: Any, case: cases.Case) -> None:
    """FP8 covers every module of these classes, and nothing else multiplies weights."""
    from transformer_engine.pytorch import LayerNormLinear, Linear

    from tepo_megatron.actor.actor import Actor

    actor = Actor.open(config(case), alone)
    reached = {n.rpartition(".")[2] for n, m in actor.chunks[0].named_modules() if isinstance(m, Linear | LayerNormLinear)}
    assert reached == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_and_offloaded_activations_change_nothing(
    alone: Any, case: cases.Case, in_bf16: Trained, unfused: Trained, recompute: str
) -> None:
    same(trained(alone, config(case, training={"recompute": recompute}), case), in_bf16)
    same(trained(alone, config(case, training={"recompute": recompute, "offload_activations": True}), case), unfused)


def test_activations_leave_the_gpu(alone: Any) -> None:
    from tepo_megatron.actor.offload import HostActivations

    weight = torch.nn.Parameter(torch.randn(1024, 1024, device=DEVICE))
    held, gradients = [], []
    for context in (torch.enable_grad(), HostActivations([torch.nn.ParameterList([weight])], DEVICE)):
        x = torch.randn(16384, 1024, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
        with context:
            for _ in range(4):
                x = torch.nn.functional.gelu(x @ weight / 32)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated(DEVICE))
            x.sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
        weight.grad = None
        del x
    assert torch.equal(*gradients) and held[1] < held[0] - 4 * 2**26


@needs("transformer_engine")
@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 1e-2),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}, 1e-1),
        ({"optimizer_offload_fraction": 0.5}, 1e-3),
        ({"optimizer_offload_fraction": 1}, 1e-3),
    ],
)
def test_moments_and_masters_elsewhere_take_nearly_the_same_step(
    alone: Any, case: cases.Case, in_bf16: Trained, keys: dict[str, Any], tolerance: float
) -> None:
    found = trained(alone, config(case, megatron={"optimizer": keys}), case)
    assert found.norm == pytest.approx(in_bf16.norm, rel=1e-4)
    assert max(apart(x, y) for x, y in zip(found.weights, in_bf16.weights, strict=True)) < tolerance


@needs("fused_weight_gradient_mlp_cuda")
def test_fused_gradient_accumulation_adds_up_the_same(alone: Any, case: cases.Case, in_bf16: Trained) -> None:
    found = trained(alone, config(case, megatron={"transformer": {"gradient_accumulation_fusion": True}}), case)
    assert all(apart(found.gradients[name], g) < 1e-2 for name, g in in_bf16.gradients.items())


def _adam(name: str) -> Any:
    if name == "transformer_engine":
        from transformer_engine.pytorch.optimizers import FusedAdam
    else:
        from apex.optimizers import FusedAdam
    return FusedAdam


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_fused_adam_steps_as_this_packages(name: str) -> None:
    from tepo_megatron.dist.platform.mcore import HostAdam

    if name not in FOUND or (name == "apex" and "amp_C" not in FOUND):
        pytest.skip(f"{name} is not installed")
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.to(DEVICE))
    a, b = HostAdam([ours], **settings), _adam(name)([theirs], adam_w_mode=True, **settings)
    for i in range(20):
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(i + 1))
        ours.grad, theirs.grad = gradient.clone(), gradient.to(DEVICE)
        a.step()
        b.step()
    assert apart(theirs.cpu(), ours) < 1e-6


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_norms_are_the_plain_one(name: str, dtype: torch.dtype) -> None:
    from megatron.core.transformer import TransformerConfig

    from tepo_megatron.actor.layer_spec import ApexRMSNorm, RMSNorm

    if importlib.util.find_spec(name) is None or (name == "apex" and "fused_layer_norm_cuda" not in FOUND):
        pytest.skip(f"{name} is not installed")
    config = TransformerConfig(
        num_layers=1, hidden_size=512, num_attention_heads=4, params_dtype=dtype, normalization="RMSNorm"
    )
    if name == "apex":
        norm: Any = ApexRMSNorm(config, 512, eps=1e-6)
    else:
        from transformer_engine.pytorch import RMSNorm as EngineRMSNorm

        norm = EngineRMSNorm(512, eps=1e-6, params_dtype=dtype)
    ours, theirs = RMSNorm(config, 512, eps=1e-6).to(DEVICE), norm.to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, upstream = (torch.randn(64, 512, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
    results = []
    for module in (ours, theirs):
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, 512))
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(upstream)
        results.append((out, leaf.grad, module.weight.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert all(apart(a, b) < tolerance for a, b in zip(*results, strict=True))
