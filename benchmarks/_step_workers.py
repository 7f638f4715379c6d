"""Workers of the training-step benchmark: each side runs in processes of its own, which wait for their turn."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks import _step_cases as cases
from benchmarks._plain_step import FORMS, PlainStep
from benchmarks._ranks import store_here, world
from tepo_megatron.config import Config
from tepo_megatron.types import Rollout
from tepo_megatron.utils.processes import die_with_parent

WORKERS = {**{f"plain {form}": 1 for form in FORMS}, "tp1": 1, "tp2": 2}  # name -> number of processes
STEP_SECONDS = 300.0  # a step that takes longer has failed
Updates = list[tuple[float, float]]  # (loss, gradient norm) of each update of one step


class OurStep:
    """The step through tepo_megatron's Actor, on this rank of the world that the environment describes."""

    def __init__(self, cfg: Config, rollouts: list[Rollout]) -> None:
        from tepo_megatron.platform import activate

        platform = activate(cfg.platform)
        from tepo_megatron.actor.actor import Actor
        from tepo_megatron.distributed import parallel
        from tepo_megatron.losses import build_objective

        self.cfg, self.rollouts, self.steps = cfg, rollouts, 0
        self.actor = Actor.open(cfg, parallel.initialize(cfg.parallel, platform, cfg.seed))
        self.objective = build_objective(cfg.objective)

    def __call__(self) -> Updates:
        """Run one step as `train.py` does; return (loss, gradient norm) of each update."""
        from tepo_megatron.actor.comparisons import mismatch
        from tepo_megatron.controller.step_log import StepLog
        from tepo_megatron.losses.advantages import group_advantages
        from tepo_megatron.types import TrainBatch

        actor, log, out = self.actor, StepLog(), []
        self.steps += 1
        actor.start_step(self.steps)
        batch = TrainBatch.build(self.rollouts, group_advantages(self.rollouts, self.objective.advantage))
        batch = actor.attach_old_stats(batch)
        log.note(mismatch(batch, actor.groups))
        for minibatch in batch.epochs(self.cfg.training.epochs, self.cfg.training.minibatch_prompts, self.steps):
            result = actor.update(minibatch, self.objective)
            log.add(result)
            out.append((result.metrics["loss/total"][0], result.metrics["actor/grad_norm"][0]))
        return out


def serve(name: str, model: Path, parent: int, environment: dict[str, str], pipe: Connection) -> None:
    """Run a worker's process: for each thread count that it receives, make one step and answer with (seconds, updates)."""
    die_with_parent(parent)
    os.environ |= environment
    disable_progress_bar()
    torch.set_num_threads(1)
    cfg = cases.config(model, WORKERS[name])
    rollouts = cases.rollouts(cfg)
    step: Callable[[], Updates]
    step = PlainStep(cfg, rollouts, name.split()[1]) if name.startswith("plain") else OurStep(cfg, rollouts)
    pipe.send("ready")
    while (threads := pipe.recv()) is not None:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        updates = step()
        pipe.send((time.perf_counter() - start, updates))


@dataclass
class StepWorker:
    """One of WORKERS.

    Attributes:
        updates: Updates of the steps so far.
    """

    pipes: list[Connection]
    updates: list[Updates]

    def step(self, threads: int) -> float:
        """Make one step; return the seconds of the slowest rank."""
        for pipe in self.pipes:
            pipe.send(threads)
        answers = [self._answer(pipe) for pipe in self.pipes]
        self.updates.append(answers[0][1])
        return max(float(seconds) for seconds, _ in answers)

    def ready(self) -> None:
        """Wait until the step is built."""
        for pipe in self.pipes:
            self._answer(pipe)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(STEP_SECONDS):
            raise TimeoutError(f"no answer within {STEP_SECONDS:g} s")
        return pipe.recv()  # EOFError when the process has died: its traceback is on stderr


@contextmanager
def started(name: str, model: Path) -> Iterator[StepWorker]:
    """Yield the worker, running in processes of its own, which end with the block."""
    context, size, pipes, processes = multiprocessing.get_context("spawn"), WORKERS[name], [], []
    store = store_here()
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            environment = world(store.port, rank, size)
            args = (name, model, os.getpid(), environment, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield StepWorker(pipes, [])
    finally:
        for process in processes:
            process.kill()
            process.join()
