"""Measure the demo's training step, without generation: ours on Megatron-Core next to the same step in plain PyTorch.

    python -m benchmarks --only 7

A step of examples/demo.yaml on its model, untrained: 32 problems x 8 samples of examples/arithmetic, old statistics of all of
them, then 4 updates with the `tepo` objective. Both sides begin with the rollouts on the host and end with the last update's
loss and gradient norm on the host. The noise floor of dH, which the demo measures in 2 of its 40 steps, is left out.

    tp1, tp2        Actor.attach_old_stats, mismatch and update, on one rank and on two tensor-parallel ranks
    plain padded    one process: transformers' Qwen3 (SDPA), fused AdamW, the loss from the formulas; minibatches padded to a
                    rectangle; like ours, only response rows reach the output layer
    plain bucketed  the same with several rectangles of sequences of similar length

Each is a process (tp2: two) that waits while the others have their turn. Equal work is checked: loss and gradient norm of every
update must agree, or it raises AssertionError. Ours is compared with the fastest plain form with as many threads in all (tp2:
two).
"""

import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks._plain_step import FORMS, PlainStep
from benchmarks._ranks import store_here, world
from benchmarks.results import ROOT, Measure, SuiteOptions, Target
from examples.arithmetic import base_model, task
from tepo_megatron.base.processes import die_with_parent
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config

TARGET = 1.3  # tp1 over the fastest plain form, equal threads
AGREE = 1e-4  # relative, of loss and gradient norm
CHECKED_STEPS = 3  # Adam also scales up gradients that are rounding noise; the differences grow in later steps
REPETITIONS = 9
SCALE = 4.0  # of the untrained weights
WORKERS = {**{f"plain {form}": 1 for form in FORMS}, "tp1": 1, "tp2": 2}  # name -> number of processes
STEP_SECONDS = 300.0  # a step that takes longer has failed
Updates = list[tuple[float, float]]  # (loss, gradient norm) of each update of one step


def write_model(folder: Path) -> None:
    """Write the demo's model, untrained."""
    torch.manual_seed(0)
    model = base_model.build_model(task.build_tokenizer())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(SCALE if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)


def make_rollouts(cfg: Config) -> list[Rollout]:
    """Return graded rollouts, in groups that are neither all right nor all wrong, so none is dropped.

    Half of the responses are worked solutions, half guesses, as in mid-training. No engine sampled them: their log-probs are 0.
    """
    rng, tokenizer = random.Random(0), task.build_tokenizer()
    out: list[Rollout] = []
    for i, problem in enumerate(task.distinct_problems(rng, cfg.rollout.prompts_per_step)):
        prompt = tokenizer(problem.prompt).input_ids
        scores: list[float] = []
        while len(set(scores)) < 2:
            texts = [task.hasty_demonstration(rng, problem, share=0.5) for _ in range(cfg.rollout.samples_per_prompt)]
            scores = [float(task.boxed_answer(text) == str(problem.answer)) for text in texts]
        for text, score in zip(texts, scores, strict=True):
            ids = torch.tensor(prompt + tokenizer(text + task.END).input_ids)
            mask = torch.arange(ids.numel()) >= len(prompt)
            out.append(Rollout(i, ids, mask, torch.zeros(ids.numel()), 0, "stop", reward=score, score=score))
    return out


class OurStep:
    """The step through tepo_megatron's Actor, on this rank of the world that the environment describes."""

    def __init__(self, cfg: Config, rollouts: list[Rollout]) -> None:
        from tepo_megatron.dist.platform import activate

        platform = activate(cfg.platform)
        from tepo_megatron.actor.actor import Actor
        from tepo_megatron.dist import parallel
        from tepo_megatron.losses import build_objective

        self.cfg, self.rollouts, self.steps = cfg, rollouts, 0
        self.actor = Actor.open(cfg, parallel.initialize(cfg.parallel, platform, cfg.seed))
        self.objective = build_objective(cfg.objective)

    def __call__(self) -> Updates:
        """Run one step as `train.py` does; return (loss, gradient norm) of each update."""
        from tepo_megatron.actor.accumulator import mismatch
        from tepo_megatron.base.types import TrainBatch
        from tepo_megatron.losses.advantages import group_advantages
        from tepo_megatron.trainer.driver import StepLog

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
    cfg = load_config(ROOT / "examples/demo.yaml", ["--model.path", str(model), "--parallel.tp", str(WORKERS[name])])
    rollouts = make_rollouts(cfg)
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
    """One of WORKERS, with the updates of its steps so far."""

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
            args = (name, model, os.getpid(), world(store.port, rank, size), theirs)
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


def disagreement(ours: list[Updates], plain: list[Updates]) -> float:
    """Return the largest relative difference of a loss or a gradient norm in the first CHECKED_STEPS steps."""
    pairs = zip(
        (x for step in ours[:CHECKED_STEPS] for x in step), (x for step in plain[:CHECKED_STEPS] for x in step), strict=True
    )
    return max(abs(a - b) / abs(b) if b else math.inf for x, y in pairs for a, b in zip(x, y, strict=True))


def measures(options: SuiteOptions) -> list[Measure]:
    """Measure the step next to the fastest plain form, by threads. TP2 has no target. quick: one thread, without TP2."""
    names = [n for n in WORKERS if not (options.quick and n == "tp2")]
    cases = [(n, t) for n in names for t in ((1,) if options.quick or n == "tp2" else (1, 2))]
    repetitions = 2 if options.quick else REPETITIONS
    samples: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        disable_progress_bar()
        write_model(Path(folder))
        workers = {n: stack.enter_context(started(n, Path(folder))) for n in names}
        for worker in workers.values():
            worker.ready()
        for turn in range(repetitions + 1):  # the first round warms up
            for name, threads in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                seconds = workers[name].step(threads)
                if turn:
                    samples[name, threads].append(seconds)
        apart = {n: disagreement(workers[n].updates, workers["plain padded"].updates) for n in names}
    assert max(apart.values()) <= AGREE, f"losses and gradient norms differ: {apart}"
    spread = {f"{n} {t} threads": _spread(s) for (n, t), s in samples.items()}
    more = {"seconds": spread, "disagreement": apart, "repetitions": repetitions}
    found = []
    for name, each in (case for case in cases if not case[0].startswith("plain")):
        threads = each * WORKERS[name]
        plain = min(statistics.median(samples[f"plain {form}", threads]) for form in FORMS)
        targets = (Target("ours / plain", "<=", TARGET),) if name == "tp1" else ()
        what = f"demo, {name.upper()}, {threads} thread{'s' if threads > 1 else ''}"
        found.append(Measure(7, what, "s", statistics.median(samples[name, each]), {"plain": plain}, targets, more=more))
    return found


def _spread(samples: list[float]) -> list[float]:
    """Return [median, 20th percentile, 80th percentile]."""
    ordered = sorted(samples)
    return [statistics.median(ordered), *(ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))]
