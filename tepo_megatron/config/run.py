"""A run: all sections, and what they ask of each other."""

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
from tepo_megatron.config.rollout import RolloutConfig, check_batch, check_stream
from tepo_megatron.config.sync import SyncConfig, check_quantize, check_transport
from tepo_megatron.config.training import OptimizerConfig, SftConfig, TrainingConfig, check_recompute, check_sequence
from tepo_megatron.config.upkeep import CheckpointConfig, EvaluationConfig, LoggingConfig, check_checkpoint, check_evaluation


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
    sft: SftConfig = Field(default_factory=SftConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(f"name={self.name!r} must be a plain folder name: letters, digits and . _ + -")
        check_evaluation(self.evaluation, self.data, self.rollout)
        check_checkpoint(self.checkpoint, self.evaluation)
        check_batch(self.rollout, self.training)
        check_stream(self.rollout, self.training)
        self._check_verifiers()
        self._check_what_runs()
        check_sequence(self.training, self.sequence_tokens)
        check_recompute(self.training, self.rollout.replay_experts)
        check_attention(self.model, self.parallel, self.training.share_prompts, self.platform)
        megatron_section.check_fusion(self.megatron, self.training.offload_activations)
        megatron_section.check_bf16_layers(self.megatron, self.model)
        megatron_section.check_platform(self.megatron, self.platform)
        megatron_section.check_overlap(self.megatron, self.parallel, self.model.attention, self.platform)
        megatron_section.check_optimizer_state(self.megatron, self.checkpoint.every, self.resume, self.rollout.colocate)
        check_transport(self.sync, self.rollout, self.parallel, self.platform)
        check_quantize(self.sync, self.rollout, self.model, self.platform)

    def _check_verifiers(self) -> None:
        """Check that every prompt that a reasoning_gym term grades comes from a dataset of reasoning-gym."""
        for key, path in self.data.paths if any(term.type == "reasoning_gym" for term in self.reward.terms) else []:
            if not path.startswith("reasoning_gym:"):
                raise ValueError(
                    f"reward.terms: type=reasoning_gym grades datasets of reasoning-gym, and {key}={path!r} is none; "
                    "write reasoning_gym:NAME, or take another term"
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

    @property
    def sequence_tokens(self) -> int:
        """Return the maximum number of tokens of a sequence, prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def served_tokens(self) -> int:
        """The same of what the servers of the run are asked for, benchmarks included."""
        return max(self.lengths.values())

    @property
    def lengths(self) -> dict[str, int]:
        """Return the most tokens of sequences, by the keys that add up to them."""
        tokens = {"data.max_prompt_tokens + rollout.max_response_tokens": self.sequence_tokens}
        if self.evaluation.benchmarks:
            of_benchmarks = self.data.max_prompt_tokens + self.evaluation.benchmark_tokens
            tokens["data.max_prompt_tokens + evaluation.benchmark_tokens"] = of_benchmarks
        return tokens

    @property
    def restarts_ranks(self) -> bool:
        """Return whether ranks that fail are restarted from a checkpoint."""
        return bool(self.checkpoint.steps and self.checkpoint.max_restarts) and not self.rollout.only

    @property
    def run_dir(self) -> Path:
        """output/name."""
        return Path(self.output) / self.name
