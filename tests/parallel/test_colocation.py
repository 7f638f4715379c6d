"""Trainer and engine in turns on one device: runs are bit for bit those without it, and nobody comes before the other went."""

from pathlib import Path
from typing import Any

import pytest

from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill

pytestmark = pytest.mark.slow


def run(model: Path, folder: Path, *kills: Kill, **sections: Any) -> w.Outcome:
    """Run with kills; return the outcome without the measurements of memory."""
    journal = folder / "journal"
    folder.mkdir()
    cfg = w.run_config(model, folder, parallel={"tp": 2}, checkpoint={"every": 2}, **sections)
    w.lineage(cfg, journal, *kills)
    outcome = w.outcome(cfg, journal)
    for record in outcome.records:
        for key in [key for key in record if key.startswith("memory/")]:
            del record[key]
    return outcome


@pytest.fixture(scope="module")
def apart(model: Path, tmp_path_factory: pytest.TempPathFactory) -> w.Outcome:
    """The run whose engine has a device of its own."""
    return run(model, tmp_path_factory.mktemp("apart") / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    "kill",
    [
        Kill("tepo_megatron.checkpoint.checkpoints:Checkpoints.save", step=4, after=True),
        Kill("tepo_megatron.trainer.placement:Colocated.train", step=4, call=1),
        Kill("tepo_megatron.sync.push:WeightSync.push", step=3, rank=1),
    ],
    ids=str,
)
def test_a_killed_colocated_run_resumes(model: Path, apart: w.Outcome, tmp_path: Path, kill: Kill) -> None:
    w.assert_same(run(model, tmp_path / "run", kill, rollout={"colocate": True}), apart)
