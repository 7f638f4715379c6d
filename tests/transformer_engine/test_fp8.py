"""The FP8 presets: training steps with real FP8 roundings, and the FP8 copies of weights that leave with the parameters."""

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.types import TrainBatch
from tepo_megatron.config import Config
from tests.parallel import cases
from tests.transformer_engine import models
from tests.worlds import run_world

FP8 = ("fp8-current", "fp8-blockwise")
SEVERAL = {"max_tokens_per_microbatch": 128}  # two microbatches and more


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both models, with weights as small as those of a new model, so that rounding does not grow from layer to layer."""
    folder = tmp_path_factory.mktemp("models")
    return {name: models.write(name, folder, scale=1.0) for name in models.MODELS}


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainBatch, ...]:
    return cases.make_case(tmp_path_factory.mktemp("case"), tied=False).batches


def _actor(cfg: Config) -> Any:
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    return models.actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))


def _train(rank: int, cfg: Config, batches: tuple[TrainBatch, ...]) -> list[dict[str, Any]]:
    return cases.steps_of(_actor(cfg), batches)


LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {  # model, layout, weights' gradients added inside of the product
    "DP2": ("qwen3", {"dp": 2}, False),
    "TP2+SP": ("qwen3", {"tp": 2, "sequence_parallel": True}, True),
    "EP2": ("qwen3_moe", {"dp": 2, "ep": 2}, True),
}
# The all-gather of blockwise activations under sequence parallelism is one coalesced operation, which gloo does not have.
CASES = [(layout, precision) for layout in LAYOUTS for precision in FP8 if (layout, precision) != ("TP2+SP", "fp8-blockwise")]


@pytest.fixture(scope="module")
def exact(paths: dict[str, Path], batches: tuple[TrainBatch, ...]) -> Callable[[str], list[Any]]:
    """The steps of a layout in fp32, without Transformer Engine."""

    @functools.cache
    def of(layout: str) -> list[Any]:
        name, parallel, _ = LAYOUTS[layout]
        return run_world(2, _train, models.config(paths[name], parallel, "fp32", "cpu"), batches)

    return of


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_gradients_are_those_of_fp32_to_the_rounding_of_fp8(
    paths: dict[str, Path], batches: tuple[TrainBatch, ...], exact: Callable[[str], list[Any]], layout: str, precision: str
) -> None:
    """Compare the norms over all gradients.

    bf16 differs by 0.01 to 0.03, FP8 by 0.1 to 0.25, and a scale that ranks do not share by 0.5.
    """
    name, parallel, fused = LAYOUTS[layout]
    found = run_world(2, _train, models.config(paths[name], parallel, precision, fused=fused, training=SEVERAL), batches)
    for step in range(cases.STEPS):
        expected = {n: t for rank in exact(layout) for n, t in rank[step]["gradients"].items()}
        gradients = {n: t for rank in found for n, t in rank[step]["gradients"].items()}
        assert gradients.keys() == expected.keys()
        square = sum(float((gradients[n].double() - t.double()).norm()) ** 2 for n, t in expected.items())
        assert 0.05 < square**0.5 / exact(layout)[0][step]["grad_norm"] < 0.3


def _buffers(actor: Any) -> Iterator[torch.Tensor]:
    """The tensors inside of all FP8 copies of weights."""
    for module in models.linear_modules(actor.chunks):
        for workspace in module._fp8_workspaces.values():
            inner = (getattr(workspace, attribute) for attribute, _ in workspace._INNER_TENSORS)
            yield from (tensor for tensor in inner if tensor is not None)


def _casts(actor: Any) -> Counter[str]:
    """Count from now on how often each weight is cast to FP8, by name."""
    import transformer_engine_torch as tex

    counts, quantize = Counter[str](), tex.quantize

    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        counts.update(b.name for b in actor.bindings if b.parameter.data_ptr() == tensor.data_ptr())
        return quantize(tensor, *args)

    tex.quantize = counted
    return counts


def _workspaces(rank: int, cfg: Config, batches: tuple[TrainBatch, ...], offloads: bool) -> dict[str, Any]:
    """An old pass and an update for each batch; with the parameters away in between, and their FP8 copies dropped with them."""
    import transformer_engine.pytorch.module.base as base

    from tepo_megatron.losses import build_objective

    actor, objective = _actor(cfg), build_objective(cfg.objective)
    models.frees_memory(actor)
    counts = _casts(actor)
    found: dict[str, Any] = {"passes": [], "values": []}
    layers = (".linear_", ".in_proj.", ".out_proj.")
    linear = {b.name for b in actor.bindings if any(x in b.name for x in layers) and not b.name.endswith("norm_weight")}
    parameters = sum(b.parameter.numel() for b in actor.bindings if b.name in linear)

    def leave(copies: int) -> None:
        found["passes"].append(dict(counts))
        counts.clear()
        assert all(len(m._fp8_workspaces) > 0 for m in models.linear_modules(actor.chunks))
        if not offloads:
            return
        assert copies <= sum(t.nbytes for t in _buffers(actor)) / parameters < copies + 0.01
        alive = [weakref.ref(t) for t in _buffers(actor)]
        actor.offload("gradients", "optimizer")
        assert all(t() is not None for t in alive)
        actor.offload("parameters")
        gc.collect()
        assert not any(m._fp8_workspaces for m in models.linear_modules(actor.chunks)) and all(t() is None for t in alive)
        assert not base._dummy_wgrads
        actor.load()

    for step, batch in enumerate(batches):
        stats = actor.attach_old_stats(batch)
        found["values"].append(stats.old_logprobs_N.clone())
        leave(1)  # for the forward pass
        actor.start_step(step + 1)
        actor.update(batch, objective)
        assert base._dummy_wgrads, "nothing would be dropped"
        leave(2)  # and one for the backward pass
    found["linear"] = linear
    found["values"] += [b.parameter.detach().clone() for b in actor.bindings]
    return found


@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("name", models.MODELS)
def test_fp8_copies_of_weights_leave_with_the_parameters(
    paths: dict[str, Path], batches: tuple[TrainBatch, ...], name: str, precision: str
) -> None:
    """They are made in the first microbatch of every pass, so never those of older weights; dropping them changes no bit."""
    cfg = models.config(paths[name], {}, precision, training={"max_tokens_per_microbatch": 64})
    straight, offloaded = (run_world(1, _workspaces, cfg, batches, offloads)[0] for offloads in (False, True))
    assert len(straight["passes"]) == 2 * len(batches)
    for run in (straight, offloaded):
        for counts in run["passes"]:
            assert counts == dict.fromkeys(run["linear"], 1)
    assert all(torch.equal(a, b) for a, b in zip(straight["values"], offloaded["values"], strict=True))
