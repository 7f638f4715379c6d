"""Trainer and engine in turns on one device: runs are bit for bit those without it, and nobody comes before the other went."""

from __future__ import annotations

import json
import mmap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.actor.offload import PARTS
from tepo_megatron.config import ParallelConfig
from tepo_megatron.controller.memory_report import MemoryReport
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill
from tests.worlds import run_world

pytestmark = pytest.mark.slow
LAYOUT = {"tp": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return w.write_inputs(tmp_path_factory.mktemp("inputs") / "model")


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


@pytest.mark.full
def test_memory_is_measured_without_colocation_too(model: Path, apart: w.Outcome, tmp_path: Path) -> None:
    made, memory, log = run(model, tmp_path / "run", logging={"memory": True, "noise_floor_every": 2})
    w.assert_same(made, apart)
    assert all(len(step) == 10 for step in memory) and "memory, GiB" in log


@dataclass
class Scribe:
    """A trainer and an engine that only record their calls; the trainer of rank 1 does so after a while."""

    file: Path
    rank: int

    def note(self, what: str) -> None:
        with self.file.open("a") as f:
            f.write(json.dumps([self.rank, what]) + "\n")

    def offload(self, *parts: str) -> None:
        time.sleep(0.2 * self.rank)
        self.note(f"offload {' '.join(parts or PARTS)}")

    def load(self, *parts: str) -> None:
        self.note(f"load {' '.join(parts or PARTS)}")

    def sleep(self, abort: bool = False) -> None:
        time.sleep(0.2)
        self.note("sleep")

    def wake(self, part: str) -> None:
        self.note(f"wake {part}")


def _turns(rank: int, file: Path) -> list[str]:
    from tepo_megatron.controller.placement import Colocated
    from tepo_megatron.distributed import parallel
    from tepo_megatron.platform import activate

    groups = parallel.initialize(ParallelConfig(tp=2), activate("cpu"), 0)
    scribe = Scribe(file, rank)
    turns = Colocated(scribe, scribe if rank == 0 else None, groups)

    def push() -> None:
        scribe.note(f"push in {turns.state}")

    refusals = []
    with pytest.raises(RuntimeError) as refused:
        turns.repair(push)
    refusals.append(str(refused.value))
    assert turns.engine_sleeps
    turns.generate(push)
    assert not turns.engine_sleeps
    with pytest.raises(RuntimeError) as refused:
        turns.generate(push)
    refusals.append(str(refused.value))
    turns.repair(push)
    turns.train()
    turns.train()  # is there
    return refusals


def test_trainer_and_engine_alternate_in_a_fixed_order(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    refusals = run_world(2, _turns, file)
    assert refusals == [[
        "trainer and engine cannot go from train to repair; from train they go to sync",
        "trainer and engine cannot go from generate to sync; from generate they go to train or repair",
    ]] * 2  # fmt: skip
    rows = [tuple(json.loads(line)) for line in file.read_text().splitlines()]
    engine = [what for rank, what in rows if rank == 0 and what.partition(" ")[0] in ("wake", "sleep")]
    assert engine == ["wake weights", "wake kv_cache", "sleep"]
    for rank in range(2):
        assert [what for r, what in rows if r == rank and what not in engine] == [
            "offload gradients optimizer", "push in sync", "offload parameters",
            "load parameters", "push in repair", "offload parameters", f"load {' '.join(PARTS)}",
        ]  # fmt: skip
        at = {what: [i for i, row in enumerate(rows) if row == (rank, what)] for _, what in rows}
        assert at["offload gradients optimizer"][0] < rows.index((0, "wake weights"))
        assert at["offload parameters"][0] < rows.index((0, "wake kv_cache"))
        assert rows.index((0, "sleep")) < at[f"load {' '.join(PARTS)}"][0]


def _report(rank: int) -> tuple[dict[str, float | None], str]:
    from tepo_megatron.distributed import parallel
    from tepo_megatron.platform import activate

    groups = parallel.initialize(ParallelConfig(dp=2), activate("cpu"), 0)
    report = MemoryReport(groups, None, enabled=True)
    before = mmap.mmap(-1, 48 * 2**20)  # not from the heap, of which the parent's pages may be left
    for _ in range(48 * rank):
        before.write(bytes(2**20))
    report.begin_phase()
    report.end_phase("train")
    before.close()
    return report.values(), report.table()


def test_the_rank_that_has_most_is_reported_and_each_is_in_the_table() -> None:
    (values, table), (same, _) = run_world(2, _report)
    assert values.keys() == same.keys() and values["memory/train_held"] == same["memory/train_held"]
    first, second = (float(line.split()[2]) for line in table.splitlines()[1:3])
    assert 0.04 < second - first < 0.06 and values["memory/train_held"] == pytest.approx(second, abs=1e-3)
