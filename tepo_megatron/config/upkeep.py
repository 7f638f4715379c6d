"""Evaluations, checkpoints and logs of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, config

PAPER_TOKENS = 8192  # of a response to a benchmark's problem (Section 4.1)
Benchmark = Literal["aime24", "aime25", "amc", "math500", "omni_math", "olympiad_bench", "minerva"]  # the columns of Table 1


@config
class EvaluationConfig:
    """Accuracy on `data.eval` and on benchmarks, before the first and after the last step, and every `every` steps (0: never
    between). samples, temperature: of `data.eval`; benchmarks have their own (`evaluation/benchmarks.py`).
    """

    every: NonNegative = 0
    samples: Positive = 1
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    max_problems: Positive | None = None  # the first so many of data.eval, and of each benchmark
    benchmarks: list[Benchmark] = Field(default_factory=list)  # each by the paper's protocol
    # holds NAME.jsonl for benchmarks that are not to be fetched from the Hugging Face hub, their rows as there
    benchmark_folder: str | None = None
    benchmark_samples: Positive | None = None  # of those that are sampled; None: 32 as in the paper. The others are greedy
    benchmark_tokens: Positive = PAPER_TOKENS  # of a response at most
    benchmark_prompt: str | None = None  # in the place of the benchmarks' own; <problem> stands for the problem
    # the run ends after so many evaluations in a row without a new highest accuracy (of the benchmarks, else of data.eval)
    patience: Positive | None = None

    def __post_init__(self) -> None:
        if len(set(self.benchmarks)) < len(self.benchmarks):
            raise ValueError(f"benchmarks={self.benchmarks} names one twice")
        if self.benchmark_prompt is not None and self.benchmark_prompt.count("<problem>") != 1:
            raise ValueError(f"benchmark_prompt={self.benchmark_prompt!r} must hold <problem> once, where the problem goes")
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature={self.temperature} is raised to 0.01 by vLLM; use 0 (greedy) or at least 0.01")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples={self.samples} at temperature=0 would all be the same; use samples=1 or temperature > 0")


@config
class CheckpointConfig:
    """A run can go on from its checkpoints, `checkpoints/` in the run's folder, which all ranks must share.

    every: steps between them; 0: never. keep_last: how many of the newest stay; keep_every: those of steps that it divides stay
    too. asynchronous: training goes on while they are written, from a copy in host memory of what each rank writes. hf: each
    also holds the model as a Hugging Face directory, which training waits for.
    """

    every: NonNegative = 0
    keep_last: Positive = 2
    keep_every: Positive | None = None
    keep_best: bool = False  # that of the step with the highest accuracy (of the benchmarks, else of data.eval) stays too
    asynchronous: bool = True
    hf: bool = False
    timeout_seconds: PositiveFloat = 1800.0  # a checkpoint that takes longer to write, on any rank, has failed


@config
class LoggingConfig:
    """metrics.jsonl and log.txt are always written.

    noise_floor_every: steps between measurements of the rounding noise in dH, each of which repeats the old pass under another
    packing; the first is at step 1; 0: never. memory: record what ranks and servers hold at the end of each phase, as
    rollout.colocate does by itself.
    """

    noise_floor_every: NonNegative = 20
    memory: bool = False
    tensorboard: bool = False  # the same metrics in its files, in the run's folder
    wandb_project: str | None = None  # the same metrics at Weights & Biases
