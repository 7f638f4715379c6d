"""Training steps through Transformer Engine's and Megatron-Core's Python, with everything on that `platform: cuda` turns on.

The kernels are those of host_kernels.py. So these tests show that the gradients of Transformer Engine's modules reach
`main_grad` once, under overlapped reduction and gathering too, and that its FusedAdam gets what it needs; they show nothing of
the kernels of a GPU.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.base.types import TrainBatch
from tepo_megatron.config import Config
from tests.parallel import cases
from tests.tiny import hybrid_config
from tests.transformer_engine import models
from tests.worlds import run_world

INSIDE, HOOK = True, False  # who adds weights' gradients: the product, or the data-parallel hook
LAYOUTS = [  # embeddings, layout, tokens of a microbatch, who adds
    ("tied", "1 rank", 4096, HOOK), ("untied", "1 rank", 80, INSIDE), ("untied", "TP2+SP", 80, INSIDE),
    ("tied", "PP2", 90, HOOK), ("tied", "PP2", 90, INSIDE), ("untied", "DP2", 50, HOOK), ("tied", "DP2 TP2", 60, INSIDE),
    ("untied", "PP2 VPP2", 100, INSIDE), ("hybrid", "1 rank", 80, INSIDE), ("hybrid", "TP2+SP", 80, INSIDE),
    ("hybrid", "PP2 VPP2", 100, HOOK),
]  # fmt: skip
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Case]:
    """The case of `tests/parallel`, with tied and with untied embeddings, and of a hybrid."""
    folder = tmp_path_factory.mktemp("case")
    made = {name: cases.make_case(folder / name, tied=name == "tied") for name in ("tied", "untied")}
    config = hybrid_config(vocab_size=cases.VOCAB)
    return made | {"hybrid": cases.make_case(folder / "hybrid", tied=False, config=config)}


def _train(rank: int, cfg: Config, batches: tuple[TrainBatch, ...], change: Change | None = None) -> list[dict[str, Any]]:
    """Return the steps of an actor as on GPUs; `change` is applied to the actor first."""
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    actor = models.actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))
    if cfg.platform == "cuda":
        _check_that_it_is_as_on_gpus(actor)
        fused = {module.fuse_wgrad_accumulation for module in models.linear_modules(actor.chunks)}
        assert fused == {cfg.megatron.fuses_gradient_accumulation("cuda", cfg.training.offload_activations)}
    if change is not None:
        change(actor)
    steps = cases.steps_of(actor, batches)
    parallel.shutdown()
    return steps


def _keys(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens_per_microbatch": max_tokens}


def _check_that_it_is_as_on_gpus(actor: Any) -> None:
    """Overlap in both directions, a distributed optimizer, and inside of it Transformer Engine's FusedAdam."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from transformer_engine.pytorch.optimizers import FusedAdam

    for chunk in actor.chunks:
        ddp = chunk.ddp_config
        assert ddp.use_distributed_optimizer and ddp.overlap_grad_reduce and ddp.overlap_param_gather
    optimizers = [o for o in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]) if not o.is_stub_optimizer]
    assert optimizers
    for optimizer in optimizers:
        assert type(optimizer) is DistributedOptimizer and type(optimizer.optimizer) is FusedAdam


@pytest.mark.parametrize(("embeddings", "layout", "max_tokens", "fused"), LAYOUTS)
def test_layout_equals_reference(
    made: dict[str, cases.Case], embeddings: str, layout: str, max_tokens: int, fused: bool
) -> None:
    """Two steps in fp32, in one and in several microbatches: loss, gradient norm, every gradient and every weight."""
    case = made[embeddings]
    cfg = models.config(case.model, cases.LAYOUTS[layout], "fp32", fused=fused, training=_keys(max_tokens))
    ranks = run_world(cfg.parallel.world_size, _train, cfg, case.batches)
    cases.compare(ranks, case.steps, partial(cases.reference_steps, case.model, case.batches, torch.float32))


@pytest.mark.parametrize(("embeddings", "layout"), [("tied", "DP2"), ("untied", "DP2")])
def test_output_layer_in_chunks(made: dict[str, cases.Case], embeddings: str, layout: str) -> None:
    """Its weight's gradient is added to `main_grad` by this package, next to what Transformer Engine's modules add."""
    case, keys = made[embeddings], _keys(80) | {"logits_budget_mib": 0}
    cfg = models.config(case.model, cases.LAYOUTS[layout], "fp32", training=keys)
    cases.compare(run_world(cfg.parallel.world_size, _train, cfg, case.batches), case.steps)


def _straight(rank: int, cfg: Config, batches: tuple[TrainBatch, ...]) -> dict[str, torch.Tensor]:
    """The weights after all steps, none of which is looked at in between."""
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate
    from tepo_megatron.losses import build_objective

    actor = models.actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))
    actor.start_step(1)
    for batch in batches:
        actor.update(batch, build_objective(cfg.objective))
    actor.finish_step()
    weights = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
    parallel.shutdown()
    return weights


def test_the_forward_pass_gathers_what_the_last_update_left(made: dict[str, cases.Case]) -> None:
    """Reading weights between two updates would gather them, and hide a forward pass that does not."""
    case = made["untied"]
    cfg = models.config(case.model, {"dp": 2}, "fp32", training={"max_tokens_per_microbatch": 50})
    weights = run_world(2, _straight, cfg, case.batches)[0]
    for name, expected in case.steps[-1].weights.items():
        assert cases.distance(weights[name], expected) <= cases.TOLERANCE, name


def test_bf16_is_as_near_to_the_reference_as_without_it(made: dict[str, cases.Case]) -> None:
    """The distance is the norm over all gradients; recomputation changes no bit of them."""
    case, apart = made["untied"], {}
    for platform, recompute, fused in (
        ("cpu", "none", HOOK), ("cuda", "none", HOOK), ("cuda", "none", INSIDE), ("cuda", "selective", INSIDE),
        ("cuda", "full", INSIDE),
    ):  # fmt: skip
        cfg = models.config(case.model, {"dp": 2}, "bf16", platform, fused, training={"recompute": recompute})
        found = run_world(2, _train, cfg, case.batches[:1])[0][0]
        expected = case.steps[0].gradients
        assert found["gradients"].keys() == expected.keys()
        square = sum((found["gradients"][n].double() - t).norm() ** 2 for n, t in expected.items())
        apart[platform, recompute, fused] = float(square) ** 0.5 / case.steps[0].grad_norm
    plain = apart.pop(("cpu", "none", HOOK))
    assert all(0 < distance < 1.5 * plain for distance in apart.values())
    assert len({distance for (_, _, fused), distance in apart.items() if fused is INSIDE}) == 1


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=["EP2", "TP2+SP"])
def test_experts_train_as_without_it(made: dict[str, cases.Case], tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Grouped products against one product for each expert; layers with and without experts."""
    model, batches, tokens = models.write("qwen3_moe", tmp_path), made["untied"].batches, _keys(80)
    plain = run_world(2, _train, models.config(model, parallel, "fp32", "cpu", training=tokens), batches)
    for fused in (HOOK, INSIDE):
        found = run_world(2, _train, models.config(model, parallel, "fp32", fused=fused, training=_keys(80)), batches)
        for ours, theirs in zip(found, plain, strict=True):
            for step, expected in zip(ours, theirs, strict=True):
                assert step["loss"] == pytest.approx(expected["loss"], rel=cases.TOLERANCE)
                assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=cases.TOLERANCE)
                assert step["weights"].keys() == expected["weights"].keys()
                for name, weight in expected["weights"].items():
                    assert cases.distance(step["weights"][name], weight) <= cases.TOLERANCE, name


def _offloading(actor: Any) -> None:
    """Free the memory of all parts before the steps, and after each, and put it back."""
    models.frees_memory(actor)
    update = actor.update

    def update_and_leave(*args: Any) -> Any:
        actor.offload()
        actor.load()
        result = update(*args)
        actor.offload("gradients", "optimizer")
        actor.offload("parameters")
        actor.load()
        return result

    actor.update = update_and_leave


def test_offloading_changes_no_bit(made: dict[str, cases.Case]) -> None:
    case = made["untied"]
    cfg = models.config(case.model, {"dp": 2}, "bf16", training={"max_tokens_per_microbatch": 80})
    straight, offloaded = (run_world(2, _train, cfg, case.batches, change) for change in (None, _offloading))
    for step, expected in zip(offloaded[0], straight[0], strict=True):
        assert step["loss"] == expected["loss"] and step["grad_norm"] == expected["grad_norm"]
        assert all(torch.equal(step["weights"][name], weight) for name, weight in expected["weights"].items())
