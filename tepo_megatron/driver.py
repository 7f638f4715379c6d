"""Rank 0's side of a run: the engine, the grader, the prompts and the log. On other ranks every method does nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator

from tepo_megatron.config import Config
from tepo_megatron.data import PromptStream, load_prompts, load_tokenizer
from tepo_megatron.errors import DataError
from tepo_megatron.evaluation import Accuracy, evaluate
from tepo_megatron.metrics import Metrics
from tepo_megatron.parallel import Groups
from tepo_megatron.report import write_report
from tepo_megatron.rewards import build_reward
from tepo_megatron.rollout.collector import Collector
from tepo_megatron.rollout.engine import RolloutEngine
from tepo_megatron.rollout.vllm import VllmEngine
from tepo_megatron.seeding import derive_seed
from tepo_megatron.sinks import RunLog
from tepo_megatron.step_log import StepLog
from tepo_megatron.timing import Clock
from tepo_megatron.types import Prompt, Rollout, SamplingParams

SERVER_LOG = "server.log"

EngineFactory = Callable[[Config], RolloutEngine]


class Driver:
    """The stand-in on ranks other than 0."""

    @staticmethod
    @contextlib.contextmanager
    def open(cfg: Config, groups: Groups, make_engine: EngineFactory | None = None) -> Iterator[Driver]:
        """The driver of this rank; on rank 0 the engine starts loading at once, while the actor is built.

        make_engine: instead of the engine that the config names. Raises DataError before anything is started.
        """
        if not groups.is_main:
            yield Driver()
            return
        tokenizer = load_tokenizer(cfg.model.path)
        data = cfg.data

        def read(path: str) -> tuple[list[Prompt], int]:
            return load_prompts(path, tokenizer, data.prompt_key, data.answer_key, data.max_prompt_tokens)

        train, dropped = read(data.train)
        held_out, dropped_held_out = read(data.eval) if data.eval else ([], 0)
        if len(train) < cfg.rollout.prompts_per_step:
            raise DataError(
                f"{data.train} has {len(train)} usable prompts, fewer than rollout.prompts_per_step="
                f"{cfg.rollout.prompts_per_step}; lower that or add prompts"
            )
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(RunLog(cfg.run_dir, cfg.logging, cfg.training.steps))
            log.message(
                f"objective {cfg.objective.name}, {cfg.parallel.world_size} {cfg.platform} ranks; {len(train)} prompts "
                f"to train on, {len(held_out)} to evaluate on; dropped, over data.max_prompt_tokens={data.max_prompt_tokens}: "
                f"{dropped} and {dropped_held_out}"
            )
            log.message(f"starting {cfg.rollout.engine}; its log: {cfg.run_dir / SERVER_LOG}")
            engine = stack.enter_context((make_engine or _vllm)(cfg))
            engine.start()
            reward = stack.enter_context(build_reward(cfg.reward, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)))
            prompts = PromptStream(train, cfg.seed, data.shuffle)
            collector = Collector(cfg.rollout, engine, reward, prompts, cfg.seed)
            yield MainDriver(cfg, collector, held_out[: cfg.evaluation.max_problems], log)

    def engine_when_ready(self) -> RolloutEngine | None:
        """The engine, once it serves."""
        return None

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics] | None:
        """The step's graded rollouts and their metrics."""
        return None

    def evaluate(self, step: int) -> Accuracy | None:
        """Accuracy on the held-out problems, None without any."""
        return None

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        """Write the step's record."""

    def finish(self, before: Accuracy | None, after: Accuracy | None, seconds: float) -> None:
        """Write the summary and the picture."""


class MainDriver(Driver):
    """Rank 0's driver."""

    def __init__(self, cfg: Config, collector: Collector, held_out: list[Prompt], log: RunLog) -> None:
        self._cfg, self._collector, self._held_out, self._log = cfg, collector, held_out, log

    def engine_when_ready(self) -> RolloutEngine:
        waiting = Clock()
        self._collector.engine.wait_ready()
        self._log.message(f"actor built; {self._cfg.rollout.engine} ready after {waiting.total:.0f} s more")
        return self._collector.engine

    def collect(self, step: int, clock: Clock) -> tuple[list[Rollout], Metrics]:
        return self._collector.collect(step, clock)

    def evaluate(self, step: int) -> Accuracy | None:
        if not self._held_out:
            return None
        cfg = self._cfg.evaluation
        sampling = SamplingParams(cfg.samples, cfg.temperature, self._cfg.rollout.max_response_tokens)
        # one seed for all evaluations: before and after are compared on the same random numbers
        seed = derive_seed(self._cfg.seed, "evaluation")
        result = evaluate(self._collector.engine, self._collector.reward, self._held_out, sampling, seed)
        self._log.message(f"accuracy at step {step}: {result}, temperature {cfg.temperature:g}")
        return result

    def log_step(self, step: int, log: StepLog, clock: Clock) -> None:
        self._log.write(step, log.record(clock))

    def finish(self, before: Accuracy | None, after: Accuracy | None, seconds: float) -> None:
        run_dir = self._cfg.run_dir
        summary = {
            "accuracy_before": before and before.mean,
            "accuracy_after": after and after.mean,
            "standard_error": {
                "before": before and before.standard_error,
                "after": after and after.standard_error,
            },
            "steps": self._cfg.training.steps,
            "seconds": seconds,
        }
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        picture = write_report(run_dir)
        if before and after:
            self._log.message(f"accuracy before: {before}\naccuracy after:  {after}")
        self._log.message(f"{self._cfg.training.steps} steps in {seconds:.0f} s; curves: {picture}")
        if self._cfg.export_hf:
            self._log.message(f"trained model: {run_dir / 'hf'}")


def _vllm(cfg: Config) -> RolloutEngine:
    return VllmEngine(
        cfg.rollout,
        model_path=cfg.model.path,
        max_model_len=cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens,
        platform=cfg.platform,
        precision=cfg.rollout.server.precision or cfg.model.precision,
        log_path=cfg.run_dir / SERVER_LOG,
        seed=cfg.seed,
    )
