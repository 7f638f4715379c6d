"""Read what `actor/recorder.py` has recorded, and refuse what is missing, damaged or contradictory.

Suffixes: _N response tokens of a minibatch, _B sequences of the rollout batch, _L tokens of all sequences, prompts included.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.base.tensor_files import DAMAGE, read_tensors
from tepo_megatron.losses import Objective, objective_of
from tepo_megatron.monitor.run_dir import AUDIT, audit_folder

INPUTS = ("logprob", "entropy", "old_logprob", "old_entropy", "rollout_logprob", "group_advantage")
USED = ("advantage", "ratio", "clipped", "entropy_change", "kl_mask", "kl", "share", "loss")  # every loss has these terms
Array = NDArray[Any]


@dataclass(frozen=True)
class AuditBatch:
    """The sequences of a step, as training used them."""

    # token_ids_L, response_mask_L, rollout_logprobs_L, versions_L: fields of `Rollout`, of all sequences, one after another
    token_ids_L: Array
    response_mask_L: Array
    rollout_logprobs_L: Array
    versions_L: Array
    lengths_B: Array  # tokens of each sequence, including the prompt
    # prompt_ids_B, rewards_B, scores_B: fields of `Rollout`; rewards include all penalties
    prompt_ids_B: Array
    rewards_B: Array
    scores_B: Array
    terms: list[list[list[float]]]  # (weight, value) of each term of the reward, for each sequence
    updates: int  # number of updates of the step

    def __len__(self) -> int:
        """Return B, the number of sequences."""
        return len(self.lengths_B)

    @cached_property
    def response_lengths_B(self) -> Array:
        """Return |y| of each sequence."""
        return np.bincount(self.sequence_L[self.response_mask_L], minlength=len(self))

    @cached_property
    def sequence_L(self) -> Array:
        """Return the sequence of each token."""
        return np.repeat(np.arange(len(self)), self.lengths_B)

    @cached_property
    def response_L(self) -> Array:
        """Return the index among all tokens of each response token, in order."""
        return np.flatnonzero(self.response_mask_L)

    @cached_property
    def first_B(self) -> Array:
        """Return the index among all response tokens of the first one of each sequence."""
        return np.cumsum(self.response_lengths_B) - self.response_lengths_B

    def group(self, sequence: int) -> Array:
        """Return the sequences of the same prompt."""
        return np.flatnonzero(self.prompt_ids_B == self.prompt_ids_B[sequence])

    def sequence_of(self, prompt: int, token_ids: Array, place: int) -> int | None:
        """Return the index of the sequence with these tokens, of several the one at `place`; None if there is none."""
        alike = np.flatnonzero((self.prompt_ids_B == prompt) & (self.lengths_B == len(token_ids))).tolist()
        same = [s for s in alike if np.array_equal(self.token_ids_L[self.sequence_L == s], token_ids)]
        return min(same, key=lambda s: s != place, default=None)


@dataclass(frozen=True)
class AuditUpdate:
    """The N response tokens of one update, ordered by sequence and position."""

    number: int  # updates of the step before this one
    objective: Objective
    max_response_tokens: int  # limit of the length of a response
    loss: float  # loss of the minibatch that training computed
    sequences: Array  # sequences of the minibatch, ascending; some may have no response token
    sequence_N: Array  # sequence of each token
    position_N: Array  # index of each token in its response, from 0
    inputs: dict[str, Array]  # inputs of the loss by name, fp64 _N
    used: dict[str, Array]  # terms of the loss that training used, by name, fp64 _N

    def find(self, sequence: int, position: int) -> int | None:
        """Return the index of a token; None if its sequence is not in this minibatch."""
        first, end = np.searchsorted(self.sequence_N, [sequence, sequence + 1]).tolist()
        return first + position if first + position < end else None


def steps(run: Path) -> list[int]:
    """Return the steps that a run has recorded for audits, ascending."""
    names = (path.name.removeprefix("step-") for path in (run / AUDIT).glob("step-*"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's records. Raises DataError if the run has recorded nothing of the step. The message says
    which steps there are.
    """
    known = steps(run)
    if step in known:
        return audit_folder(run, step)
    if not known:
        why = "this run kept no numbers of single tokens" if run.is_dir() else "there is no such folder"
        raise DataError(f"{run}: {why}; train with --logging.audit_every 1 and audit that run")
    raise DataError(f"{run}: step {step} was not recorded for audits; recorded are: {', '.join(map(str, known))}")


def read_batch(folder: Path) -> AuditBatch:
    """Return the sequences of a step. Raises DataError if the file is missing or damaged."""
    path = folder / "batch.safetensors"
    try:
        tensors, text = read_tensors(path)
        rows = {name: tensors[name].numpy() for name in ("token_ids", "response_mask", "rollout_logprobs", "versions")}
        columns = {name: tensors[name].numpy() for name in ("lengths", "prompt_ids", "rewards", "scores")}
        terms = [[[float(x) for x in term] for term in of_one] for of_one in json.loads(text["terms"])]
        sizes = {x.shape for x in columns.values()} | {(len(terms),)}
        if (
            len(sizes) != 1
            or (columns["lengths"] < 0).any()
            or {x.shape for x in rows.values()} != {(columns["lengths"].sum(),)}
        ):
            raise ValueError("its columns differ in length")
        if rows["response_mask"].dtype != bool:
            raise ValueError("its mask is no mask")
        if len({len(of_one) for of_one in terms}) > 1 or any(len(term) != 2 for of_one in terms for term in of_one):
            raise ValueError("its sequences were graded by different terms")
        return AuditBatch(
            **{f"{name}_L": x for name, x in rows.items()},
            **{f"{name}_B": x for name, x in columns.items()},
            terms=terms,
            updates=int(text["updates"]),
        )
    except DAMAGE as e:
        raise DataError(f"{path}: not the sequences of an audited step ({e!r}); record the step again") from None


def read_update(folder: Path, number: int, batch: AuditBatch) -> AuditUpdate:
    """Return the tokens of an update, from the files of all ranks that computed a part of its loss. Raises DataError if a file
    is missing or damaged, files contradict each other, or a token is missing or recorded twice.
    """
    paths = sorted(folder.glob(f"update-{number:03d}-shard-*.safetensors"))
    if not paths:
        raise DataError(
            f"{folder}: no record of update {number} of {batch.updates}; the run was interrupted in it, or its ranks do not "
            f"share this folder"
        )
    shards: list[dict[str, Array]] = []
    text: dict[str, str] = {}
    for path in paths:
        try:
            tensors, header = read_tensors(path)
            own = {name: header[name] for name in ("objective", "max_response_tokens", "shards", "update", "minibatch_loss")}
            if text and own != text:
                raise ValueError("other ranks recorded another update")
            text, shard = own, _columns(tensors, batch)
        except DAMAGE as e:
            raise DataError(f"{path}: not an audit record of a rank ({e!r}); record the step again") from None
        shards.append(shard)
    if len(paths) != int(text["shards"]):
        raise DataError(
            f"{folder}: update {number} has records of {len(paths)} of {text['shards']} ranks; copy all of them here"
        )
    return _joined(folder, number, batch, shards, text)


def _columns(tensors: Mapping[str, Tensor], batch: AuditBatch) -> dict[str, Array]:
    """Return the columns of one rank. Raise ValueError or KeyError if some are missing, or no sequence is what they name."""
    columns: dict[str, Array] = {name: x.numpy() for name, x in tensors.items()}
    sequences = columns["sequences"]
    for name in ("sequence", "position", *INPUTS, *(f"used_{name}" for name in USED)):
        if columns[name].shape != columns["sequence"].shape or columns[name].ndim != 1:
            raise ValueError(f"its column {name} has another length")
    if sequences.ndim != 1 or len(set(sequences.tolist())) < sequences.size or not np.isin(sequences, range(len(batch))).all():
        raise ValueError("it names sequences that the step does not have")
    if not np.isin(columns["sequence"], sequences).all():
        raise ValueError("it has tokens of other sequences than those of its minibatch")
    return columns


def _joined(
    folder: Path, number: int, batch: AuditBatch, shards: list[dict[str, Array]], text: Mapping[str, str]
) -> AuditUpdate:
    """Return the tokens of all ranks in order, each once."""
    sequences = np.sort(shards[0]["sequences"])
    if any(not np.array_equal(np.sort(shard["sequences"]), sequences) or shard.keys() != shards[0].keys() for shard in shards):
        raise DataError(f"{folder}: the ranks recorded different minibatches of update {number}; record the step again")
    every = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0] if name != "sequences"}
    order = np.lexsort((every["position"], every["sequence"]))
    every = {name: x[order] for name, x in every.items()}
    lengths = batch.response_lengths_B[sequences]
    position_N = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    here = np.array_equal(every["sequence"], np.repeat(sequences, lengths)) and np.array_equal(every["position"], position_N)
    if not here:
        raise DataError(
            f"{folder}: update {number} has {order.size} token records and its sequences have {lengths.sum()} response tokens, "
            f"or one is there twice; record the step again"
        )
    return AuditUpdate(
        number=number,
        objective=_parsed(folder, text["objective"], lambda value: objective_of(json.loads(value))),
        max_response_tokens=_parsed(folder, text["max_response_tokens"], int),
        loss=_parsed(folder, text["minibatch_loss"], float),
        sequences=sequences,
        sequence_N=every.pop("sequence"),
        position_N=every.pop("position"),
        used={name.removeprefix("used_"): x.astype(np.float64) for name, x in every.items() if name.startswith("used_")},
        inputs={n: x if n == "weighting_key" else x.astype(np.float64) for n, x in every.items() if not n.startswith("used_")},
    )


def _parsed(folder: Path, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ConfigError as e:
        raise DataError(f"{folder}: only objectives whose parts tepo has can be audited ({e})") from None
    except DAMAGE as e:
        raise DataError(f"{folder}: no objective or number of this version of tepo ({e!r}); record the step again") from None
