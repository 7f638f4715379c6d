"""The training loop. Every rank runs it; rank 0 alone speaks to the engine, the grader and the user."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tepo_megatron import parallel
from tepo_megatron.actor.actor import Actor
from tepo_megatron.advantages import group_advantages
from tepo_megatron.config import Config
from tepo_megatron.driver import Driver, EngineFactory
from tepo_megatron.losses import build_objective
from tepo_megatron.platform import Platform
from tepo_megatron.seeding import derive_seed
from tepo_megatron.step_log import StepLog
from tepo_megatron.timing import Clock
from tepo_megatron.types import TrainBatch
from tepo_megatron.weights.sync import WeightSync, check_mismatch, check_one_host


def train(cfg: Config, platform: Platform, make_engine: EngineFactory | None = None) -> None:
    """One run: `cfg.training.steps` rollout batches, each sampled, graded and learned from, with weights sent after each.

    make_engine: instead of the engine that the config names.
    """
    check_one_host(cfg.sync)
    groups = parallel.initialize(cfg.parallel, platform, cfg.seed)
    with Driver.open(cfg, groups, make_engine) as driver:
        actor = Actor(cfg, groups)
        objective = build_objective(cfg.objective)
        with WeightSync(cfg.sync, actor.bindings, actor.arch, groups, driver.engine_when_ready()) as sync:
            run_clock = Clock()
            sync.push(version=0)
            before = driver.evaluate(step=0)

            for step in range(1, cfg.training.steps + 1):
                clock, log = Clock(), StepLog()
                rollouts = log.receive(_share(driver.collect(step, clock), groups))
                actor.start_step(step)
                if rollouts:
                    batch = TrainBatch.build(rollouts, group_advantages(rollouts, objective.advantage))
                    with clock.phase("old_stats"):
                        batch = actor.attach_old_stats(batch)
                        check_mismatch(log.mismatch(actor.mismatch(batch)), version=step - 1, cfg=cfg.sync)
                    with clock.phase("update"):
                        shuffle = derive_seed(cfg.seed, "minibatches", step)
                        for minibatch in batch.epochs(cfg.training.epochs, cfg.training.minibatch_prompts, shuffle):
                            log.add(actor.update(minibatch, objective))
                with clock.phase("sync"):
                    sync.push(version=step)
                driver.log_step(step, log, clock)
                if cfg.evaluation.every and step % cfg.evaluation.every == 0 and step < cfg.training.steps:
                    driver.evaluate(step)

            if cfg.export_hf:  # first of all, so that nothing that fails afterwards costs the model
                actor.export_hf(cfg.run_dir / "hf")
            after = driver.evaluate(step=cfg.training.steps)
        driver.finish(before, after, run_clock.total)
    parallel.shutdown()


def _share(value: Any, groups: parallel.Groups) -> Any:
    """Rank 0's value, on every rank; they wait for it as long as generation takes."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=groups.host, device=torch.device("cpu"))
    return box[0]
