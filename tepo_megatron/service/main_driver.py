"""The rollout side of a run: collect and evaluate with the engine, write the log, and hold what a checkpoint needs of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.save_requests import answer_stop
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.storage import replace_file, writing
from tepo_megatron.base.types import Rollout
from tepo_megatron.checkpoint.folder import complete
from tepo_megatron.config import Config
from tepo_megatron.config.io import differences, plain, resolved_today
from tepo_megatron.data import PromptStream, refuse_changes
from tepo_megatron.engines.engine import ENGINE_PARTS, RolloutEngine
from tepo_megatron.evaluation.run_evaluations import Evaluations
from tepo_megatron.losses import build_objective
from tepo_megatron.monitor.run_dir import rename_outcome
from tepo_megatron.monitor.sinks import RunLog
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.rollout import decisions, record
from tepo_megatron.rollout.collector import Collector
from tepo_megatron.rollout.record import Replay
from tepo_megatron.rollout.streaming import Minibatch, MinibatchStream
from tepo_megatron.service.batch_memory import BatchHeader, BatchMemory
from tepo_megatron.service.method import has_idle_ratio
from tepo_megatron.service.trace import ServiceTrace


@dataclass(frozen=True)
class _Step:
    paths: Sequence[str]  # of the batch, or of its minibatches, in `BatchMemory`
    line: str  # of decisions.jsonl; empty if the rollouts are another run's
    position: Mapping[str, Any] | None  # in the prompt stream, after the step


class KeptSteps:
    """The collected steps that may be needed again.

    A checkpoint needs the position in the prompts after a step. Ranks that are restarted take the steps after the checkpoint
    again: they get the same batches, and the decisions on them are logged again, after the line of the new start.
    `keeps_batches`: whether a batch is kept until a checkpoint contains its step. False: until all ranks have read it.
    """

    def __init__(self, run_dir: Path, memory: BatchMemory, staleness: int) -> None:
        self._run_dir, self._memory, self._staleness = run_dir, memory, staleness
        self._steps: dict[int, _Step] = {}
        self.keeps_batches, self.released_until = False, 0

    def add(self, step: int, paths: Sequence[str], line: str, position: Mapping[str, Any] | None) -> None:
        """Add a step that was collected."""
        self._steps[step] = _Step(paths, line, position)
        if not self.keeps_batches:
            oldest = step - 1 - self._staleness
            self._steps = {number: kept for number, kept in self._steps.items() if number >= oldest}

    def position(self, step: int) -> Mapping[str, Any] | None:
        """Return the position in the prompt stream after a step; None if the step was not collected here."""
        return self._steps[step].position if step in self._steps else None

    def repeat_line(self, step: int) -> None:
        """Log the decisions on a step again, if it was collected already."""
        if step in self._steps and self._steps[step].line:
            decisions.append(self._run_dir, self._steps[step].line)

    def release_batch(self, path: str) -> None:
        """Release a batch that all ranks have read, unless it is kept."""
        if not self.keeps_batches:
            self._memory.release(path)

    def release_until(self, step: int) -> None:
        """Release the batches of the steps that a complete checkpoint contains."""
        self.released_until = max(step, self.released_until)
        for number in [number for number in self._steps if number <= step]:
            for path in self._steps.pop(number).paths:
                self._memory.release(path)


class MainDriver:
    """Makes the calls of `driver.Driver`, where they are described, in the process of the rollout service."""

    def __init__(
        self,
        cfg: Config,
        source: Collector | Replay,
        prompts: PromptStream | None,
        evaluations: Evaluations,
        log: RunLog,
        engine: RolloutEngine | None = None,
        sampler_events: Callable[[], list[str]] = list,
        tokenizer: Mapping[str, str] | None = None,
    ) -> None:
        """Store the parts of the run. `tokenizer` is what a resumed run compares of it."""
        self._compared = {"seed": cfg.seed, "rollout.prompts_per_step": cfg.rollout.prompts_per_step, **(tokenizer or {})}
        self.engine, self._sampler_events = engine, sampler_events
        self._cfg, self._source, self._prompts, self.evaluations, self.log = cfg, source, prompts, evaluations, log
        self._config = plain(cfg)  # of the present ranks
        self._clock, self._seconds_before = Clock(), 0.0
        self._memory = BatchMemory()
        self.kept, self.reopened = KeptSteps(cfg.run_dir, self._memory, cfg.rollout.max_staleness), False
        self.trace = ServiceTrace(cfg.run_dir, log.message)
        self._restarts = 0  # server restarts that are in the metrics already
        self._objective, self._noted_idle_ratio = build_objective(cfg.objective), cfg.rollout.only
        self._note_idle_ratio(
            -(-cfg.rollout.prompts_per_step // cfg.training.minibatch_prompts),
            "one update per rollout batch: all ratios are 1 and all dH are 0, so clipping and KL mask never act; if they "
            f"should, lower training.minibatch_prompts={cfg.training.minibatch_prompts} or raise training.epochs=1",
        )
        self._resumed_after: int | None = 0  # step after which this start goes on; None once decisions.jsonl says so

    def reopen(self, config: dict[str, Any]) -> None:
        """Go on with ranks that were restarted, perhaps with another mesh. `config` is theirs, as plain JSON."""
        self._config, self.reopened = config, True

    def sleep_engine(self) -> None:
        """Wait until the engine serves and put it to sleep. If ranks were restarted, it may sleep, or half of it."""
        assert self.engine is not None, "the config allows colocation with an engine only"
        waiting = Clock()
        self.engine.wait_ready()
        if tuple(self.engine.asleep) == ENGINE_PARTS[1:]:
            self.engine.wake("kv_cache")
        if not self.engine.asleep:
            self.engine.sleep()
        self.log.message(f"{self._cfg.rollout.engine} ready after {waiting.total:.0f} s; it sleeps while the actor is built")

    def wait_engine(self) -> None:
        """Wait until the engine serves, if there is one."""
        if self.engine is not None:
            waiting = Clock()
            with self.log.reminders(f"{self._cfg.rollout.engine} is starting"):
                self.engine.wait_ready()
            self.log.message(f"actor built; {self._cfg.rollout.engine} ready after {waiting.total:.0f} s more")
        if not self.reopened:
            self._clock = Clock()  # the run's seconds exclude the start

    def collect(self, step: int, hand_out: Callable[[BatchHeader], object]) -> BatchHeader:
        """Sample and grade the rollouts of a step; return the header of the file that they are in."""
        paths: list[str] = []  # of the minibatches that were handed out

        def hand_out_and_keep(header: BatchHeader) -> None:
            paths.append(header.path)
            hand_out(header)

        clock, stream = Clock(), self._stream(step, hand_out_and_keep)
        if self._resumed_after is not None:
            self.log.check_in_place()
            decisions.append(self._cfg.run_dir, decisions.start_line(self._resumed_after, self._config))
            self._resumed_after = None
        rollouts, metrics = self._source.collect(step, clock, stream)
        self.log.check_in_place()
        line, position = "", None
        if isinstance(self._source, Collector):
            if stream is not None:
                self._source.decisions.minibatches = stream.prompts
            line = self._source.decisions.line(step)
            decisions.append(self._cfg.run_dir, line)
            if step == self._cfg.training.steps:
                self._source.cancel()
            position = self._source.position()
        self._log_events()
        if self._cfg.rollout.record or self._cfg.rollout.only:
            record.write(self._cfg.run_dir / record.FOLDER, step, rollouts, metrics)
        if self.engine is not None:  # not part of the recorded rollouts: a run that replays them has no servers
            restarts = self.engine.restarts
            metrics.add("rollout/server_restarts", restarts - self._restarts)
            self._restarts = restarts
            for name, value in self.engine.server_metrics().items():
                metrics.add(name, value)
        self._note_few_groups(step, rollouts, stream)
        last = Minibatch(rollouts, list(range(len(rollouts)))) if stream is None else stream.finish()
        header = self._memory.write(last.rollouts, metrics.pairs(), clock.seconds, last.ids)
        self.kept.add(step, [*paths, header.path], line, position)
        return header

    def _note_idle_ratio(self, minibatches: int, text: str) -> None:
        """Log `text`, once in a run, if the ratio has no effect on a rollout batch of this number of minibatches."""
        if not self._noted_idle_ratio and has_idle_ratio(self._objective, self._cfg.training, minibatches):
            self._noted_idle_ratio = True
            self.log.message(text)

    def _note_few_groups(self, step: int, rollouts: Sequence[Rollout], stream: MinibatchStream | None) -> None:
        """Warn if filtering has left so few groups that they make one update."""
        training, groups = self._cfg.training, len({rollout.prompt_id for rollout in rollouts})
        self._note_idle_ratio(
            -(-groups // training.minibatch_prompts) if stream is None else sum(map(bool, stream.prompts)),
            f"warning: step {step} has one update, because {groups} of rollout.prompts_per_step="
            f"{self._cfg.rollout.prompts_per_step} groups are left: its ratios are 1 and its dH are 0, so clipping and KL "
            f"mask do not act in such steps (said once); lower training.minibatch_prompts={training.minibatch_prompts}, "
            "raise training.epochs or rollout.max_generation_rounds, or use easier or harder prompts",
        )

    def _stream(self, step: int, hand_out: Callable[[BatchHeader], object]) -> MinibatchStream | None:
        training = self._cfg.training
        if training.stream == "off" or self._cfg.rollout.only:
            return None

        def write(minibatch: Minibatch) -> None:
            self.log.check_in_place()
            hand_out(self._memory.write(minibatch.rollouts, {}, {}, minibatch.ids, is_last=False))

        seed = derive_seed(self._cfg.seed, "minibatches", step)
        groups = self._cfg.rollout.prompts_per_step
        return MinibatchStream(training.stream, groups, training.minibatch_prompts, seed, write)

    def evaluate(self, step: int) -> None:
        """Record the accuracy of the weights of `step`, if there is anything to evaluate on."""
        source = self._source
        if isinstance(source, Replay):
            return
        self.log.check_in_place()
        most = self._cfg.rollout.max_failed_share
        for line in self.evaluations.measure(step, source.sampler, source.reward, source.sampling, max_failed_share=most):
            self._log_events()
            self.log.message(line)
        self.log.write_evaluation(step, self.evaluations.record(step))

    def _log_events(self) -> None:
        for event in (*(self.engine.take_events() if self.engine is not None else ()), *self._sampler_events()):
            self.log.message(event)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that belongs into a checkpoint after `step`, as plain JSON."""
        self.log.sync()  # every step that a checkpoint contains must be in the metrics file
        return {
            "step": step,
            "policy_version": step,
            "prompts": self.kept.position(step),  # a resumed run samples the prompts of later steps again
            "evaluations": self.evaluations.state_dict(step),
            "seconds": self._seconds,
            "config": self._config,
            "compared": self._compared,
        }

    def resume(self, state: Mapping[str, Any] | None, passed_over: Sequence[str] = ()) -> None:
        """Restore the state. See `driver.Driver.resume`."""
        for line in passed_over:
            self.log.message(f"resume: {line}")
        step = 0 if state is None else state["step"]
        if self.reopened:
            self._resume_kept(step)
        elif state is None:
            self.log.message("resume: no checkpoint yet, so from the start")
        else:
            self._resumed_after = step
            self._restore(state)
        rename_outcome(self._cfg.run_dir)  # from here on nothing can refuse to resume
        lines = self.log.rewind(step, keeps_evaluations=self.reopened)
        if self._cfg.rollout.replay is None and not self.reopened:
            lines += record.set_aside(self._cfg.run_dir / record.FOLDER, after=step)
            if self._cfg.rollout.record:
                lines += record.faults(self._cfg.run_dir / record.FOLDER, last=step)
        if not self.reopened:
            self.evaluations.forget(after=step)
        for line in lines:
            self.log.message(f"resume: {line}")

    def _resume_kept(self, step: int) -> None:
        """Note that the ranks go on after `step`. Prompts, evaluations and batches are beyond it, and stay as they are."""
        where = f"from the checkpoint of step {step}" if step else "from the start, because there is no checkpoint yet"
        self.log.message(f"ranks restarted {where}; the rollout service and its servers have gone on")
        if staleness := self._cfg.rollout.max_staleness:
            self.log.message(
                f"the log-prob gate cannot compare tokens of versions before {step}, which steps {step + 1} to "
                f"{step + staleness} may train on: the ranks that had these weights are gone"
            )
        if self._resumed_after is None:
            decisions.append(self._cfg.run_dir, decisions.start_line(step, self._config))
        else:
            self._resumed_after = step

    def _restore(self, state: Mapping[str, Any]) -> None:
        step, steps = state["step"], self._cfg.training.steps
        if step > steps:
            raise ConfigError(
                f"training.steps={steps}: the newest checkpoint is of step {step} already; set it to {step} or more"
            )
        if self._prompts is not None and state["prompts"] is not None:
            refuse_changes(state.get("compared", {}), self._compared)  # checkpoints of before have none
            self._prompts.load_state_dict(state["prompts"])
        self.log.message(f"resume: from the checkpoint of step {step}")
        for change in differences(resolved_today(state["config"]), plain(self._cfg)):
            if not change.startswith(("resume ", "overwrite ")):
                self.log.message(f"resume: {change}")
        if self._prompts is not None and state["prompts"] is None:
            self.log.message("resume: the steps before were replayed, so the prompts start with the first of the dataset")
        self.evaluations.load_state_dict(state["evaluations"])
        self._seconds_before = state["seconds"]

    @property
    def _seconds(self) -> float:
        return self._seconds_before + self._clock.total

    def finish(self, step: int, on_request: bool = False) -> None:
        """Write the summary and the report, or answer the request to end. See `driver.Driver.finish`."""
        self.log.check_in_place()
        if on_request:
            self.log.message(f"ended on request after step {step}; go on with tepo resume {self._cfg.run_dir}")
            self.log.sync()
            answer_stop(self._cfg.run_dir)
            return
        run_dir, seconds = self._cfg.run_dir, self._seconds
        summary, lines = self.evaluations.finish(step)
        summary |= {"steps": step, "seconds": seconds}
        if step < self._cfg.training.steps:
            summary["stopped_early"] = True
            self.log.message(f"ended early: no gain in evaluation.patience={self._cfg.evaluation.patience} evaluations")
        if (best := self.evaluations.best_step) is not None:
            summary["best_step"] = best
            self.log.message(f"best evaluation: step {best}; its checkpoint: {complete(run_dir / 'checkpoints', best)}")
        from tepo_megatron.report.write import write_report  # the import takes a second, which other ranks need not spend

        with writing(run_dir):
            (run_dir / "report.png").unlink(missing_ok=True)  # so a picture that exists is newer than the summary
            replace_file(run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
            page = write_report(run_dir)
        for line in lines:
            self.log.message(line)
        self.log.message(f"{step} steps in {seconds:.0f} s; report: {page}")
        if self._cfg.export_hf:
            self.log.message(f"trained model: {run_dir / 'hf'}")
