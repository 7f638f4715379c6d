"""The checkpoint of an actor with Transformer Engine has the right tensors, and a fresh actor continues from it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.checkpoint import optimizer, state
from tepo_megatron.config import Config
from tests.parallel import cases
from tests.transformer_engine import models
from tests.worlds import run_world

# The norm before experts: Megatron's layers without Transformer Engine store it under the name of the norm that Transformer
# Engine fuses into the first linear layer of a dense MLP, though experts have no such layer.
PLAIN_NAME_OF_THE_EXPERTS_NORM = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
Content = dict[str, Any]


def _content(rank: int, cfg: Config, batches: tuple[Any, ...] = ()) -> Content:
    """Return the content of the checkpoint after some updates, and the bits of the next update.

    The keys are "shard slices", "objects", "common" and "wanted".
    """
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    actor = models.actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))
    if batches:
        cases.steps_of(actor, batches[:1])
    found: Content = {
        "shard slices": [(b.name, b.shape, b.offset, b.data.clone()) for b in state.saved_slices(actor)],
        "objects": {name: type(value) for name, value in state.objects(actor).items()},
        "common": optimizer.common_state(actor.optimizer),
        "count": (optimizer.adam_steps(actor.optimizer), actor.scheduler.num_steps),
    }
    if batches:
        found["next"] = _next(actor, batches)
    found["wanted"] = [(b.name, b.shape) for b in state.loaded_slices(actor)]
    parallel.shutdown()
    return found


def _next(actor: Any, batches: tuple[Any, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """Gradient norm and weights of the second update."""
    from tepo_megatron.losses import build_objective

    result = actor.update(batches[1], build_objective(actor.cfg.objective))
    actor.finish_step()
    weights = cases.owned_tensors(actor, [b.parameter for b in actor.bindings])
    return result.metrics["actor/grad_norm"][0], weights


def _resumed(
    rank: int, cfg: Config, batches: tuple[Any, ...], whole: dict[str, torch.Tensor], adam_steps: tuple[int, int]
) -> Any:
    """The second update of a fresh actor that was given the whole tensors of a checkpoint."""
    from tepo_megatron.dist import parallel
    from tepo_megatron.dist.platform import activate

    actor = models.actor(cfg, parallel.initialize(cfg.parallel, activate("cpu"), cfg.seed))
    for box in state.loaded_slices(actor):
        box.data.copy_(_part(whole[box.name], box.offset, box.data.shape))
    optimizer.set_adam_steps(actor.optimizer, adam_steps[0])
    actor.scheduler.step(increment=adam_steps[1])
    found = _next(actor, batches)
    parallel.shutdown()
    return found


def _part(whole: torch.Tensor, offset: tuple[int, ...], shape: torch.Size) -> torch.Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]


def assembled(ranks: list[Content]) -> dict[str, torch.Tensor]:
    """Return the whole tensors. Fail where the ranks' shard slices leave a gap or overlap."""
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for rank in ranks:
        for name, shape, offset, data in rank["shard slices"]:
            target = whole.setdefault(name, torch.full(shape, math.nan, dtype=data.dtype))
            assert target.shape == shape and target.dtype == data.dtype
            part = _part(target, offset, data.shape)
            assert bool(part.isnan().all()), f"{name}: two shard slices hold the same elements"
            part.copy_(data)
            filled[name] = filled.get(name, 0) + data.numel()
    assert all(filled[name] == tensor.numel() for name, tensor in whole.items())
    return whole


@pytest.mark.parametrize("precision", ["bf16", "fp8-current", "fp8-blockwise"])
@pytest.mark.parametrize("name", models.MODELS)
def test_tensors_are_those_of_an_actor_without_it(tmp_path: Path, name: str, precision: str) -> None:
    """Names, shapes and values, each element once; and "extra states" for Megatron's own loader."""
    path, model = models.write(name, tmp_path), models.MODELS[name]
    te = run_world(model.ranks, _content, models.config(path, model.parallel, precision))
    plain = run_world(model.ranks, _content, models.config(path, model.parallel, "bf16", "cpu"))
    found, expected = assembled(te), assembled(plain)
    if name == "qwen3_moe":
        for layer in (0, 2):
            for prefix in ("", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
                old, new = (f"{prefix}decoder.layers.{layer}.{norm}" for norm in PLAIN_NAME_OF_THE_EXPERTS_NORM)
                expected[new] = expected.pop(old)
    assert found.keys() == expected.keys() and len(found) > 100
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert {n for rank in te for n, _ in rank["wanted"]} == found.keys()
    extra = {key for rank in te for key in rank["objects"]}
    attention, delta_rule = ("linear_qkv", "linear_proj"), ("in_proj", "out_proj")
    linear = [
        f"decoder.layers.{i}.self_attention.{part}._extra_state/shard_0_1"
        for i in range(3)
        for part in (delta_rule if name == "qwen3_5" and i != 1 else attention)
    ]
    assert extra >= set(linear) and all("._extra_state/" in key for key in extra)
    assert all(rank["common"] == {} for rank in te), "before the first step there is nothing to keep"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fresh_actor_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    """It continues from masters, moments and counts of FusedAdam, over two data-parallel ranks."""
    case = cases.make_case(tmp_path, tied=False)
    cfg = models.config(case.model, {"dp": 2}, precision)
    straight = run_world(2, _content, cfg, case.batches)
    for rank in straight:
        parts = rank["common"] if isinstance(rank["common"], list) else [rank["common"]]
        assert all(part["param_state_sharding_type"] == "fully_reshardable" for part in parts)
        assert rank["count"] == (1, 1)
    resumed = run_world(2, _resumed, cfg, case.batches, assembled(straight), straight[0]["count"])
    for (norm, weights), rank in zip(resumed, straight, strict=True):
        assert norm == rank["next"][0]
        assert all(torch.equal(weights[n], weight) for n, weight in rank["next"][1].items())
