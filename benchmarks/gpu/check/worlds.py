"""Train the steps of tests/parallel/cases.py on several ranks: one world of processes serves many configs, one after the other.

CUDA does not survive a fork, and a world per config would spend most of its time on imports.
"""

import contextlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from benchmarks._ranks import Ranks
from benchmarks.gpu.check.lines import Check
from tepo_megatron.config import Config
from tepo_megatron.config.io import plain, validate
from tepo_megatron.dist.platform import activate
from tests.parallel import cases
from tests.processes import call, waiting_ranks
from tests.staged_gloo import VARIABLE, requested

FIRST_SHARE, SHARE = 0.5, 0.3  # of the time that is left, for the first config, which waits for imports, and for each other
COLLECTIVE_SECONDS = 120.0
IMPORTS = ("tests.parallel.cases", "tepo_megatron.actor.actor", "tepo_megatron.losses")  # of the ranks
FP32_LIMIT = {"cpu": 1e-5, "cuda": 1e-4}  # of the error of each tensor
NEAR_BF16, NEAR_FP8 = (0.05, 0.1), (0.1, 0.2)  # limits of 1 - cosine of the gradients, and of their norm's error


@dataclass(frozen=True)
class TrainingJob:
    """Two optimizer steps of a config."""

    line: str
    case: cases.Case  # the batches, and the fp64 reference's results
    layout: dict[str, Any]
    precision: str
    training: dict[str, Any]
    ddp: dict[str, Any] = field(default_factory=dict)

    def config(self, platform: str) -> Config:
        """Return the config, with what the platform switches on by default."""
        tree = plain(cases.run_config(self.case.model, self.layout, ddp=self.ddp, **self.training)) | {"platform": platform}
        attention = "sdpa" if self.precision == "fp32" else "auto"
        tree["model"] |= {"precision": self.precision, "attention": attention}
        return validate(tree)

    def report(self, check: Check, ranks: list[list[dict[str, Any]]]) -> None:
        """Compare with the reference, and report."""
        if self.precision == "fp32":
            worst, error = cases.worst_of(cases.errors(ranks, self.case.steps))
            check.verdict(self.line, error, FP32_LIMIT[check.platform], worst=worst)
            return
        apart, norm = cases.nearness(ranks, self.case.steps)
        most, most_norm = NEAR_BF16 if self.precision == "bf16" else NEAR_FP8
        good = apart <= most and norm <= most_norm
        why = f"1 - cosine of the gradients, limit {most}; their norm is {norm:.1e} off, limit {most_norm}"
        check.report(self.line, "passed" if good else "failed", apart, why=why, norm=norm)


class World:
    """Ranks that wait for jobs. They end with this process at the latest."""

    def __init__(self, folder: Path, size: int, staged: bool) -> None:
        """Start the ranks; if staged, they share a device, and collectives go through host memory."""
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            waiting = waiting_ranks(size, IMPORTS, folder=self.folder, **{VARIABLE: str(int(staged))})
            self.ranks = stack.enter_context(waiting)
            self.end = stack.pop_all().close

    def run(self, check: Check, jobs: Sequence[TrainingJob]) -> int:
        """Run jobs and end the ranks; return the number of reported jobs: all, or those up to the first failure."""
        try:
            return self._run(check, jobs, [job.config(check.platform) for job in jobs])
        finally:
            self.end()

    def _run(self, check: Check, jobs: Sequence[TrainingJob], configs: Sequence[Config]) -> int:
        call(self.folder, serve, [(cfg, job.case.batches) for cfg, job in zip(configs, jobs, strict=True)], self.folder)
        for number, (job, cfg) in enumerate(zip(jobs, configs, strict=True)):
            files = [self.folder / f"{number}-{rank}" for rank in range(cfg.parallel.world_size)]
            failure = _wait(self.ranks, files, check.left * (SHARE if number else FIRST_SHARE))
            if failure:
                raised = "".join(sorted(file.read_text() for file in self.folder.glob("*.error"))[:1])
                shown_log = raised or "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-20:])
                print(f"{job.line}: {failure}\n{shown_log}", flush=True)
                check.report(job.line, "failed", why=f"{failure}: {_last(shown_log)}")
                if not raised and number == 0 and self.ranks.status() is not None:
                    raise RuntimeError(f"the ranks did not start: {_last(shown_log)}")
                return number + 1
            with check.line(job.line):
                job.report(check, [pickle.loads(file.read_bytes()) for file in files])
        return len(jobs)


def train(check: Check, jobs: Sequence[TrainingJob], staged: bool, world: World | None = None) -> None:
    """Run the jobs and report each when it is done. After a failure the rest runs in a new world."""
    remaining = list(jobs)
    while remaining:
        size = max(job.config(check.platform).parallel.world_size for job in remaining)
        world = world or World(check.folder, size, staged)
        remaining, world = remaining[world.run(check, remaining) :], None


def _wait(world: Ranks, files: Sequence[Path], seconds: float) -> str:
    """Return "" when all files exist, otherwise what happened."""
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        if any(file.with_suffix(".error").exists() for file in files):
            return "a rank failed"
        if (status := world.status()) is not None and not all(file.exists() for file in files):
            return f"a rank ended (exit status {status})"
        if time.monotonic() > deadline:
            return f"no result in {seconds:.0f} s"
        time.sleep(0.02)
    return ""


def serve(rank: int, work: Sequence[tuple[Config, Any]], folder: Path) -> None:
    """Run in each rank: train each config whose world has this rank, and write what `cases.train_steps` returns."""
    from tepo_megatron.dist import parallel  # imports Megatron-Core

    store, _, _ = next(rendezvous("env://", rank, int(os.environ["WORLD_SIZE"])))
    for number, (cfg, batches) in enumerate(work):
        size = cfg.parallel.world_size
        if rank >= size:
            continue
        try:
            os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
            backend = "gloo" if requested() else activate(cfg.platform).backend
            timeout = timedelta(seconds=COLLECTIVE_SECONDS)
            own = dist.PrefixStore(f"job{number}", store)  # the keys of an earlier world are still in the store
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
            found = cases.train_steps(rank, cfg, batches)
            parallel.shutdown()  # the next job has a mesh of its own
        except BaseException:
            partial = folder / f"{number}-{rank}.partial"
            partial.write_text(f"{time.time()} rank {rank}:\n{traceback.format_exc()}")
            partial.rename(folder / f"{number}-{rank}.error")
            raise
        partial = folder / f"{number}-{rank}.partial"
        partial.write_bytes(pickle.dumps(found))
        partial.rename(folder / f"{number}-{rank}")
        del found
        torch.cuda.empty_cache()


def _last(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return found[-1][:400] if found else "no output"
