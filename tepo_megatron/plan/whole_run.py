"""Predict the hours of a whole run: steps, evaluations, and the time that training waits for checkpoints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tepo_megatron.config import EvaluationConfig, RolloutConfig
from tepo_megatron.config.data import SLICE
from tepo_megatron.plan import parameters
from tepo_megatron.plan.gpus import ASSUMED, Assumptions
from tepo_megatron.plan.memory import checkpoint_bytes
from tepo_megatron.plan.step import Predictor

# name -> (problems, samples per problem), copied from `evaluation.benchmarks`, whose package needs torch
BENCHMARKS: Mapping[str, tuple[int, int]] = {
    "aime24": (30, 32), "aime25": (30, 32), "amc": (83, 32), "math500": (500, 1), "omni_math": (4428, 1),
    "olympiad_bench": (674, 1), "minerva": (272, 1),
}  # fmt: skip


@dataclass(frozen=True)
class WholeRun:
    """Numbers of events in a run, and their durations.

    Attributes:
        step: Seconds of a step.
        evaluation: Seconds of an evaluation.
        checkpoint: Seconds that training waits for a checkpoint.
        ending: Seconds after the last step.
        gpus: GPUs of trainer, engine and judges.
        error: `Assumptions.error`.
    """

    steps: int
    step: float
    evaluations: int
    evaluation: float
    checkpoints: int
    checkpoint: float
    ending: float
    gpus: int
    error: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the run, without the start of servers and ranks."""
        return self.steps * self.step + self.evaluations * self.evaluation + self.checkpoints * self.checkpoint + self.ending

    @property
    def gpu_hours(self) -> float:
        """Return hours times GPUs."""
        return self.seconds / 3600 * self.gpus


def time_range(predicted: float, error: float) -> tuple[float, float]:
    """Return (low, high), the range of real values for a prediction."""
    return predicted / (1 + error), predicted / (1 - error)


def whole_run(predictor: Predictor, step_seconds: float) -> WholeRun:
    """Return the prediction for the whole run.

    Args:
        step_seconds: Seconds of a step.
    """
    cfg, assumed = predictor.cfg, predictor.machine.assumed
    each, last = _checkpoint_seconds(predictor)
    every = cfg.checkpoint.every
    return WholeRun(
        steps=cfg.training.steps,
        step=step_seconds,
        evaluations=_evaluations(cfg.rollout, cfg.evaluation.every, cfg.training.steps),
        evaluation=_evaluation_seconds(predictor),
        checkpoints=-(-cfg.training.steps // every) if every else 0,
        checkpoint=each,
        ending=last,
        gpus=predictor.placement.gpus + cfg.reward.judge_gpus,
        error=assumed.error,
    )


def _evaluations(rollout: RolloutConfig, every: int, steps: int) -> int:
    """Return the number of evaluations: before the first step, after the last, and every `evaluation.every` steps between."""
    if rollout.replay is not None or rollout.only:
        return 0
    return 2 + ((steps - 1) // every if every else 0)


def asked(
    held_out: str | None, evaluation: EvaluationConfig, max_response_tokens: int, assumed: Assumptions = ASSUMED
) -> Iterator[tuple[int, int, int]]:
    """Yield (problems, samples per problem, maximum response tokens) of each part of an evaluation, in order."""
    most = evaluation.max_problems
    if held_out is not None:
        sliced = SLICE.fullmatch(held_out)
        bounds = [] if sliced is None else [sliced["start"] or "0", sliced["stop"] or ""]
        known = int(bounds[1]) - int(bounds[0]) if bounds and all(bound.isdigit() for bound in bounds) else assumed.held_out
        yield min(known, most or known), evaluation.samples, max_response_tokens
    for name in evaluation.benchmarks:
        problems, samples = BENCHMARKS[name]
        if samples > 1:  # else decoding is greedy
            samples = evaluation.benchmark_samples or samples
        yield min(problems, most or problems), samples, evaluation.benchmark_tokens


def _evaluation_seconds(predictor: Predictor) -> float:
    """Return the seconds of an evaluation, assuming prompts and responses as long as in training."""
    cfg, work, seconds = predictor.cfg, predictor.workload, 0.0
    parts = asked(cfg.data.eval, cfg.evaluation, cfg.rollout.max_response_tokens, predictor.machine.assumed)
    for problems, samples, longest in parts:
        lengths = replace(work, longest=longest, response=min(work.response, longest))
        seconds += predictor.served_seconds(problems, samples, lengths)
    return seconds


def _checkpoint_seconds(predictor: Predictor) -> tuple[float, float]:
    """Return (seconds per checkpoint, seconds after the last step) that block: host copies and writes not overlapped."""
    cfg, model, disk = predictor.cfg, predictor.model, predictor.machine.assumed.disk
    mine = checkpoint_bytes(parameters.held(model.family.rows, model.arch, cfg.parallel, 0), cfg.model.dtype)
    whole = parameters.total_parameters(model.family.rows, model.arch) * model.element / disk
    each = mine / predictor.host_rate + (whole if cfg.checkpoint.hf else 0.0)
    last = whole if cfg.export_hf else 0.0
    if not cfg.checkpoint.asynchronous:
        each += mine / disk
    elif cfg.checkpoint.every:
        last += mine / disk
    return each, last
