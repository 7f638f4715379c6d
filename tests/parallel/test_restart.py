"""Ranks that are killed go on from the newest checkpoint, and the run ends like one without kills. No sample is lost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.command.replay import ReplayRequest, replay
from tepo_megatron.config import Config
from tepo_megatron.monitor import run_dir
from tepo_megatron.rollout.decisions import read_history
from tests.parallel import resume_worlds as w
from tests.parallel.restart_worlds import restarted
from tests.parallel.resume_worlds import Kill, Outcome
from tests.worlds import run_world

pytestmark = pytest.mark.slow
CHECKPOINT = "tepo_megatron.checkpoint."
PLACES = (
    "tepo_megatron.trainer.schedule:Schedule.next_parts",
    "tepo_megatron.trainer.batch_receiver:BatchReceiver.receive",
    "tepo_megatron.actor.actor:Actor.attach_old_stats",
    "tepo_megatron.actor.actor:Actor.update",
    "tepo_megatron.dist.platform.mcore:HostAdam._update",
    "tepo_megatron.sync.push:WeightSync.push",
    "tepo_megatron.sync.stores:FileTransport.stage",
    "tepo_megatron.trainer.schedule:Schedule.evaluate",
    CHECKPOINT + "checkpoints:Checkpoints.save",
    CHECKPOINT + "tensors:HostCopy.take",
    CHECKPOINT + "saving:write_items",
    CHECKPOINT + "saving:write_manifest",
)


@pytest.mark.full
def test_kills_one_after_the_other_change_nothing(straight: Callable[[int], Outcome], model: Path, tmp_path: Path) -> None:
    cfg = w.run_config(model, tmp_path, checkpoint={"every": 2})
    restarted(
        cfg,
        tmp_path / "journal",
        Kill("tepo_megatron.actor.actor:Actor.update", step=1, call=2),  # before the first checkpoint
        Kill("tepo_megatron.sync.push:WeightSync.push", step=2, after=True),
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


AHEAD = {"max_staleness": 1, "record": True}


@pytest.fixture(scope="module")
def straight_ahead(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that samples one step ahead, which nobody kills."""
    folder = tmp_path_factory.mktemp("ahead")
    cfg = w.run_config(model, folder, rollout=AHEAD)
    w.attempt(cfg, folder / "journal")
    return w.outcome(cfg, folder / "journal")


def ahead_of(record: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the gate could not compare, because the ranks that had the weights were killed."""
    return {key: value for key, value in record.items() if not key.startswith("gate/")}


@pytest.mark.full
@pytest.mark.parametrize(
    "where",
    [
        "tepo_megatron.actor.actor:Actor.update",
        "tepo_megatron.trainer.schedule:Schedule.next_parts",
        "tepo_megatron.sync.push:WeightSync.push",
        CHECKPOINT + "checkpoints:Checkpoints.save",
        CHECKPOINT + "saving:write_manifest",
    ],
)
def test_a_kill_one_step_ahead_changes_nothing(straight_ahead: Outcome, model: Path, tmp_path: Path, where: str) -> None:
    """The samples taken ahead are trained on. Only tokens of versions that nobody has any more are not compared."""
    cfg = w.run_config(model, tmp_path, rollout=AHEAD, checkpoint={"every": 2})
    restarted(cfg, tmp_path / "journal", Kill(where, 4), Kill(where, 4, after=True))
    made = w.outcome(cfg, tmp_path / "journal")
    assert [ahead_of(r) for r in made.records] == [ahead_of(r) for r in straight_ahead.records]
    shares = {record["step"]: record["gate/compared_share"] for record in made.records}
    assert all(shares[step] == 1.0 for step in (1, 2, 4)), shares  # 3 and 5 follow a checkpoint
    w.assert_same(replace(made, records=straight_ahead.records), straight_ahead)


@pytest.mark.parametrize(
    "where",
    [
        "tepo_megatron.actor.actor:Actor.update",
        pytest.param("tepo_megatron.sync.push:WeightSync.push", marks=pytest.mark.full),
    ],
)
def test_ranks_that_share_the_devices_are_restarted(
    straight: Callable[[int], Outcome], model: Path, tmp_path: Path, where: str
) -> None:
    cfg = w.run_config(model, tmp_path, rollout={"colocate": True}, checkpoint={"every": 2})
    restarted(cfg, tmp_path / "journal", Kill(where, 3), Kill(where, 4, after=True))
    made, expected = w.outcome(cfg, tmp_path / "journal"), straight(1)
    memory = {key for record in made.records for key in record if key.startswith("memory/")}
    assert memory
    records = [{key: value for key, value in record.items() if key not in memory} for record in made.records]
    w.assert_same(replace(made, records=records), expected)


def test_ranks_are_restarted_with_another_mesh(model: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks become one; the run can be repeated from its recordings bit for bit."""
    two = w.run_config(model, tmp_path, parallel={"dp": 2}, rollout={"record": True}, checkpoint={"every": 2})
    one = replace(two, parallel=replace(two.parallel, dp=1))
    kill = Kill("tepo_megatron.actor.actor:Actor.update", 4)
    restarted(two, tmp_path / "journal", kill, configs=(two, one))
    assert [record["step"] for record in w.records(two.run_dir)] == list(range(1, w.STEPS + 1))
    history = read_history(two.run_dir)
    assert [(after, config["parallel"]["dp"]) for after, config in history.starts] == [(0, 2), (2, 1)] and not history.faults
    assert list(history.steps) == list(range(1, w.STEPS + 1))
    seeds = [row["seed"] for row in w.journal_rows(tmp_path / "journal") if "seed" in row]
    evaluation = derive_seed(two.seed, "evaluation")
    assert len({seed for seed in seeds if seed != evaluation}) == len([seed for seed in seeds if seed != evaluation])

    def again(cfg: Config) -> None:
        run_dir.prepare(cfg)
        run_world(cfg.parallel.world_size, w.run_rank, cfg, tmp_path / "again", 0, None, timeout=120.0)

    lines: list[str] = []
    assert replay(ReplayRequest(two.run_dir), lines.append, again) == 0, lines
