"""Sections `evaluation`, `checkpoint` and `logging`: what a run does besides training."""

import re
from typing import Annotated, Literal

from pydantic import Field

from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, config
from tepo_megatron.config.rollout import RolloutConfig

PAPER_TOKENS = 8192  # maximum length of a response to a benchmark's problem (Section 4.1)
Benchmark = Literal["aime24", "aime25", "amc", "math500", "omni_math", "olympiad_bench", "minerva"]  # the columns of Table 1


@config
class EvaluationConfig:
    """Accuracy on `data.eval` and on benchmarks. Both are evaluated before the first and after the last step."""

    # Number of steps between evaluations during training; 0: no evaluations between the first and the last one.
    every: NonNegative = 0
    # Number of responses to each problem of data.eval. Benchmarks have their own number.
    samples: Positive = 1
    # Sampling temperature for data.eval; 0 decodes greedily. Benchmarks have their own temperature.
    temperature: NonNegativeFloat = 1.0
    # Maximum number of problems of data.eval and of each benchmark: the first ones are taken. null: all.
    max_problems: Positive | None = None
    # Benchmarks to evaluate, each by the protocol of the paper.
    benchmarks: list[Benchmark] = Field(default_factory=list)
    # Folder with a file NAME.jsonl for each benchmark that is read from there, with the rows of the original dataset. Other
    # benchmarks are downloaded from the Hugging Face Hub.
    benchmark_folder: str | None = None
    # Number of responses to each problem of the benchmarks that are sampled; the other benchmarks are decoded greedily. null:
    # 32, as in the paper.
    benchmark_samples: Positive | None = None
    # Maximum number of tokens of a response to a benchmark's problem.
    benchmark_tokens: Positive = PAPER_TOKENS
    # Prompt for all benchmarks instead of their own. <problem> in it is replaced by the problem.
    benchmark_prompt: str | None = None
    # Number of consecutive evaluations without a new highest accuracy (on the benchmarks, else on data.eval) after which the
    # run ends early. null: never.
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


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, rollout: RolloutConfig) -> None:
    """Check that evaluations have problems, and that early stopping has evaluations. Raises ValueError."""
    if evaluation.every and data.eval is None and not evaluation.benchmarks:
        raise ValueError(
            f"evaluation.every={evaluation.every} needs data.eval or evaluation.benchmarks; give it a file or set every to 0"
        )
    if evaluation.patience is not None and not evaluation.every:
        raise ValueError(
            f"evaluation.patience={evaluation.patience} counts evaluations between steps, and evaluation.every=0 makes none; "
            "raise that, or remove patience"
        )
    if evaluation.patience is not None and rollout.max_staleness:
        raise ValueError(
            f"evaluation.patience={evaluation.patience} ends the run at the step that is evaluated, and "
            f"rollout.max_staleness={rollout.max_staleness} is steps ahead by then; set one of them to its default"
        )


@config
class CheckpointConfig:
    """Checkpoints from which a run can resume, in `checkpoints/` of the run's folder. All ranks must share that folder."""

    # Number of steps between checkpoints, or the time since the last one, or the start, after which a step is followed by one,
    # as "30 min"; 0: no checkpoints.
    every: int | str = "30 min"
    # Number of the newest checkpoints that are kept.
    keep_last: Positive = 2
    # Also keep checkpoints whose step is a multiple of this number.
    keep_every: Positive | None = None
    # Also keep the checkpoint of the step with the highest accuracy (on the benchmarks, else on data.eval).
    keep_best: bool = False
    # Continue training while a checkpoint is written, from a copy in host memory of what each rank writes.
    asynchronous: bool = True
    # Add the model as a Hugging Face directory to each checkpoint. Training waits while it is written.
    hf: bool = False
    # Number of consecutive restarts of the ranks from the newest checkpoint, after a rank was killed, hung or failed
    # unexpectedly, until a newer checkpoint is complete; 0: the run ends. The rollout service and the servers live on, and keep
    # in host memory what was sampled for the steps after that checkpoint. Needs a number of steps in `every`.
    max_restarts: NonNegative = 3

    def __post_init__(self) -> None:
        if not isinstance(self.every, str) and self.every >= 0:
            return
        if not isinstance(self.every, str) or not re.fullmatch(r"\d+(\.\d+)? ?min", self.every) or not self.minutes:
            raise ValueError(f"checkpoint.every={self.every!r}: give a number of steps, minutes as '30 min', or 0 for none")

    @property
    def steps(self) -> int:
        """Number of steps between checkpoints; 0 if none is written, or if they are written by time."""
        return 0 if isinstance(self.every, str) else self.every

    @property
    def minutes(self) -> float:
        """Minutes between checkpoints; 0 if they are not written by time."""
        return float(self.every.removesuffix("min")) if isinstance(self.every, str) else 0.0

    def is_due(self, seconds: float) -> bool:
        """Return whether a checkpoint is due by time, this many seconds after the one before."""
        return 0 < 60 * self.minutes <= seconds


def check_checkpoint(checkpoint: CheckpointConfig, evaluation: EvaluationConfig) -> None:
    """Check that the best checkpoint can be kept. Raises ValueError."""
    every = checkpoint.steps
    if checkpoint.keep_best and not (every and evaluation.every and evaluation.every % every == 0):
        raise ValueError(
            f"checkpoint.keep_best=true needs a checkpoint of every step that is evaluated, and evaluation.every="
            f"{evaluation.every} is no multiple of checkpoint.every={checkpoint.every}; make it one, or set keep_best to false"
        )


@config
class LoggingConfig:
    """Logs of a run. metrics.jsonl and log.txt are always written."""

    # Number of steps between measurements of the rounding noise in the entropy change dH, beginning with step 1; 0: never. Each
    # measurement repeats the pass for the old log-probs under another packing.
    noise_floor_every: NonNegative = 20
    # Number of steps between records of every number that each token's loss is made of, for `tepo audit`, beginning with step
    # 1; 0: never. A record takes 70 to 110 bytes for each response token and update, in audit/ of the run's folder, which all
    # ranks must share.
    audit_every: NonNegative = 0
    # Number of steps between traced steps, whose timeline is written to traces/ of the run's folder, which all ranks must share
    # (docs/traces.md); 0: only the steps that `tepo trace` asks for.
    trace_every: NonNegative = 0
    # Record the memory that ranks and servers hold at the end of each phase. rollout.colocate always records it.
    memory: bool = False
    # Write the metrics as TensorBoard files into the run's folder, too.
    tensorboard: bool = False
    # Port on which the rollout service serves the metrics of run and servers to Prometheus (docs/metrics.md). The run's folder
    # has the key and the address. 0: a free port. null: none; the engines then count nothing.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    # Address on which the metrics are served. Others than loopback can be reached from other machines, without encryption.
    metrics_host: str = "127.0.0.1"
    # Weights & Biases project to which the metrics are sent, too. null: none.
    wandb_project: str | None = None
