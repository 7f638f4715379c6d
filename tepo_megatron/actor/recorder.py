"""Record every number that the loss of each token is made of, for `tepo audit`.

The folder of a step holds `batch.safetensors`, its sequences as training used them (written by rank 0), and for each update a
file of each rank that computes a part of the loss: last pipeline stage, tensor-parallel rank 0. Every response token of the
minibatch is in exactly one of these. The docstring of `types` explains the suffixes.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.base.storage import writing
from tepo_megatron.base.tensor_files import write_tensors
from tepo_megatron.base.types import LossOutput, PackedMicrobatch, TokenStats, TrainBatch
from tepo_megatron.config import LoggingConfig
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.losses.objective import LossInputs, Objective
from tepo_megatron.losses.weighting import BatchStatistics
from tepo_megatron.monitor.run_dir import audit_folder


class TokenRecorder:
    """Records the tokens of one step. Every rank makes one and calls every method."""

    def __init__(self, run_dir: Path, step: int, objective: Objective, groups: ParallelDims) -> None:
        self._folder, self._groups = audit_folder(run_dir, step), groups
        self._text = {"objective": json.dumps(dataclasses.asdict(objective)), "shards": str(groups.dp_cp.size)}
        self._microbatches: list[dict[str, Tensor]] = []

    @classmethod
    def open(
        cls, run_dir: Path, step: int, logging: LoggingConfig, objective: Objective, groups: ParallelDims
    ) -> "TokenRecorder | None":
        """Return a recorder if the step is one that `logging.audit_every` records, else None."""
        due = logging.audit_every and (step - 1) % logging.audit_every == 0
        return cls(run_dir, step, objective, groups) if due else None

    def clear(self) -> None:
        """Remove what an earlier attempt recorded of the step, on rank 0. Call it before the first update."""
        if self._groups.is_main and self._folder.exists():
            with writing(self._folder):
                shutil.rmtree(self._folder)

    def record(self, batch: TrainBatch, updates: int) -> None:
        """Record the sequences of the step. Only rank 0 does."""
        if not self._groups.is_main:
            return
        rollouts = batch.rollouts
        tensors = {
            "token_ids": torch.cat([r.token_ids_L for r in rollouts]),
            "response_mask": torch.cat([r.response_mask_L for r in rollouts]),
            "rollout_logprobs": torch.cat([r.rollout_logprobs_L for r in rollouts]),
            "versions": torch.cat([r.versions_L for r in rollouts]),
            "lengths": torch.tensor(batch.lengths),
            "prompt_ids": torch.tensor([r.prompt_id for r in rollouts]),
            "rewards": torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
            "scores": torch.tensor([r.score for r in rollouts], dtype=torch.float64),
        }
        terms = json.dumps([r.terms for r in rollouts])
        write_tensors(self._folder / "batch.safetensors", tensors, {"updates": str(updates), "terms": terms})

    def add(
        self,
        microbatch: PackedMicrobatch,
        stats: TokenStats,
        inputs: LossInputs,
        weights: BatchStatistics | None,
        out: LossOutput,
    ) -> None:
        """Keep the rows of one microbatch on the host."""
        if self._groups.tp.rank:
            return
        columns = {
            "index": microbatch.token_R, "logprob": stats.logprob_R, "entropy": stats.entropy_R,
            "old_logprob": inputs.old_logprob_R, "old_entropy": inputs.old_entropy_R,
            "rollout_logprob": inputs.rollout_logprob_R, "group_advantage": inputs.advantage_R,
        } | {f"used_{name}": x_R for name, x_R in out.rows.items()}  # fmt: skip
        if inputs.ref_logprob_R is not None:
            columns["ref_logprob"] = inputs.ref_logprob_R
        if stats.teacher_kl_R is not None:
            columns["teacher_kl"] = stats.teacher_kl_R
        if weights is not None and (tokens := weights.tokens) is not None:
            kept = {
                "logprob": tokens.logprob_N,
                "entropy": tokens.entropy_N,
                "log_ratio": tokens.log_ratio_N,
                "key": tokens.key_N,
            }
            columns |= {f"weighting_{name}": x_N[microbatch.token_R] for name, x_N in kept.items()}
        self._text["max_response_tokens"] = str(int(inputs.whole.max_response_tokens))
        self._microbatches.append({name: x_R.detach().cpu() for name, x_R in columns.items()})

    def write(self, batch: TrainBatch, loss: float) -> None:
        """Write the rows of one update, on the ranks that have computed a part of its loss."""
        parts, self._microbatches = self._microbatches, []
        if not parts:
            return
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        ids_B = torch.arange(len(batch)) if batch.ids_B is None else batch.ids_B
        sequence_N, position_N = batch.token_keys_N(torch.device("cpu"))
        index = tensors.pop("index")
        tensors |= {"sequence": sequence_N[index], "position": position_N[index], "sequences": ids_B}
        shard = self._groups.dp_cp.rank
        text = self._text | {"update": str(batch.update), "shard": str(shard), "minibatch_loss": repr(loss)}
        write_tensors(self._folder / f"update-{batch.update:03d}-shard-{shard:05d}.safetensors", tensors, text)
