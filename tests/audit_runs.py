"""Folders of audit records as `actor/recorder.py` writes them, from random minibatches (`tests/reference/minibatches.py`)."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tepo_megatron.base.tensor_files import write_tensors
from tepo_megatron.losses import Objective
from tepo_megatron.report.audit.comparison import advantages_of, reference_terms
from tepo_megatron.report.audit.reading import AuditBatch, AuditUpdate
from tepo_megatron.report.audit.reference import Formula
from tests.objective_cases import Batch

FOLDER = Path("audit") / "step-000001"


def recorded(objective: Objective, batch: Batch, prompt: Sequence[int] = (1,)) -> tuple[AuditBatch, AuditUpdate]:
    """Return a random minibatch as a run would have recorded it, except for the terms that training used."""
    lengths = np.array([len(r.old) for r in batch.responses])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    mask = np.concatenate([np.arange(n + len(prompt)) >= len(prompt) for n in lengths])
    rollout = batch.flat("rollout").numpy()
    logprobs = np.zeros(mask.size, dtype=np.float32)
    logprobs[mask] = rollout
    step = AuditBatch(
        token_ids_L=np.concatenate([np.resize(prompt, n + len(prompt)) for n in lengths]).astype(np.int64),
        response_mask_L=mask,
        rollout_logprobs_L=logprobs,
        versions_L=np.full(mask.size, 3),
        lengths_B=lengths + len(prompt),
        prompt_ids_B=np.array([r.prompt for r in batch.responses]),
        rewards_B=np.array([float(i % 3 == 0) for i in range(len(lengths))]),
        scores_B=np.array([float(i % 3 == 0) for i in range(len(lengths))]),
        terms=[[] for _ in lengths],
        updates=1,
    )
    logprob, entropy, old = batch.logprob.numpy(), batch.entropy.numpy(), batch.flat("old").numpy()
    inputs = {
        "logprob": logprob, "entropy": entropy, "old_logprob": old, "old_entropy": batch.flat("old_entropy").numpy(),
        "rollout_logprob": rollout, "ref_logprob": batch.flat("ref").numpy(),
        "group_advantage": np.array([r.advantage for r in batch.responses])[sequence],
        "weighting_logprob": logprob, "weighting_entropy": entropy, "weighting_log_ratio": logprob - old,
        "weighting_key": batch.keys.numpy(),
    }  # fmt: skip
    position = np.arange(sequence.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    update = AuditUpdate(
        0, objective, Formula.max_response_tokens, 0.0, np.arange(len(lengths)), sequence, position, inputs, {}
    )
    return step, update


def write_audit(run: Path, objective: Objective, batch: Batch, prompt: Sequence[int] = (1,)) -> None:
    """Write the records of a run whose first step had one update, whose loss was right. Two ranks computed it."""
    step, update = recorded(objective, batch, prompt)
    advantages = advantages_of(step, objective.advantage)
    update = dataclasses.replace(update, inputs=update.inputs | {"group_advantage": advantages[update.sequence_N]})
    used, _ = reference_terms(step, update)
    names = ("token_ids", "response_mask", "rollout_logprobs", "versions")
    tensors: dict[str, Any] = {name: torch.tensor(getattr(step, f"{name}_L")) for name in names}
    tensors |= {name: torch.tensor(getattr(step, f"{name}_B")) for name in ("lengths", "prompt_ids", "rewards", "scores")}
    write_tensors(run / FOLDER / "batch.safetensors", tensors, {"updates": "1", "terms": json.dumps(step.terms)})
    columns = update.inputs | {f"used_{name}": x for name, x in used.items()}
    columns |= {"sequence": update.sequence_N, "position": update.position_N}
    text = {
        "objective": json.dumps(dataclasses.asdict(objective)), "max_response_tokens": str(update.max_response_tokens),
        "shards": "2", "update": "0", "minibatch_loss": repr(float(used["loss"].sum())),
    }  # fmt: skip
    for shard in range(2):
        tensors = {name: torch.tensor(x[shard::2]) for name, x in columns.items()} | {
            "sequences": torch.tensor(update.sequences)
        }
        write_tensors(run / FOLDER / f"update-000-shard-{shard:05d}.safetensors", tensors, text | {"shard": str(shard)})
