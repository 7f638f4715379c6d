"""Rank 0's side of a run: the engine, the grader, the prompts and the log. On other ranks every method does nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from tepo_megatron.config import Config
from tepo_megatron.data import PromptStream, load_prompts, load_tokenizer
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


class Driver:
    """The stand-in on ranks other than 0."""

    @staticmethod
    @contextlib.contextmanager
    def open(cfg: Config, groups: Groups) -> Iterator[Driver]:
        """The driver of this rank; on rank 0 the engine starts loading at once, while the actor is built."""
        if not groups.is_main:
            yield Driver()
            return
        tokenizer = load_tokenizer(cfg.model.path)
        data = cfg.data

        def read(path: str) -> tuple[list[Prompt], int]:
            return load_prompts(path, tokenizer, data.prompt_key, data.answer_key, data.max_prompt_tokens)

        train, dropped = read(data.train)
        held_out = read(data.eval)[0][: cfg.evaluation.max_problems] if data.eval else []
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(RunLog(cfg.run_dir, cfg.logging, cfg.training.steps))
            log.message(f"{len(train)} prompts ({dropped} dropped: over data.max_prompt_tokens={data.max_prompt_tokens})")
            engine = stack.enter_context(_engine(cfg))
            engine.start()
            reward = stack.enter_context(build_reward(cfg.reward, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)))
            prompts = PromptStream(train, cfg.seed, data.shuffle)
            collector = Collector(cfg.rollout, engine, reward, prompts, cfg.seed)
            yield MainDriver(cfg, collector, held_out, log)

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
        self._collector.engine.wait_ready()
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


def _engine(cfg: Config) -> VllmEngine:
    return VllmEngine(
        cfg.rollout,
        model_path=cfg.model.path,
        max_model_len=cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens,
        platform=cfg.platform,
        log_path=Path(cfg.run_dir) / "vllm.log",
        seed=cfg.seed,
    )
