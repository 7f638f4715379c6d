"""Compare what training used with what the audit computes again: single tokens, their sums, and the logged loss."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from tepo_megatron.base.errors import DataError
from tepo_megatron.monitor.sinks import read_steps
from tepo_megatron.report.audit.advantages import group_advantages
from tepo_megatron.report.audit.reading import Array, AuditBatch, AuditUpdate, read_batch, read_update, step_folder
from tepo_megatron.report.audit.reference import Formula, ReferenceBatch, evaluate

TOLERANCE = 1e-5  # of a term, relative to its largest absolute value in the minibatch
SUM_TOLERANCE = 1e-6  # of a sum, relative to the sum of the absolute values


@dataclass(frozen=True)
class AuditedUpdate:
    """One update: the terms that training used and the same terms computed again."""

    record: AuditUpdate
    # The same terms in fp64 by name, _N; also `group_advantage` and `rollout_logprob`, which are inputs of the loss
    terms: dict[str, Array]
    near_N: Array  # bool, tokens near to a threshold, where fp32 may decide differently

    @cached_property
    def used(self) -> Mapping[str, Array]:
        """Return what training used, under the names of `terms`."""
        return {name: self.record.inputs[name] for name in ("rollout_logprob", "group_advantage")} | self.record.used

    def difference(self, name: str) -> float:
        """Return the largest difference of a term relative to its largest value, without the tokens near to a threshold.

        A KL is relative to the largest log-ratio: of small log-ratios, fp32 has lost their square.
        """
        used_N, terms_N = self.used[name], self.terms[name]
        if not terms_N.size:
            return 0.0
        apart_N = np.abs(used_N - terms_N)[~self.near_N]
        worst = float(apart_N.max(initial=0.0)) if np.isfinite(apart_N).all() else math.inf
        scale = float(np.abs(terms_N).max())
        other = {"kl": "old_logprob", "ref_kl": "ref_logprob"}.get(name)
        if other in self.record.inputs:  # the exact KL has no other log-prob
            scale = max(scale, float(np.abs(self.record.inputs["logprob"] - self.record.inputs[other]).max()))
        return worst / scale if scale else worst

    @property
    def differing(self) -> list[str]:
        """Return the names of the terms that differ by more than TOLERANCE, or that only one side has."""
        both = self.used.keys() & self.terms.keys()
        return sorted(
            (self.used.keys() ^ self.terms.keys()) | {name for name in both if not self.difference(name) <= TOLERANCE}
        )

    @property
    def loss(self) -> float:
        """Return the loss of the minibatch: the sum over the audited tokens."""
        return math.fsum(self.terms["loss"])

    @property
    def magnitude(self) -> float:
        """Return the sum of the absolute values of the tokens' losses."""
        return float(np.abs(self.terms["loss"]).sum())

    @property
    def sums_agree(self) -> bool:
        """Return whether the sum over the tokens is the loss that training computed."""
        return abs(self.loss - self.record.loss) <= SUM_TOLERANCE * self.magnitude

    @property
    def decided_differently(self) -> int:
        """Return the number of tokens near to a threshold about which fp32 and fp64 decide differently."""
        decisions = [self.used[name] != self.terms[name] for name in ("clipped", "kl_mask")]
        return int(np.count_nonzero(self.near_N & np.logical_or.reduce(decisions)))


@dataclass(frozen=True)
class AuditedStep:
    """One audited step."""

    step: int
    batch: AuditBatch
    updates: list[AuditedUpdate]
    logged_loss: float | None  # `loss/total` of the step in metrics.jsonl. None: the step is not there, or has no loss.

    @property
    def loss(self) -> float:
        """Return the loss of the step, which is the mean over its updates."""
        return math.fsum(update.loss for update in self.updates) / len(self.updates)

    @property
    def magnitude(self) -> float:
        """Return the mean over the updates of the sum of the absolute values of the tokens' losses."""
        return math.fsum(update.magnitude for update in self.updates) / len(self.updates)

    @property
    def agrees(self) -> bool:
        """Return whether all terms agree, and the sums with the logged loss, as far as it is known."""
        apart = 0.0 if self.logged_loss is None else abs(self.loss - self.logged_loss)
        sums = apart <= SUM_TOLERANCE * self.magnitude and all(update.sums_agree for update in self.updates)
        return sums and not any(update.differing for update in self.updates)


def audit_step(run: Path, step: int) -> AuditedStep:
    """Compute the loss of every token of a step again. Raises DataError if the run kept too little, or damaged records."""
    folder = step_folder(run, step)
    batch = read_batch(folder)
    if batch.updates < 1:
        raise DataError(f"{folder}: it claims {batch.updates} updates; record the step again")
    records = [read_update(folder, number, batch) for number in range(batch.updates)]
    updates = [AuditedUpdate(record, *reference_terms(batch, record)) for record in records]
    return AuditedStep(step, batch, updates, _logged_loss(run, step))


def advantages_of(batch: AuditBatch, kind: str) -> Array:
    """Return the advantage of each sequence from the rewards of its group."""
    groups = [np.flatnonzero(batch.prompt_ids_B == prompt) for prompt in dict.fromkeys(batch.prompt_ids_B)]
    rewards = [batch.rewards_B[group].tolist() for group in groups]
    advantages_B = np.zeros(len(batch))
    advantages_B[np.concatenate(groups)] = group_advantages(kind, rewards, [[batch.terms[i] for i in g] for g in groups])
    return advantages_B


def reference_terms(batch: AuditBatch, record: AuditUpdate) -> tuple[dict[str, Array], Array]:
    """Return the terms of an update and the tokens near to a threshold, as AuditedUpdate has them. Raises DataError if an input
    that the objective needs was not recorded.
    """
    method = Formula.of(asdict(record.objective), max_response_tokens=record.max_response_tokens)
    lengths_B, prompts_B = (torch.from_numpy(x[record.sequences]) for x in (batch.response_lengths_B, batch.prompt_ids_B))
    inputs = {name: torch.from_numpy(x_N) for name, x_N in record.inputs.items()}
    try:
        outcome = evaluate(method, ReferenceBatch(lengths_B, prompts_B, inputs))
        advantages_B = advantages_of(batch, method.advantage)
    except KeyError as error:
        raise DataError(
            f"update {record.number}: {error} was not recorded, or is a part that the audit does not know yet: add it to "
            f"tepo_megatron/report/audit/reference.py"
        ) from None
    terms = {name: x_N.double().numpy() for name, x_N in outcome.terms.items()}
    index_N = batch.response_L[batch.first_B[record.sequence_N] + record.position_N]
    terms["rollout_logprob"] = batch.rollout_logprobs_L[index_N].astype(np.float64)
    terms["group_advantage"] = advantages_B[record.sequence_N]
    return terms, outcome.near_N.numpy()


def _logged_loss(run: Path, step: int) -> float | None:
    try:
        records = [record for record in read_steps(run).records if record["step"] == step]
    except DataError:
        return None
    return records[0].get("loss/total") if records else None
