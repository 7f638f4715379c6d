"""The training loop. Every rank runs it; rank 0 calls the rollout service, which owns engine, grading and log."""

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tepo_megatron.actor.actor import Actor
from tepo_megatron.actor.recorder import TokenRecorder
from tepo_megatron.base.errors import RunStopped
from tepo_megatron.checkpoint.checkpoints import Checkpoints
from tepo_megatron.config import Config, ParallelConfig, RolloutConfig, SyncConfig
from tepo_megatron.config.io import plain
from tepo_megatron.dist import parallel
from tepo_megatron.dist.objects import broadcast_result
from tepo_megatron.dist.platform import Platform
from tepo_megatron.losses import Objective, build_objective
from tepo_megatron.monitor import hang_watchdog
from tepo_megatron.monitor.log_file import LogFile
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.tracer import Clock, tracer
from tepo_megatron.service.batch_memory import BatchHeader
from tepo_megatron.sync.push import NoSync, WeightSync, check_one_host, make_weight_sync
from tepo_megatron.trainer.batch_receiver import BatchReceiver
from tepo_megatron.trainer.driver import Driver, StepLog
from tepo_megatron.trainer.gate import WeightsGate
from tepo_megatron.trainer.learning import learn
from tepo_megatron.trainer.placement import Colocated, Disaggregated, MemoryReport
from tepo_megatron.trainer.schedule import Schedule, StopRequested, starting_point
from tepo_megatron.trainer.service_client import ServiceAddress, ServiceClient, ServiceEngine, connected
from tepo_megatron.trainer.tracing import StepTracer


def train(
    cfg: Config,
    platform: Platform,
    address: ServiceAddress | None = None,
    on_hang: Callable[[str], object] = hang_watchdog.abort,
) -> None:
    """Make one run of `cfg.training.steps` steps: sample and grade a batch, train on it, and update the engine's weights.

    `address`: the rollout service, for rank 0; None: the one that the launcher names.

    Raises RunStopped on rank 0 once all ranks have ended their work: the run was asked to end (`base/save_requests.py`).
    """
    check_one_host(cfg.sync, servers_with_ranks=cfg.rollout.colocate and cfg.rollout.server.rendezvous_folder is not None)
    is_main = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as stack:
        service: ServiceClient | None = None
        if is_main:
            address = address or ServiceAddress.inherited()
            service = stack.enter_context(connected(cfg.parallel, address, cfg.restarts_ranks))
        groups = parallel.initialize(cfg.parallel, platform, cfg.seed, config=plain(cfg))
        with _watched(cfg.parallel, groups, cfg.run_dir, on_hang):
            if service is not None:  # the engine starts loading at once, while the actor is built
                service.call("open", cfg)
            driver = Driver(service, cfg)
            traces = StepTracer(service, groups, cfg.run_dir, cfg.logging.trace_every)
            ended = None
            with LogFile(cfg.run_dir) if is_main else contextlib.nullcontext():  # for the warnings of this process
                if cfg.rollout.only:
                    _sample(driver, cfg.training.steps, traces)
                else:
                    ended = _train(cfg, groups, driver, traces)
    parallel.shutdown()
    if ended is not None and is_main:
        saved = f"the checkpoint of step {ended} is complete" if ended else "no step was complete"
        raise RunStopped(f"{cfg.run_dir}: ended on request; {saved}; go on with tepo resume")


def _watched(
    cfg: ParallelConfig, groups: parallel.ParallelDims, folder: Path, on_hang: Callable[[str], object]
) -> hang_watchdog.HangWatchdog:
    seconds = {"heartbeat_timeout": cfg.heartbeat_timeout, "stuck_seconds": cfg.stuck_seconds}
    return hang_watchdog.HangWatchdog(
        parallel.world_store(), groups.rank, groups.world_size, folder, **seconds, on_hang=on_hang
    )


def _train(cfg: Config, groups: parallel.ParallelDims, driver: Driver, traces: StepTracer) -> int | None:
    """Train for all steps; then export the model, evaluate it and write the report.

    Returns None, or the last step if a request ended the run before that; the step is saved then.
    """
    if cfg.rollout.colocate:
        broadcast_result(driver.sleep_engine, groups.host)
    actor, objective = Actor.open(cfg, groups), build_objective(cfg.objective)
    if objective.ref_kl is not None:
        actor.keep_reference()
    evaluation = cfg.evaluation if cfg.data.eval is not None or cfg.evaluation.benchmarks else None
    with (
        Checkpoints.open(cfg.run_dir / "checkpoints", cfg.checkpoint, groups) as checkpoints,
        _open_sync(cfg.sync, cfg.rollout, groups, actor, _serving_engine(driver, groups)) as sync,
    ):
        first, lacks_evaluation, kept = starting_point(cfg.resume, checkpoints, actor, driver, groups)
        gate = WeightsGate(cfg.rollout, cfg.training, cfg.sync, actor, groups)
        placement = Colocated(actor, driver.engine, groups) if cfg.rollout.colocate else Disaggregated()
        memory = MemoryReport(groups, driver.engine, enabled=cfg.logging.memory or cfg.rollout.colocate)
        batches = BatchReceiver.open(groups)
        actor.packer.fetch_experts = batches.fetch_experts
        schedule = Schedule(
            cfg.rollout,
            evaluation,
            cfg.training.steps,
            driver,
            sync,
            gate,
            placement,
            memory,
            batches,
            groups,
            trained=first,
        )
        loop = _Loop(cfg, actor, objective, driver, checkpoints, schedule, sync, gate, memory, traces, saved=first)
        try:
            if kept is not None:
                schedule.inherit(kept)
            schedule.publish_first_weights()
            if lacks_evaluation:
                schedule.evaluate(first)
            loop.take_steps()
            loop.finish()
        except StopRequested:
            loop.stop()
            return schedule.trained
    if table := memory.table():
        driver.log_message(table)
    driver.finish(schedule.trained)
    return None


@dataclass
class _Loop:
    """The steps of a run. All ranks make the same calls; `take_steps` and `finish` raise StopRequested.

    `saved`: the step of the newest checkpoint, which may be in flight; 0 without one.
    """

    cfg: Config
    actor: Actor
    objective: Objective
    driver: Driver
    checkpoints: Checkpoints
    schedule: Schedule
    sync: WeightSync | NoSync
    gate: WeightsGate
    memory: MemoryReport
    traces: StepTracer
    saved: int

    def take_steps(self) -> None:
        """Take the steps that are left: learn from each batch, publish the weights, evaluate and save if that is due."""
        schedule = self.schedule
        for step in range(schedule.trained + 1, self.cfg.training.steps + 1):
            if schedule.ended:
                break
            with self.traces.step(step):
                self._take_step(step)
            self.traces.ask(schedule.trace_requested)
            schedule.trace_requested = None

    def _take_step(self, step: int) -> None:
        """Take one step. `schedule` asks for rollouts in `next_parts`, with `rollout.max_staleness` also for later steps."""
        actor, driver, schedule, training = self.actor, self.driver, self.schedule, self.cfg.training
        clock, log, hang_watchdog.progress.step = Clock(), StepLog(), step
        parts = schedule.next_parts(step, clock)
        first = next(parts)
        actor.start_step(step)
        noise = _is_due(step - 1, self.cfg.logging.noise_floor_every)
        recorder = TokenRecorder.open(self.cfg.run_dir, step, self.cfg.logging, self.objective, actor.groups)
        batch = itertools.chain([first], parts)
        learn(batch, step, actor, self.objective, training, log, clock, self.gate, measures_noise=noise, recorder=recorder)
        schedule.publish_weights(step, clock)
        log.note(self.sync.metrics())
        log.memory(self.memory.values())
        with tracer.span("log"):
            driver.log_step(step, log, clock)
        with tracer.span("evaluate"):
            schedule.evaluate_if_due(step)
        every, last = self.cfg.checkpoint.steps, step == training.steps or schedule.ended
        with tracer.span("checkpoint"):
            if _is_due(step, every) or (last and (every or self.saved)) or schedule.save_requested:
                schedule.load_trainer()
                self._save()
            driver.log_checkpoint(self.checkpoints.poll())

    def finish(self) -> None:
        driver, schedule = self.driver, self.schedule
        if schedule.ended:
            schedule.load_trainer()
        driver.log_checkpoint(self.checkpoints.wait())
        if self.cfg.export_hf:  # first, so that a later failure does not lose the model
            self.actor.export_hf(self.cfg.run_dir / "hf", driver.check_in_place)
        schedule.evaluate(schedule.trained)

    def stop(self) -> None:
        """Save the last step unless it is saved, and wait until the checkpoint is complete. Answer a request to end."""
        self.schedule.stop()
        if self.schedule.trained > self.saved:
            self._save()
        while (complete := self.checkpoints.wait()) is not None:
            self.driver.log_checkpoint(complete)
        self.driver.finish(self.schedule.trained, on_request=True)

    def _save(self) -> None:
        step, driver = self.schedule.trained, self.driver
        own = {"noise_floor": self.actor.noise_floor, "lacks_evaluation": self.schedule.lacks_evaluation}
        self.checkpoints.save(step, self.actor, driver.state(step) | own, driver.best_step)
        self.saved, self.schedule.save_requested = step, False


def _sample(driver: Driver, steps: int, traces: StepTracer) -> None:
    """Only sample and record rollouts, with the weights in `model.path`."""
    driver.wait_engine()
    for step in range(1, steps + 1):
        with traces.step(step):
            clock, log = Clock(), StepLog()
            with clock.phase("wait"):
                waited = driver.collect(step).wait()
            header: BatchHeader = waited.result
            clock.seconds |= header.seconds
            log.receive(header.tokens, Metrics(header.metrics))
            driver.release(header.path)
            with tracer.span("log"):
                driver.log_step(step, log, clock)
        traces.ask(waited.trace)


def _serving_engine(driver: Driver, groups: parallel.ParallelDims) -> ServiceEngine | None:
    """Wait on all ranks until the engine serves. Return it on rank 0; None on other ranks and without an engine."""
    broadcast_result(driver.wait_engine, groups.host)
    return driver.engine


def _open_sync(
    cfg: SyncConfig, rollout: RolloutConfig, groups: parallel.ParallelDims, actor: Actor, engine: ServiceEngine | None
) -> WeightSync | NoSync:
    if rollout.replay is not None:
        return NoSync()
    return make_weight_sync(cfg, actor.bindings, actor.arch, groups, engine)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
