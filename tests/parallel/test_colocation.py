"""Trainer and engine in turns on one device: runs are bit for bit those without it, and nobody comes before the other went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill

pytestmark = pytest.mark.slow
LAYOUT = {"tp": 2}


def run(model: Path, folder: Path, *kills: Kill, **sections: Any) -> tuple[w.Outcome, list[dict[str, Any]], str]:
    """Run with kills; return the outcome, the memory measurements by step, and the log."""
    journal = folder / "journal"
    folder.mkdir()
    cfg = w.run_config(model, folder, parallel=LAYOUT, checkpoint={"every": 2}, **sections)
    w.lineage(cfg, journal, *kills)
    made = w.outcome(cfg, journal)
    memory = [{k: r.pop(k) for k in list(r) if k.startswith("memory/")} for r in made.records]
    return made, memory, (cfg.run_dir / "log.txt").read_text()


@pytest.fixture(scope="module")
def apart(model: Path, tmp_path_factory: pytest.TempPathFactory) -> w.Outcome:
    made, memory, log = run(model, tmp_path_factory.mktemp("apart") / "run")
    assert not any(memory) and "memory, GiB" not in log
    return made


def test_a_colocated_run_equals_the_disaggregated_one(model: Path, apart: w.Outcome, tmp_path: Path) -> None:
    """Evaluations and checkpoints are both due after steps 2 and 4."""
    made, memory, log = run(model, tmp_path / "run", rollout={"colocate": True})
    w.assert_same(made, apart)
    for step in memory:
        assert step.keys() == {
            f"memory/{phase}_{name}"
            for phase in ("generate", "train")
            for name in ("held", "peak", "used", "device", "servers")
        }
        for phase in ("generate", "train"):
            assert 0.05 < step[f"memory/{phase}_held"] <= step[f"memory/{phase}_peak"] < 10
            assert step[f"memory/{phase}_servers"] == 2**-10
            assert step[f"memory/{phase}_used"] is None and step[f"memory/{phase}_device"] is None
    table = log[log.index("memory, GiB") :].splitlines()
    assert table[0].split() == ["memory,", "GiB", "generate", "held", "generate", "peak", "train", "held", "train", "peak"]
    assert [row.split()[:2] for row in table[1:3]] == [["rank", "0"], ["rank", "1"]] and table[3].split()[0] == "servers"
    assert "it sleeps while the actor is built" in log


@pytest.mark.full
@pytest.mark.parametrize(
    "kill",
    [
        Kill("tepo_megatron.checkpoint.checkpoints:Checkpoints.save", step=4, after=True),
        Kill("tepo_megatron.controller.placement:Colocated.train", step=4, call=1),
        Kill("tepo_megatron.weight_sync.sync:WeightSync.push", step=3, rank=1),
    ],
    ids=str,
)
def test_a_killed_colocated_run_resumes(model: Path, apart: w.Outcome, tmp_path: Path, kill: Kill) -> None:
    made, _, _ = run(model, tmp_path / "run", kill, rollout={"colocate": True})
    w.assert_same(made, apart)
