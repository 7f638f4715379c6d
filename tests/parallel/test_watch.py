"""A rank that is frozen, or makes no progress, is named with the place of every rank before any collective times out."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.dist.parallel import world_store
from tepo_megatron.monitor.hang_watchdog import HangWatchdog, progress
from tepo_megatron.monitor.tracer import Clock
from tests.marks import full_but
from tests.parallel import resume_worlds as w
from tests.parallel.resume_worlds import Kill
from tests.worlds import run_world

SILENT, STUCK = 4.0, 6.0


def watched(rank: int, folder: Path, work: Callable[[int], Any], store: Path | None = None) -> Any:
    """Do the work under a hang watchdog."""
    dist.init_process_group("gloo")
    kept = world_store() if store is None else dist.FileStore(str(store), dist.get_world_size())

    def end(explanation: str) -> None:
        part = folder / f"end-{rank}.part"
        part.write_text(explanation)
        part.rename(part.with_suffix(".txt"))  # when one has ended, the others are killed
        os._exit(1)

    limits = {"heartbeat_timeout": SILENT, "stuck_seconds": STUCK}
    with HangWatchdog(kept, rank, dist.get_world_size(), folder, **limits, on_hang=end):
        return work(rank)


def explained(folder: Path, size: int, *how: Any) -> str:
    start = time.monotonic()
    with pytest.raises(AssertionError):
        run_world(size, watched, folder, *how, timeout=60.0)
    assert time.monotonic() - start < 50  # none waits for the collective
    reports = {path.read_text() for path in folder.glob("end-*.txt")}
    (only,) = reports  # all say the same
    assert (folder / "hang.txt").read_text() == only + "\n"
    return only


def frozen(who: int) -> Callable[[int], None]:
    def work(rank: int) -> None:
        clock, progress.step = Clock(), 3
        with clock.phase("update"):
            progress.microbatch = 2
            time.sleep(2.5)  # a beat or two
            if rank == who:
                os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(1))

    return work


@pytest.mark.parametrize("who", full_but([], [1], range(3)))
def test_a_frozen_rank_is_named(tmp_path: Path, who: int) -> None:
    report = explained(tmp_path, 3, frozen(who), tmp_path / "store")
    assert report.startswith(f"rank {who} has not been heard of for 4 s (parallel.heartbeat_timeout)")
    assert f"  rank {who}: step 3, update, microbatch 2\n" in report
    others = {0: "ranks 1-2", 1: "ranks 0, 2", 2: "ranks 0-1"}[who]
    assert f"  {others}: step 3, update, microbatch 2, in all_reduce\n" in report
    stacks = tmp_path / "stacks"
    assert {path.name for path in stacks.iterdir()} == {f"rank-{rank}.txt" for rank in range(3) if rank != who}
    assert all("all_reduce" in path.read_text() for path in stacks.iterdir())


def circling(rank: int) -> None:
    with Clock().phase("old_stats"):
        while rank == 1:
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))


@pytest.mark.full
def test_ranks_without_progress_are_named(tmp_path: Path) -> None:
    report = explained(tmp_path, 2, circling)
    assert "has been in one place for 6 s (parallel.timeout_seconds): step 0, old_stats" in report.splitlines()[0]
    assert "  rank 0: step 0, old_stats, in all_reduce\n" in report and "  rank 1: step 0, old_stats\n" in report


@dataclass(frozen=True)
class Freeze(Kill):
    def die(self, journal: Path, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("where", "rank"),
    [
        pytest.param("tepo_megatron.trainer.driver:Driver.collect", 0, marks=pytest.mark.full),
        pytest.param("tepo_megatron.actor.actor:Actor.attach_old_stats", 1, marks=pytest.mark.full),
        pytest.param("tepo_megatron.actor.actor:Actor.update", 1, marks=pytest.mark.slow),
        pytest.param("tepo_megatron.dist.platform.mcore:HostAdam._update", 0, marks=pytest.mark.full),
        pytest.param("tepo_megatron.sync.push:WeightSync.push", 1, marks=pytest.mark.full),
        pytest.param("tepo_megatron.checkpoint.checkpoints:Checkpoints.save", 1, marks=pytest.mark.full),
        pytest.param("tepo_megatron.actor.actor:Actor.export_hf", 0, marks=pytest.mark.full),
    ],
)
def test_a_run_with_a_frozen_rank_ends_and_says_which(model: Path, tmp_path: Path, where: str, rank: int) -> None:
    """Rank 0 keeps the store of these worlds: where it is frozen, that is what the other one tells."""
    parallel = {"tp": 2, "heartbeat_timeout": SILENT, "timeout_seconds": 60.0}
    every_group = {"filter_uniform_groups": False, "max_generation_rounds": 1}  # every step has several updates and an old pass
    checkpoint = {"every": 1, "asynchronous": False}
    cfg = w.run_config(model, tmp_path, parallel=parallel, rollout=every_group, checkpoint=checkpoint)
    with pytest.raises(AssertionError) as raised:
        w.attempt(cfg, tmp_path / "journal", 0, Freeze(where, step=2 if "export" not in where else 0, rank=rank))
    assert (cfg.run_dir / "hang.txt").exists(), raised.value
    report = (cfg.run_dir / "hang.txt").read_text()
    whose = f"rank {rank} has not been heard of" if rank else "the store of this world has not answered"
    assert report.startswith(f"{whose} for 4 s")
    assert f"step {2 if 'export' not in where else w.STEPS}" in report
    assert (cfg.run_dir / "stacks" / f"rank-{1 - rank}.txt").stat().st_size > 0
