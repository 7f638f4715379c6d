"""Rank 0's side of a run: the engine, the grader, the prompts and the log. On other ranks every method does nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tepo_megatron.checkpoint.checkpoints import Saved
from tepo_megatron.checkpoint.folder import complete
from tepo_megatron.config import Config
from tepo_megatron.config.io import differences, plain
from tepo_megatron.config.safety import checks_that_are_off
from tepo_megatron.controller.method import resolve
from tepo_megatron.controller.step_log import StepLog
from tepo_megatron.data import PromptStream, load_data, load_tokenizer, stop_tokens
from tepo_megatron.distributed.parallel import ParallelDims
from tepo_megatron.errors import ConfigError, DataError
from tepo_megatron.evaluation.problems import load_benchmarks
from tepo_megatron.evaluation.run_benchmarks import BenchmarkRuns
from tepo_megatron.evaluation.run_evaluations import Evaluations
from tepo_megatron.inference.engine import RolloutEngine
from tepo_megatron.inference.engines import beginning, build_engine, first_server_device, launch_of
from tepo_megatron.observability.metrics import Metrics
from tepo_megatron.observability.run_dir import rename_outcome
from tepo_megatron.observability.sinks import RunLog, replace_file
from tepo_megatron.observability.timing import Clock
from tepo_megatron.rewards import build_reward
from tepo_megatron.rollout import record
from tepo_megatron.rollout.collector import Collector
from tepo_megatron.rollout.custom import open_sampler
from tepo_megatron.rollout.experts import replayed_routing
from tepo_megatron.rollout.replay import Replay
from tepo_megatron.types import Rollout
from tepo_megatron.utils.background import BackgroundTask, NoTask
from tepo_megatron.utils.storage import writing

SERVER_LOG = "server.log"

EngineFactory = Callable[[Config], RolloutEngine]


class Driver:
    """Stands in for `MainDriver` on ranks other than 0."""

    @staticmethod
    @contextlib.contextmanager
    def open(cfg: Config, groups: ParallelDims, make_engine: EngineFactory | None = None) -> Iterator[Driver]:
        """Yield this rank's driver. On rank 0 the engine starts loading at once, while the actor is built.

        Args:
            cfg, groups: The run's config and mesh.
            make_engine: Replaces the engine of the config. ConfigError and DataError are raised before anything is started.
        """
        if not groups.is_main:
            yield Driver()
            return
        method = resolve(cfg)
        routing = replayed_routing(cfg.rollout, cfg.model.path, cfg.platform)
        tokenizer = load_tokenizer(cfg.model.path)

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False).input_ids)

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        if cfg.rollout.replay is not None:
            with RunLog(cfg.run_dir, cfg.logging, cfg.training.steps) as log:
                log.message(f"objective {cfg.objective.name}; rollouts of {cfg.rollout.replay}, no engine")
                for line in checks_that_are_off(cfg):
                    log.message(line)
                yield MainDriver(cfg, Replay(Path(cfg.rollout.replay), routing), None, Evaluations(cfg, [], None), log)
            return
        data = load_data(cfg.data, cfg.reward, tokenizer)
        stops = stop_tokens(cfg.model.path, tokenizer, cfg.rollout.stop_token_ids)
        suite = load_benchmarks(cfg.evaluation, tokenizer, cfg.data.max_prompt_tokens)
        benchmarks = BenchmarkRuns(suite, cfg.run_dir, cfg.model.path, cfg.seed, decode, stops) if suite else None
        if data.count < cfg.rollout.prompts_per_step:
            raise DataError(
                f"{cfg.data.name} has {data.count} usable prompts, fewer than rollout.prompts_per_step="
                f"{cfg.rollout.prompts_per_step}; lower that or add prompts"
            )
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(RunLog(cfg.run_dir, cfg.logging, cfg.training.steps))
            log.message(
                f"objective {cfg.objective.name}, {cfg.parallel.world_size} {cfg.platform} ranks; {data.count} prompts "
                f"to train on, {len(data.eval)} to evaluate on"
            )
            for line in data.told:
                log.message(line)
            if cfg.training.epochs == 1 and cfg.training.minibatch_prompts == cfg.rollout.prompts_per_step:
                log.message(
                    "one update per rollout batch: all ratios are 1 and all dH are 0, so clipping and KL mask never act"
                )
            if method.max_refills or method.overlong:
                log.message(f"rounds of prompts per step: up to {1 + method.max_refills}; overlong shaping: {method.overlong}")
            for line in (*checks_that_are_off(cfg), *beginning(cfg.rollout, cfg.run_dir / SERVER_LOG)):
                log.message(line)
            engine = stack.enter_context((make_engine or _engine)(cfg))
            function, mixed = cfg.rollout.function, cfg.rollout.in_flight == "continue"
            if function is not None:
                log.message(f"each sample is made by {function}")
            sampler, sampler_events = stack.enter_context(open_sampler(engine, function, encode, decode, mixed))
            engine.start()
            reward = stack.enter_context(build_reward(cfg.reward, decode))
            prompts = PromptStream.mixed(data.train, cfg.seed, cfg.data.shuffle)
            collector = Collector(
                *(cfg.rollout, sampler, reward, prompts, cfg.seed, stops),
                max_refills=method.max_refills,
                overlong=method.overlong,
                routing=routing,
            )
            evaluations = Evaluations(cfg, data.eval[: cfg.evaluation.max_problems], benchmarks)
            yield MainDriver(cfg, collector, prompts, evaluations, log, engine, sampler_events)

    def engine_when_ready(self) -> RolloutEngine | None:
        """Wait until the engine serves and return it; None on other ranks and without an engine."""
        return None

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine, in whatever state; None on other ranks and without an engine."""
        return None

    def engine_to_sleep(self) -> None:
        """Wait until the engine serves and put it to sleep, so that its memory is free when the actor is built."""

    def tell(self, text: str) -> None:
        """Log a message for the user."""

    def beside(self, work: Callable[[], Any]) -> NoTask:
        """Start work that needs the engine in a background thread and return its handle."""
        return NoTask()

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics] | None:
        """Return the step's graded rollouts and their metrics; add the seconds of sampling and grading to `clock`."""
        return None

    def evaluate(self, step: int) -> None:
        """Record the accuracy of the weights of `step` on the held-out problems and benchmarks, if there are any."""

    @property
    def best_step(self) -> int | None:
        """The best evaluated step after step 0, whose checkpoint is kept; None without `checkpoint.keep_best`."""
        return None

    @property
    def out_of_patience(self) -> bool:
        """True if `evaluation.patience` evaluations came after the best one."""
        return False

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        """Write the step's record, with the seconds of `clock`, to the metrics."""

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint after `step` must hold of this side of the run, as plain JSON."""
        return {}

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> None:
        """Restore `state`; None: start from the beginning, because the run has no checkpoint.

        `passed_over` says, for the log, why newer checkpoints were not used. Raises ConfigError if the state is of a step after
        the last one, and DataError if it is of other data; the run's records are unchanged then.
        """

    def check_in_place(self) -> None:
        """Raise RunReplacedError if another run has taken over the run's folder."""

    def saved(self, checkpoint: Saved | None) -> None:
        """Log a checkpoint that became complete; None: none did."""

    def finish(self, step: int) -> None:
        """Write the summary and the report after the last trained step."""


class MainDriver(Driver):
    """The driver of rank 0."""

    def __init__(
        self,
        cfg: Config,
        source: Collector | Replay,
        prompts: PromptStream | None,
        evaluations: Evaluations,
        log: RunLog,
        engine: RolloutEngine | None = None,
        sampler_events: Callable[[], list[str]] = list,
    ) -> None:
        """Store the parts of the run.

        Args:
            cfg: The run's config.
            source: Where the rollouts come from.
            prompts: Stream of training prompts; None if rollouts are replayed.
            evaluations: Evaluations of the run.
            log: Log of the run.
            engine: The engine; None if rollouts are replayed.
            sampler_events: Returns the sampler's messages for the user since the last call, beyond those of the engine.
        """
        self._engine, self._sampler_events = engine, sampler_events
        self._cfg, self._source, self._prompts, self._evaluations, self._log = cfg, source, prompts, evaluations, log
        self._clock, self._seconds_before = Clock(), 0.0
        self._restarts = 0  # server restarts that are in the metrics already
        self._positions: dict[int, dict[str, Any]] = {}  # step -> position in the prompt stream after its rollouts
        # one thread for all work: the graders that it starts are ended when it ends
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    @property
    def engine(self) -> RolloutEngine | None:
        return self._engine

    def engine_to_sleep(self) -> None:
        assert self.engine is not None, "the config allows colocation with an engine only"
        waiting = Clock()
        self.engine.wait_ready()
        self.engine.sleep()
        self._log.message(f"{self._cfg.rollout.engine} ready after {waiting.total:.0f} s; it sleeps while the actor is built")

    def tell(self, text: str) -> None:
        self._log.message(text)

    def beside(self, work: Callable[[], Any]) -> BackgroundTask:
        engine = self.engine
        return BackgroundTask(self._thread.submit(work), lambda: engine is not None and engine.needs_weights)

    def engine_when_ready(self) -> RolloutEngine | None:
        if self._engine is None:
            self._clock = Clock()
            return None
        waiting = Clock()
        self._engine.wait_ready()
        self._log.message(f"actor built; {self._cfg.rollout.engine} ready after {waiting.total:.0f} s more")
        self._clock = Clock()  # the run's seconds exclude the start
        return self._engine

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        rollouts, metrics = self._source.collect(step, clock)
        if isinstance(self._source, Collector):
            if step == self._cfg.training.steps:
                self._source.give_up()
            recent = {s: p for s, p in self._positions.items() if s >= step - 1 - self._cfg.rollout.max_staleness}
            self._positions = recent | {step: self._source.position()}
        self._tell_events()
        if self._cfg.rollout.record or self._cfg.rollout.only:
            self.check_in_place()
            record.write(self._cfg.run_dir / record.FOLDER, step, rollouts, metrics)
        if self.engine is not None:  # not part of the recorded rollouts: a run that replays them has no servers
            restarts = self.engine.restarts
            metrics.add("rollout/server_restarts", restarts - self._restarts)
            self._restarts = restarts
        return rollouts, metrics

    def evaluate(self, step: int) -> None:
        source = self._source
        if isinstance(source, Replay):
            return
        self.check_in_place()
        for line in self._evaluations.measure(step, source.sampler, source.reward, source.sampling):
            self._tell_events()
            self._log.message(line)

    @property
    def best_step(self) -> int | None:
        return self._evaluations.best_step

    @property
    def out_of_patience(self) -> bool:
        return self._evaluations.out_of_patience

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        self._log.write(step, log.record(clock))

    def _tell_events(self) -> None:
        for event in (*(self._engine.take_events() if self._engine is not None else ()), *self._sampler_events()):
            self._log.message(event)

    def state(self, step: int) -> dict[str, Any]:
        self._log.sync()  # every step that a checkpoint contains must be in the metrics file
        return {
            "step": step,
            "policy_version": step,
            "prompts": self._positions.get(step),  # a resumed run samples the prompts of later steps again
            "evaluations": self._evaluations.state_dict(),
            "seconds": self._seconds,
            "config": plain(self._cfg),
        }

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> None:
        for line in passed_over:
            self._log.message(f"resume: {line}")
        step = 0
        if state is None:
            self._log.message("resume: no checkpoint yet, so from the start")
        else:
            step = state["step"]
            self._go_on(state)
        rename_outcome(self._cfg.run_dir)  # from here on nothing can refuse to resume
        said = self._log.rewind(step)
        if self._cfg.rollout.replay is None:
            said += record.set_aside(self._cfg.run_dir / record.FOLDER, after=step)
            if self._cfg.rollout.record:
                said += record.faults(self._cfg.run_dir / record.FOLDER, last=step)
        self._evaluations.forget(after=step)
        for line in said:
            self._log.message(f"resume: {line}")

    def _go_on(self, state: Mapping[str, Any]) -> None:
        step, steps = state["step"], self._cfg.training.steps
        if step > steps:
            raise ConfigError(
                f"training.steps={steps}: the newest checkpoint is of step {step} already; set it to {step} or more"
            )
        if self._prompts is not None and state["prompts"] is not None:
            self._prompts.load_state_dict(state["prompts"])
        self._log.message(f"resume: from the checkpoint of step {step}")
        for change in differences(state["config"], plain(self._cfg)):
            if not change.startswith(("resume ", "overwrite ")):
                self._log.message(f"resume: {change}")
        if self._prompts is not None and state["prompts"] is None:
            self._log.message("resume: the steps before were replayed, so the prompts start with the first of the dataset")
        self._evaluations.load_state_dict(state["evaluations"])
        self._seconds_before = state["seconds"]

    def check_in_place(self) -> None:
        self._log.check_in_place()

    def saved(self, checkpoint: Saved | None) -> None:
        if checkpoint is not None:
            self._log.message(
                f"checkpoint of step {checkpoint.step}: {checkpoint.size / 2**20:.0f} MiB complete after "
                f"{checkpoint.seconds:.1f} s, of which training waited {checkpoint.blocked_seconds:.2f} s"
            )

    @property
    def _seconds(self) -> float:
        return self._seconds_before + self._clock.total

    def finish(self, step: int) -> None:
        self.check_in_place()
        run_dir, seconds = self._cfg.run_dir, self._seconds
        summary, told = self._evaluations.finish(step)
        summary |= {"steps": step, "seconds": seconds}
        if step < self._cfg.training.steps:
            summary["stopped_early"] = True
            self._log.message(f"ended early: no gain in evaluation.patience={self._cfg.evaluation.patience} evaluations")
        if (best := self.best_step) is not None:
            summary["best_step"] = best
            self._log.message(f"best evaluation: step {best}; its checkpoint: {complete(run_dir / 'checkpoints', best)}")
        from tepo_megatron.report import write_report  # the import takes a second, which other ranks need not spend

        with writing(run_dir):
            (run_dir / "report.png").unlink(missing_ok=True)  # so a picture that exists is newer than the summary
            replace_file(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
            page = write_report(run_dir)
        for line in told:
            self._log.message(line)
        self._log.message(f"{step} steps in {seconds:.0f} s; report: {page}")
        if self._cfg.export_hf:
            self._log.message(f"trained model: {run_dir / 'hf'}")


def _engine(cfg: Config) -> RolloutEngine:
    launch = launch_of(
        *(cfg.model, cfg.rollout, cfg.sync),
        platform=cfg.platform,
        max_model_len=cfg.served_tokens,
        seed=cfg.seed,
        first_device=first_server_device(cfg.rollout, cfg.platform, cfg.parallel.world_size),
    )
    return build_engine(cfg.rollout, launch, cfg.run_dir / SERVER_LOG)
