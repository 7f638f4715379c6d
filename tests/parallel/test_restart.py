"""Ranks that are killed go on from the newest checkpoint; what was sampled is used, once; the end is that of a run without kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill, Outcome
from tests.parallel.restart_worlds import restarted

pytestmark = pytest.mark.slow
CHECKPOINT = "tepo_megatron.checkpoint."
PLACES = (
    "tepo_megatron.controller.schedule:Schedule.next_batch",
    "tepo_megatron.controller.batch_receiver:BatchReceiver.receive",
    "tepo_megatron.actor.actor:Actor.attach_old_stats",
    "tepo_megatron.actor.actor:Actor.update",
    "tepo_megatron.platform.adam:HostAdam._update",
    "tepo_megatron.weight_sync.sync:WeightSync.push",
    "tepo_megatron.weight_sync.stores:FileTransport.stage",
    "tepo_megatron.controller.schedule:Schedule.evaluate",
    CHECKPOINT + "checkpoints:Checkpoints.save",
    CHECKPOINT + "tensors:HostCopy.take",
    CHECKPOINT + "saving:write_items",
    CHECKPOINT + "saving:write_manifest",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return w.write_inputs(tmp_path_factory.mktemp("inputs") / "model")


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """The run that nobody kills, by tp."""
    return w.undisturbed(model, lambda: tmp_path_factory.mktemp("straight"))


def test_kills_one_after_the_other_change_nothing(straight: Callable[[int], Outcome], model: Path, tmp_path: Path) -> None:
    cfg = w.run_config(model, tmp_path, checkpoint={"every": 2})
    restarted(
        cfg,
        tmp_path / "journal",
        Kill("tepo_megatron.actor.actor:Actor.update", step=1, call=2),  # before the first checkpoint
        Kill("tepo_megatron.weight_sync.sync:WeightSync.push", step=2, after=True),
        Kill("tepo_megatron.actor.actor:Actor.update", step=4),  # steps 3 and 4 are repeated
    )
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), straight(1))


@pytest.mark.full
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_kill_at_any_place_changes_nothing(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path, where: str, tp: int
) -> None:
    """Kill the last rank before the call in step 4, and after the call in the second take of the step."""
    cfg = w.run_config(model, tmp_path, parallel={"tp": tp}, checkpoint={"every": 2})
    only_main = where.endswith("write_manifest")
    kills = [Kill(where, 4, rank=0 if only_main else tp - 1), Kill(where, 4, rank=0 if only_main else tp - 1, after=True)]
    restarted(cfg, tmp_path / "journal", *kills)
    w.assert_same(w.outcome(cfg, tmp_path / "journal"), straight(tp))
