"""Training steps of one config on random tokens, timed by phase."""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.config import Config
from tepo_megatron.dist.platform import activate
from tepo_megatron.doctor.plan.command import read_model
from tepo_megatron.doctor.plan.inputs import Workload

OLD, UPDATES = "old log-probs", "updates"


def rollouts(cfg: Config, work: Workload) -> list[Rollout]:
    """Return rollouts of random tokens with the lengths that the plan assumes; every other sample of a group is right."""
    rng, (_, arch) = random.Random(cfg.seed), read_model(cfg.model.path)
    samples = cfg.rollout.samples_per_prompt
    lengths = work.sequences(cfg.rollout.prompts_per_step * samples)
    out: list[Rollout] = []
    for i, length in enumerate(lengths):
        if i % samples == 0:
            prompt = [rng.randrange(arch.vocab_size) for _ in range(work.prompt)]
        ids = torch.tensor(prompt + [rng.randrange(arch.vocab_size) for _ in range(length - work.prompt)])
        mask = torch.arange(length) >= work.prompt
        right = float(i % 2)
        out.append(Rollout(i // samples, ids, mask, torch.zeros(length), 0, "stop", reward=right, score=right))
    return out


class MeasuredSteps:
    """Training steps on the same rollouts, as `train.py` makes them."""

    def __init__(self, cfg: Config, work: Workload) -> None:
        platform = activate(cfg.platform)
        from tepo_megatron.actor.actor import Actor
        from tepo_megatron.dist import parallel
        from tepo_megatron.losses import build_objective

        self.cfg, self.rollouts = cfg, rollouts(cfg, work)
        self.groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
        self.actor, self.objective = Actor.open(cfg, self.groups), build_objective(cfg.objective)
        self.on_gpu = cfg.platform == "cuda"
        # Seconds of each step, by phase (OLD, UPDATES), on every rank
        self.seconds: dict[str, list[float]] = {OLD: [], UPDATES: []}

    def begin(self, step: int) -> TrainBatch:
        """Make the first half of a step; return its batch with the old statistics."""
        from tepo_megatron.losses.advantages import group_advantages

        self.actor.start_step(step)
        batch = TrainBatch.build(self.rollouts, group_advantages(self.rollouts, self.objective.advantage))
        known: TrainBatch = self._timed(OLD, lambda: self.actor.attach_old_stats(batch))
        return known

    def finish(self, step: int, batch: TrainBatch) -> None:
        """Make the second half of a step: all updates."""

        def updates() -> None:
            for minibatch in batch.epochs(self.cfg.training.epochs, self.cfg.training.minibatch_prompts, step):
                self.actor.update(minibatch, self.objective)
            self.actor.finish_step()

        self._timed(UPDATES, updates)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Time a call from when all ranks are ready until all are done."""
        self._form_groups()
        start = time.perf_counter()
        found = call()
        self._form_groups()
        self.seconds[name].append(time.perf_counter() - start)
        return found

    def _form_groups(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group=self.groups.host)
