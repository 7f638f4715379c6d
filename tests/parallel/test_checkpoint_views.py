"""Data that is kept from one save to the next is never saved where it is no longer the state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import full_but
from tests.parallel import cases
from tests.parallel import checkpoint_worlds as w
from tests.worlds import run_world

pytestmark = pytest.mark.slow


def moments(actor: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of its first parameter."""
    part = actor.optimizer.chained_optimizers[0].optimizer
    return next(iter(part.state.values()))


def no_moments(actor: Any) -> None:
    for part in actor.optimizer.chained_optimizers:
        part.optimizer.state.clear()


def replace_moment(actor: Any) -> None:
    moments(actor)["exp_avg_sq"] = moments(actor)["exp_avg_sq"] + 1


def replace_state(actor: Any) -> None:
    """Replace every dict and tensor of the state, as `load_state_dict` of torch's optimizers does."""
    for part in actor.optimizer.chained_optimizers:
        for main, state in list(part.optimizer.state.items()):
            part.optimizer.state[main] = {name: 2 * value for name, value in state.items()}


def replace_weight(actor: Any) -> None:
    weight = next(actor.chunks[0].module.parameters())
    weight.data = weight.data + 1


def replace_parameter(actor: Any) -> None:
    """The master in a group of the optimizer, with its moments."""
    part = actor.optimizer.chained_optimizers[0].optimizer
    group = next(group for group in part.param_groups if group["params"])
    group["params"][0].data = group["params"][0].data + 1


REPLACED = (replace_moment, replace_state, replace_weight, replace_parameter, no_moments)


def save_and_replace(rank: int, cfg: Any, batch: Any, folder: Path) -> list[tuple[str, bool, bool]]:
    """Return, for each way to replace something, whether it changed the state, and whether the next save holds the state."""
    from tepo_megatron.actor.actor import Actor

    actor, out = cases.open_actor(cfg), []
    another = Actor.open(cfg, actor.groups)

    def loaded() -> list[Any]:
        checkpoints.load(checkpoints.newest(), another)
        return [part[-1] for part in w.parts(another)]

    def saves(name: str, change: Callable[[Any], Any]) -> None:
        before = loaded()
        change(actor)
        checkpoints.save(len(out) + 2, actor, {})
        checkpoints.wait()
        state = [part[-1] for part in w.parts(actor)]  # gives moments to an optimizer without
        out.append((name, not w.same(before, state), w.same(loaded(), state)))

    with w.checkpoints(folder, actor, keep_last=1) as checkpoints:
        checkpoints.save(1, actor, {})  # without moments
        checkpoints.wait()
        no_moments(actor)  # the optimizer makes its own at the first step
        saves("first step", lambda actor: w.update(actor, 1, batch))
        saves("second step", lambda actor: w.update(actor, 2, batch))
        for change in REPLACED:
            saves(change.__name__, change)
    return out


@pytest.mark.parametrize(
    ("precision", "layout"), full_but([("bf16", {})], [], [("bf16", {}), ("bf16", {"dp": 2}), ("fp32", {})]), ids=str
)
def test_what_is_saved_is_the_state_whatever_was_replaced(
    case: cases.Case, tmp_path: Path, precision: str, layout: dict[str, int]
) -> None:
    cfg = w.run_config(case.model, layout, precision)
    for found in run_world(cfg.parallel.world_size, save_and_replace, cfg, case.batches[0], tmp_path):
        assert [name for name, _, same in found if not same] == []
        # in fp32 the master is a view of the weight, and the weight is what is saved
        unchanged = {"replace_parameter"} if precision == "fp32" else set()
        assert {name for name, changed, _ in found if not changed} <= unchanged and len(found) == 2 + len(REPLACED)
