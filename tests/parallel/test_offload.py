"""Parts of an actor that leave the device, their memory with them, and come back: bit for bit, on several layouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo_megatron.actor.offload import ON_CPU, ON_CUDA, PARTS, Offloader, Part
from tepo_megatron.base.types import TrainBatch
from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tests.marks import full_but
from tests.parallel import cases
from tests.parallel.cases import open_actor
from tests.worlds import run_world

LAYOUTS: dict[str, dict[str, Any]] = {"TP2": {"tp": 2, "sequence_parallel": True}, "PP2": {"pp": 2}, "DP2": {"dp": 2}}
CPU = torch.device("cpu")
SLOW = [("DP2", "bf16", "cuda")]
CASES = [(a, b, c) for a in LAYOUTS for b in ("fp32", "bf16") for c in ("cpu", "cuda")]


def config(model: Path, layout: str, precision: str) -> Config:
    tree = plain(cases.run_config(model, LAYOUTS[layout]))
    tree["model"]["precision"] = precision
    return validate(tree)


def offloads(actor: Any, targets: str) -> None:
    """Have the actor offload as on that platform; on "cuda", to a second copy in host memory, whose first is really freed."""
    actor.offloader = Offloader(actor.chunks, actor.optimizer, CPU, {"cpu": ON_CPU, "cuda": ON_CUDA}[targets])


def sizes(actor: Any, part: Part) -> list[int]:
    """Bytes of every tensor's storage, found from the model and the optimizer instead of from Megatron's buffers."""
    parameters = [p for chunk in actor.chunks for p in chunk.parameters()]
    if part == "gradients":
        return [p.main_grad.untyped_storage().size() for p in parameters]
    if part == "parameters":
        return [b.parameter.untyped_storage().size() for b in actor.bindings]
    mine = {p.untyped_storage()._cdata for p in parameters}
    state = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])[0].optimizer.state
    found = [t for main, moments in state.items() for t in (main, moments["exp_avg"], moments["exp_avg_sq"])]
    return [t.untyped_storage().size() for t in found if t.untyped_storage()._cdata not in mine]


def trained(rank: int, cfg: Config, batches: Sequence[TrainBatch], targets: str | None) -> dict[str, Any]:
    """Losses, gradient norms, weights and moments of some updates; with parts offloaded and loaded before and after each."""
    from tepo_megatron.losses import build_objective

    actor, objective = open_actor(cfg), build_objective(cfg.objective)
    if targets is not None:
        offloads(actor, targets)
        actor.offload()  # before there are moments
        actor.load()
    actor.start_step(1)
    losses = []
    for batch in batches:
        result = actor.update(batch, objective)
        losses.append((result.metrics["loss/total"], result.metrics["actor/grad_norm"]))
        if targets is not None:
            _round_trip(actor, targets)
    shards = [
        {k: v.clone() for k, v in {"weight": shard.weight, **shard.state}.items()} for shard in _shards(actor)
    ]  # the moments too
    return {"losses": losses, "weights": [b.parameter.detach().clone() for b in actor.bindings], "shards": shards}


def _shards(actor: Any) -> list[Any]:
    from tepo_megatron.checkpoint.optimizer import shards

    return list(shards(actor.optimizer))


def _round_trip(actor: Any, targets: str) -> None:
    """Offload and load in the order of a run.

    Gradients and optimizer leave, then the parameters; the parameters come back and leave again alone; then all come back.
    """
    gone: dict[Part, bool] = {part: targets == "cuda" or part == "gradients" for part in PARTS}
    full = {part: sizes(actor, part) for part in PARTS}
    assert all(min(full[part]) > 0 for part in PARTS)
    actor.offload("gradients", "optimizer")
    assert sizes(actor, "parameters") == full["parameters"]
    with pytest.raises(RuntimeError, match="a checkpoint needs the optimizer, which are offloaded; load them first"):
        actor.require_loaded("a checkpoint", "parameters", "optimizer")
    with pytest.raises(RuntimeError, match="offloading needs the gradients"):
        actor.offload("gradients")
    actor.offload("parameters")
    for part in PARTS:
        assert sizes(actor, part) == ([0] * len(full[part]) if gone[part] else full[part]), part
    host = actor.offloader.host_bytes
    assert (host > 0) == (targets == "cuda")
    actor.load("parameters")
    actor.offload("parameters")
    actor.load()
    assert actor.offloader.host_bytes == host, "the memory of the copies is used again"
    assert {part: sizes(actor, part) for part in PARTS} == full
    assert all(not p.main_grad.any() for chunk in actor.chunks for p in chunk.parameters())


@pytest.mark.parametrize(("layout", "precision", "targets"), full_but([], SLOW, CASES))
def test_training_goes_on_as_if_nothing_had_left(case: cases.Case, layout: str, precision: str, targets: str) -> None:
    cfg = config(case.model, layout, precision)
    batches = case.batches * 2
    straight = run_world(2, trained, cfg, batches, None)
    offloaded = run_world(2, trained, cfg, batches, targets)
    for there, here in zip(offloaded, straight, strict=True):
        assert there["losses"] == here["losses"]
        for a, b in zip(there["weights"], here["weights"], strict=True):
            assert torch.equal(a, b)
        assert len(there["shards"]) == len(here["shards"]) > 0
        for x, y in zip(there["shards"], here["shards"], strict=True):
            assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
