"""The training loop. Every rank runs it; rank 0 calls the rollout service, which owns engine, grading and log."""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.actor.actor import Actor
from tepo_megatron.actor.comparisons import mismatch, reference_divergence
from tepo_megatron.checkpoint.checkpoints import Checkpoints
from tepo_megatron.config import Config, ParallelConfig, SyncConfig, TrainingConfig
from tepo_megatron.config.io import plain
from tepo_megatron.controller.batch_memory import BatchHeader
from tepo_megatron.controller.batch_receiver import BatchReceiver
from tepo_megatron.controller.driver import Driver, ServiceDriver
from tepo_megatron.controller.gate import WeightsGate
from tepo_megatron.controller.memory_report import MemoryReport
from tepo_megatron.controller.placement import Colocated, Disaggregated
from tepo_megatron.controller.schedule import Schedule
from tepo_megatron.controller.service_client import ServiceClient, start_service
from tepo_megatron.controller.step_log import StepLog
from tepo_megatron.distributed import parallel
from tepo_megatron.distributed.objects import broadcast_result
from tepo_megatron.losses import Objective, build_objective
from tepo_megatron.losses.advantages import group_advantages, penalized, without_truncated
from tepo_megatron.observability import hang_watchdog
from tepo_megatron.observability.metrics import Metrics
from tepo_megatron.observability.timing import Clock
from tepo_megatron.platform import Platform
from tepo_megatron.types import Rollout, TrainBatch
from tepo_megatron.utils.seeding import derive_seed
from tepo_megatron.weight_sync.sync import NoSync, WeightSync, check_one_host, make_weight_sync
from tepo_megatron.weight_sync.transport import WeightReceiver

if TYPE_CHECKING:
    from tepo_megatron.controller.opening import EngineFactory


def train(
    cfg: Config,
    platform: Platform,
    make_engine: "EngineFactory | None" = None,
    on_hang: Callable[[str, bool], object] = hang_watchdog.abort,
) -> None:
    """Make one run of `cfg.training.steps` steps: sample and grade a batch, train on it, and update the engine's weights.

    Args:
        cfg: The run's config.
        platform: The activated platform of `cfg.platform`.
        make_engine: Makes an engine to use instead of the one that the config names.
        on_hang: Called by the hang watchdog to end this process; see `hang_watchdog.HangWatchdog`.
    """
    check_one_host(cfg.sync, servers_with_ranks=cfg.rollout.colocate and cfg.rollout.server.rendezvous_folder is not None)
    is_main = os.environ.get("RANK", "0") == "0"
    with start_service(cfg.parallel.heartbeat_timeout, make_engine) if is_main else contextlib.nullcontext() as service:
        groups = parallel.initialize(cfg.parallel, platform, cfg.seed, config=plain(cfg))
        with _watched(cfg.parallel, groups, cfg.run_dir, on_hang):
            driver = _open_driver(cfg, service)
            if cfg.rollout.only:
                _sample(driver, cfg.training.steps)
            else:
                _train(cfg, groups, driver)
    parallel.shutdown()


def _open_driver(cfg: Config, service: ServiceClient | None) -> Driver:
    """Return this rank's driver. On rank 0 the engine starts loading at once, while the actor is built.

    Raises:
        ConfigError: The config's keys contradict each other. Nothing was started.
        DataError: The data cannot be used. Nothing was started.
    """
    if service is None:
        return Driver()
    service.call("open", cfg)
    return ServiceDriver(service, cfg)


def _watched(
    cfg: ParallelConfig, groups: parallel.ParallelDims, folder: Path, on_hang: Callable[[str, bool], object]
) -> hang_watchdog.HangWatchdog:
    seconds = {"heartbeat_timeout": cfg.heartbeat_timeout, "stuck_seconds": cfg.stuck_seconds}
    return hang_watchdog.HangWatchdog(
        parallel.world_store(), groups.rank, groups.world_size, folder, **seconds, on_hang=on_hang
    )


def _train(cfg: Config, groups: parallel.ParallelDims, driver: Driver) -> None:
    """Train for all steps; then export the model, evaluate it and write the report."""
    if cfg.rollout.colocate:
        broadcast_result(driver.sleep_engine, groups.host)
    actor, objective = Actor.open(cfg, groups), build_objective(cfg.objective)
    if objective.ref_kl is not None:
        actor.keep_reference()
    steps, every = cfg.training.steps, cfg.checkpoint.every
    evaluation = cfg.evaluation if cfg.data.eval is not None or cfg.evaluation.benchmarks else None
    with (
        Checkpoints.open(cfg.run_dir / "checkpoints", cfg.checkpoint, groups) as checkpoints,
        _open_sync(cfg.sync, cfg.rollout.replay is not None, groups, actor, _serving_engine(driver, groups)) as sync,
    ):
        first = _resume(checkpoints, actor, driver) if cfg.resume else 0
        gate = WeightsGate(cfg.rollout, cfg.training, cfg.sync, actor, groups)
        placement = Colocated(actor, driver.engine, groups) if cfg.rollout.colocate else Disaggregated()
        memory = MemoryReport(groups, driver.engine, enabled=cfg.logging.memory or cfg.rollout.colocate)
        batches = BatchReceiver.open(groups)
        actor.packer.fetch_experts = batches.fetch_experts
        schedule = Schedule(
            *(cfg.rollout, evaluation, steps, driver, sync, gate, placement, memory, batches, groups), trained=first
        )
        schedule.publish_first_weights()
        if first == 0:
            schedule.evaluate(0)
        for step in range(first + 1, steps + 1):
            if schedule.ended:
                break
            clock, log, hang_watchdog.progress.step = Clock(), StepLog(), step
            rollouts, metrics = schedule.next_batch(step, clock)
            log.receive(sum(r.token_ids_L.numel() for r in rollouts), metrics)
            actor.start_step(step)
            if rollouts:
                noise = _is_due(step - 1, cfg.logging.noise_floor_every)
                learn(rollouts, step, actor, objective, cfg.training, log, clock, gate, measures_noise=noise)
            schedule.publish_weights(step, clock)
            log.memory(memory.values())
            driver.log_step(step, log, clock)
            schedule.evaluate_if_due(step)
            last = step == steps or schedule.ended
            if _is_due(step, every) or (last and every):
                schedule.load_trainer()
                checkpoints.save(step, actor, driver.state(step) | {"noise_floor": actor.noise_floor}, driver.best_step)
            driver.log_checkpoint(checkpoints.poll())

        if schedule.ended:
            schedule.load_trainer()
        driver.log_checkpoint(checkpoints.wait())
        if cfg.export_hf:  # first, so that a later failure does not lose the model
            actor.export_hf(cfg.run_dir / "hf", driver.check_in_place)
        schedule.evaluate(schedule.trained)
    if table := memory.table():
        driver.log_message(table)
    driver.finish(schedule.trained)


def learn(
    rollouts: Sequence[Rollout],
    step: int,
    actor: Actor,
    objective: Objective,
    training: TrainingConfig,
    log: StepLog,
    clock: Clock,
    gate: WeightsGate,
    *,
    measures_noise: bool = False,
) -> None:
    """Make all updates of one rollout batch: old statistics, reference log-probs, then one update per minibatch.

    Every rank calls it after `actor.start_step(step)`. When it returns, the parameters are gathered.

    Args:
        rollouts: Graded, contiguous by prompt, the same on every rank.
        step: Number of the rollout batch; it seeds the order of the minibatches.
        actor: The policy to update.
        objective: The loss.
        training: Sets epochs, minibatches, and whose log-probs are the old ones.
        log: Receives metrics and the mismatch between engine and actor.
        clock: Receives the seconds of the phases `old_stats` and `update`.
        gate: Compares each rollout with the log-probs of the weights that sampled it; it must have been notified of their
            delivery.
        measures_noise: Also measure the noise floor of dH, if the batch has an old pass.

    Raises:
        SyncError: The engine's log-probs differ from the actor's by more than `sync.max_logprob_diff`.
        NumericalError: A loss or a gradient norm is not finite.
    """
    advantages_B = group_advantages(rollouts, objective.advantage)
    batch = TrainBatch.build(without_truncated(rollouts) if objective.mask_truncated else rollouts, advantages_B)
    with clock.phase("old_stats"):
        batch, masks = actor.attach_sampling_masks(batch)
        log.note(masks)
        gate.before_updates(batch, step)
        if training.old_logprobs == "rollout":
            batch = replace(batch, old_logprobs_N=batch.rollout_logprobs_N)
        elif _needs_old_pass(batch, objective, training):
            batch = actor.attach_old_stats(batch)
            log.note(mismatch(batch, actor.groups))
            gate.with_old_stats(batch, step)
            if measures_noise:
                log.note({"tepo/entropy_noise_floor": actor.measure_noise(batch)})
        batch = _with_reference(batch, actor, objective, log)
    with clock.phase("update"):
        shuffle = derive_seed(actor.cfg.seed, "minibatches", step)
        for minibatch in batch.epochs(training.epochs, training.minibatch_prompts, shuffle):
            result = actor.update(minibatch, objective)
            log.add(result)
            if result.mismatch is not None and result.measured is not None:
                log.note(result.mismatch)
                gate.with_old_stats(result.measured, step)
        actor.finish_step()
    log.note(gate.values())


def _sample(driver: Driver, steps: int) -> None:
    """Only sample and record rollouts, with the weights in `model.path`."""
    driver.wait_engine()
    for step in range(1, steps + 1):
        clock, log = Clock(), StepLog()
        header: BatchHeader = driver.collect(step).wait()[1]
        clock.seconds |= header.seconds
        log.receive(header.tokens, Metrics(header.metrics))
        driver.release(header.path)
        driver.log_step(step, log, clock)


def _resume(checkpoints: Checkpoints, actor: Actor, driver: Driver) -> int:
    """Restore the newest checkpoint; return its step, 0 without a checkpoint."""
    if (found := checkpoints.newest()) is None:
        driver.resume(None)
        return 0
    state = checkpoints.load(found, actor)
    actor.noise_floor = state["noise_floor"]
    driver.resume(state, found.passed_over)
    return int(state["step"])


def _serving_engine(driver: Driver, groups: parallel.ParallelDims) -> WeightReceiver | None:
    """Wait on all ranks until the engine serves. Return it on rank 0; None on other ranks and without an engine."""
    broadcast_result(driver.wait_engine, groups.host)
    return driver.engine


def _open_sync(
    cfg: SyncConfig, replays: bool, groups: parallel.ParallelDims, actor: Actor, engine: WeightReceiver | None
) -> WeightSync | NoSync:
    """Return the sync that delivers the actor's weights; one that does nothing if rollouts are replayed."""
    return NoSync() if replays else make_weight_sync(cfg, actor.bindings, actor.arch, groups, engine)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _needs_old_pass(batch: TrainBatch, objective: Objective, training: TrainingConfig) -> bool:
    """Return whether old statistics need a forward pass of their own.

    They need none if the batch takes one update, whose forward pass yields them, and nothing uses them before.
    """
    in_reward = objective.ref_kl is not None and objective.ref_kl.where == "reward"
    return batch.updates(training.epochs, training.minibatch_prompts) > 1 or objective.needs_batch_statistics or in_reward


def _with_reference(batch: TrainBatch, actor: Actor, objective: Objective, log: StepLog) -> TrainBatch:
    """Return the batch with what the objective needs of the reference policy; unchanged if it needs nothing."""
    if (penalty := objective.ref_kl) is None:
        return batch
    batch = actor.attach_ref_logprobs(batch)
    if penalty.where == "loss":
        return batch
    divergence_B = reference_divergence(batch, penalty.estimator, actor.groups)
    log.note({"reward/ref_kl": float(divergence_B.mean())})
    rollouts = penalized(batch.rollouts, penalty.beta * divergence_B)
    return replace(batch, rollouts=rollouts, advantages_B=group_advantages(rollouts, objective.advantage))
