"""A run: all sections, and what they ask of each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from tepo_megatron.config import megatron as megatron_section
from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.fields import NonNegative, config
from tepo_megatron.config.megatron import MegatronConfig
from tepo_megatron.config.model import ModelConfig, ParallelConfig, check_attention
from tepo_megatron.config.objective import ObjectiveConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.config.rollout import RolloutConfig
from tepo_megatron.config.training import OptimizerConfig, SyncConfig, TrainingConfig, check_minibatch, check_recompute
from tepo_megatron.config.upkeep import CheckpointConfig, EvaluationConfig, LoggingConfig


@config
class Config:
    """One run."""

    name: str  # Run name; the run is written to output/name/.
    model: ModelConfig
    data: DataConfig
    platform: Literal["cpu", "cuda"] = "cuda"  # Device of ranks and servers: CPUs with gloo, or GPUs with NCCL.
    seed: NonNegative = 0  # Seed of every random choice of the run.
    output: str = "runs"  # Folder that contains the folders of runs.
    overwrite: bool = False  # Replace an existing run of this name.
    resume: bool = False  # Continue a run of this name from its newest checkpoint, or from the start if it has none.
    export_hf: bool = True  # Write the trained model as a Hugging Face directory to output/name/hf/.
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(f"name={self.name!r} must be a plain folder name: letters, digits and . _ + -")
        self._check_evaluation()
        self._check_lengths()
        self._check_what_runs()
        check_minibatch(self.training, self.rollout.prompts_per_step, self.sequence_tokens)
        check_recompute(self.training, self.rollout.replay_experts)
        check_attention(self.model, self.parallel, self.training.share_prompts, self.platform)
        megatron_section.check_fusion(self.megatron, self.training.offload_activations)
        megatron_section.check_bf16_layers(self.megatron, self.model)
        megatron_section.check_platform(self.megatron, self.platform)
        megatron_section.check_overlap(self.megatron, self.parallel, self.model.attention, self.platform)
        megatron_section.check_optimizer_state(self.megatron, self.checkpoint.every, self.resume, self.rollout.colocate)
        self._check_sync()
        self._check_quantize()

    def _check_evaluation(self) -> None:
        """Check when evaluations happen, and what depends on them: early stopping and the best checkpoint."""
        if self.evaluation.every and self.data.eval is None and not self.evaluation.benchmarks:
            raise ValueError(
                f"evaluation.every={self.evaluation.every} needs data.eval or evaluation.benchmarks; give it a file or set "
                "every to 0"
            )
        if self.evaluation.patience is not None and not self.evaluation.every:
            raise ValueError(
                f"evaluation.patience={self.evaluation.patience} counts evaluations between steps, and evaluation.every=0 "
                "makes none; raise that, or remove patience"
            )
        if self.evaluation.patience is not None and self.rollout.max_staleness:
            raise ValueError(
                f"evaluation.patience={self.evaluation.patience} ends the run at the step that is evaluated, and "
                f"rollout.max_staleness={self.rollout.max_staleness} is steps ahead by then; set one of them to its default"
            )
        every = self.checkpoint.every
        if self.checkpoint.keep_best and not (every and self.evaluation.every and self.evaluation.every % every == 0):
            raise ValueError(
                f"checkpoint.keep_best=true needs a checkpoint of every step that is evaluated, and evaluation.every="
                f"{self.evaluation.every} is no multiple of checkpoint.every={every}; make it one, or set keep_best to false"
            )

    def _check_lengths(self) -> None:
        """Check that the longest prompt leaves tokens for a response."""
        limit, prompt = self.rollout.max_sequence_tokens, self.data.max_prompt_tokens
        if limit is not None and limit <= prompt:
            raise ValueError(
                f"rollout.max_sequence_tokens={limit} leaves no response after data.max_prompt_tokens={prompt}; raise it or "
                "lower that"
            )

    def _check_what_runs(self) -> None:
        """Check that resume and overwrite, and sampling alone and training, do not contradict each other."""
        if self.resume and self.overwrite:
            raise ValueError("resume=true and overwrite=true contradict each other; set one of them to false")
        if self.rollout.only:
            if self.rollout.replay is not None:
                raise ValueError("rollout.only=true samples and rollout.replay does not; remove one of them")
            if self.parallel.world_size > 1:
                raise ValueError(
                    f"rollout.only=true trains nothing: one rank is enough, not {self.parallel.world_size}; set parallel.* to 1"
                )

    def _check_sync(self) -> None:
        """Whom weights reach, and in time."""
        if self.sync.transport == "group" and self.sync.timeout_seconds >= self.rollout.server.silent_seconds:
            raise ValueError(
                f"sync.timeout_seconds={self.sync.timeout_seconds:g} must be below rollout.server.silent_seconds="
                f"{self.rollout.server.silent_seconds:g}: a server that waits for weights may not answer about its health"
            )
        join_seconds = self.sync.join_limit(self.platform)
        if self.sync.transport == "group" and join_seconds >= self.parallel.stuck_seconds:
            raise ValueError(
                f"sync.join_seconds={join_seconds:g} must be below 0.9 of parallel.timeout_seconds="
                f"{self.parallel.timeout_seconds:g}, after which a rank that forms a group counts as stuck; lower the first or "
                "raise the second"
            )
        sends = not self.rollout.only and self.rollout.replay is None
        if sends and self.rollout.server.remote and self.sync.transport == "ipc":
            raise ValueError(
                "sync.transport=ipc lends memory of this machine's processes, which servers that others start (rollout.server."
                "urls or rollout.server.rendezvous) may not see; use sync.transport=group, or shm with sync.folder"
            )
        elsewhere = sends and self.rollout.server.remote and not self.rollout.colocate
        if elsewhere and self.sync.transport == "shm" and self.sync.folder is None:
            raise ValueError(
                "sync.folder is not set, and shared memory does not reach servers of other machines; set it to a folder that "
                "the trainer shares with the servers of rollout.server.urls or rollout.server.rendezvous (/dev/shm where they "
                "are on one machine), or use sync.transport=group"
            )

        if self.rollout.colocate and self.sync.transport == "group" and self.platform == "cuda":
            raise ValueError(
                "sync.transport=group with rollout.colocate=true: NCCL has no group of two processes on one GPU; use "
                "sync.transport=ipc on one machine, or shm"
            )

    def _check_quantize(self) -> None:
        """What servers of an FP8 model need."""
        if self.sync.quantize == "none":
            return
        if self.platform == "cpu":
            raise ValueError(
                "sync.quantize=fp8 needs platform=cuda: on CPUs both engines compute blockwise FP8 with AMX alone, which was "
                "not tried; set it to none"
            )
        precision = self.rollout.server.precision or self.model.dtype
        if precision != "bf16":
            raise ValueError(
                f"sync.quantize=fp8 needs what is not quantized to be served in bf16, not {precision}; set "
                "rollout.server.precision=bf16, or sync.quantize=none"
            )
        if self.rollout.only:
            raise ValueError(
                "sync.quantize=fp8 has servers wait for their first weights, and rollout.only=true sends none; set it to none"
            )

    @property
    def sequence_tokens(self) -> int:
        """Prompt and response tokens of a sequence at most."""
        most = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return min(most, self.rollout.max_sequence_tokens or most)

    @property
    def served_tokens(self) -> int:
        """The same of what the servers of the run are asked for, benchmarks included."""
        benchmarks = self.data.max_prompt_tokens + self.evaluation.benchmark_tokens if self.evaluation.benchmarks else 0
        return max(self.sequence_tokens, benchmarks)

    @property
    def run_dir(self) -> Path:
        """output/name."""
        return Path(self.output) / self.name
