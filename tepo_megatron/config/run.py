"""A run: all sections, and what they ask of each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.fields import NonNegative, config
from tepo_megatron.config.model import ModelConfig, ParallelConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.config.rollout import RolloutConfig, check_batch
from tepo_megatron.config.sync import SyncConfig, check_quantize, check_transport
from tepo_megatron.config.training import ObjectiveConfig, OptimizerConfig, TrainingConfig
from tepo_megatron.config.upkeep import CheckpointConfig, EvaluationConfig, LoggingConfig, check_checkpoint, check_evaluation


@config
class Config:
    """One run.

    name: of its folder; platform: what ranks and servers compute on; seed: of everything that is random; export_hf: the trained
    model is written as a Hugging Face directory, `hf/` in the run's folder.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    platform: Literal["cpu", "cuda"] = "cuda"
    seed: NonNegative = 0
    output: str = "runs"  # the run lives in output/name/
    overwrite: bool = False  # a run of that name is replaced
    resume: bool = False  # a run of that name goes on from its newest checkpoint, or from the start where it has none
    export_hf: bool = True
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(f"name={self.name!r} must be a plain folder name: letters, digits and . _ + -")
        check_evaluation(self.evaluation, self.data, self.rollout)
        check_checkpoint(self.checkpoint, self.evaluation)
        check_batch(self.rollout, self.training)
        self._check_lengths()
        self._check_what_runs()
        self._check_model()
        if self.platform == "cpu":
            self._check_cpu()
        check_transport(self.sync, self.rollout, self.parallel, self.platform)
        check_quantize(self.sync, self.rollout, self.model, self.platform)
        self._check_overlap()
        self._check_optimizer_state()

    def _check_lengths(self) -> None:
        """Check that sequences fit microbatches."""
        sequence = self.sequence_tokens
        for key in ("max_tokens_per_microbatch", "max_tokens_without_grad"):
            room = getattr(self.training, key)
            if room is not None and sequence > room:
                raise ValueError(
                    f"training.{key}={room} cannot hold one sequence of "
                    f"{sequence} tokens (data.max_prompt_tokens + rollout.max_response_tokens); raise it to at least that"
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

    def _check_model(self) -> None:
        """Check what the layers can do: recomputation, attention, and a reference policy that is used."""
        if self.rollout.replay_experts and self.training.recompute != "none":
            raise ValueError(
                f"rollout.replay_experts=true with training.recompute={self.training.recompute}: routers that compute again "
                "would be told the experts of a later microbatch; set one of them to its default"
            )
        if self.model.reference is not None and not self.objective.ref_beta:
            raise ValueError(
                f"model.reference={self.model.reference} is not used; set objective.ref_beta above 0, or remove it"
            )
        if self.training.share_prompts == "always" and self.model.attention == "te":
            raise ValueError(
                "training.share_prompts=always with model.attention=te, whose packed attention cannot give several responses "
                "the keys of one prompt; set model.attention to sdpa, or share_prompts to auto or never"
            )
        if self.model.precision == "fp32" and self.model.attention == "te" and self.parallel.cp > 1:
            raise ValueError(
                f"model.precision=fp32 with model.attention=te and parallel.cp={self.parallel.cp}: Transformer Engine has no "
                "attention in fp32 under context parallelism; set model.attention to auto or sdpa, model.precision to bf16, or "
                "parallel.cp to 1"
            )

    def _check_cpu(self) -> None:
        """What only a GPU has."""
        for key, asked, instead in (
            ("model.attention=te", self.model.attention == "te", "auto or sdpa"),
            (f"model.precision={self.model.precision}", self.model.fp8, "bf16 or fp32"),
            (f"optimizer.moments={self.optimizer.moments}", self.optimizer.moments != "fp32", "fp32"),
            (f"optimizer.offload={self.optimizer.offload:g}", self.optimizer.offload > 0, "0"),
            ("parallel.tp_comm_overlap=true", self.parallel.tp_comm_overlap, "false"),
        ):
            if asked:
                raise ValueError(f"{key} needs platform=cuda; use {instead}")

    def _check_overlap(self) -> None:
        """Buckets are there where gradients are reduced early; user buffers have one shape."""
        if self.parallel.tp_comm_overlap and not self.training.fixed_length:
            raise ValueError(
                "parallel.tp_comm_overlap=true needs training.fixed_length=true, since Transformer Engine's buffers have one "
                "shape and packed microbatches differ in length; set that, or tp_comm_overlap to false"
            )
        if self.parallel.tp_comm_overlap and self.model.attention == "sdpa":
            raise ValueError(
                "parallel.tp_comm_overlap=true is Transformer Engine's, and model.attention=sdpa builds the layers without it; "
                "set model.attention to auto, or tp_comm_overlap to false"
            )
        if self.parallel.reduces_early(self.platform):
            return
        found = self.parallel.overlap_grad_reduce
        off = f"parallel.overlap_grad_reduce={'null (false on a CPU)' if found is None else 'false'}"
        for key, asked, instead in (
            (f"parallel.bucket_parameters={self.parallel.bucket_parameters}", self.parallel.bucket_parameters, "null"),
            ("parallel.overlap_param_gather=true", self.parallel.overlap_param_gather, "false"),
        ):
            if asked:
                raise ValueError(
                    f"{key} speaks of buckets, and with {off} there is one; set that to true, or this to {instead}"
                )

    def _check_optimizer_state(self) -> None:
        """Checkpoints know fp32 masters and moments on the device, in the places where the distributed optimizer keeps them."""
        other = [f"optimizer.moments={self.optimizer.moments}"] if self.optimizer.moments != "fp32" else []
        other += [f"optimizer.offload={self.optimizer.offload:g}"] if self.optimizer.offload else []
        if other and (self.checkpoint.every or self.resume):
            key = f"checkpoint.every={self.checkpoint.every}" if self.checkpoint.every else "resume=true"
            default = "moments to fp32" if self.optimizer.moments != "fp32" else "offload to 0"
            raise ValueError(
                f"{other[0]} with {key}: checkpoints of such a state are not built; set checkpoint.every to 0 and resume to "
                f"false, or optimizer.{default}"
            )
        if self.optimizer.offload and self.rollout.colocate:
            raise ValueError(
                f"optimizer.offload={self.optimizer.offload:g} with rollout.colocate=true: colocation moves all of the "
                "optimizer's state to host memory while the engine works; set optimizer.offload to 0, or colocate to false"
            )

    @property
    def sequence_tokens(self) -> int:
        """Return the maximum number of tokens of a sequence, prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def served_tokens(self) -> int:
        """The same of what the servers of the run are asked for, benchmarks included."""
        benchmarks = self.data.max_prompt_tokens + self.evaluation.benchmark_tokens if self.evaluation.benchmarks else 0
        return max(self.sequence_tokens, benchmarks)

    @property
    def run_dir(self) -> Path:
        """output/name."""
        return Path(self.output) / self.name
