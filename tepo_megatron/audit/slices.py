"""Read the numbers of one sequence from an audited step, without reading those of the others."""

import itertools
from pathlib import Path

import numpy as np
from safetensors import safe_open

from tepo_megatron.audit.reading import Array
from tepo_megatron.errors import DataError
from tepo_megatron.utils.tensor_files import DAMAGE

COLUMNS = ("used_advantage", "used_ratio", "used_entropy_change", "old_logprob", "rollout_logprob")


def find_sequence(folder: Path, prompt: int, token_ids: Array, place: int) -> int | None:
    """Return the index in an audited step of a recorded rollout; None if the step did not train on it.

    Args:
        token_ids: Its tokens, prompt included, _T.
    Raises:
        DataError: The file is missing or damaged.
    """
    path = folder / "batch.safetensors"
    try:
        with safe_open(path, framework="np") as f:
            prompts, lengths, ids = f.get_tensor("prompt_ids"), f.get_tensor("lengths"), f.get_slice("token_ids")
            ends = np.cumsum(lengths)
            alike = np.flatnonzero((prompts == prompt) & (lengths == len(token_ids))).tolist()
            for sequence in sorted(alike, key=lambda s: s != place):
                if np.array_equal(ids[int(ends[sequence]) - len(token_ids) : int(ends[sequence])], token_ids):
                    return int(sequence)
            return None
    except DAMAGE as e:
        raise DataError(f"{path}: not the sequences of an audited step ({e!r}); record the step again") from None


def token_values(folder: Path, sequence: int) -> dict[str, Array]:
    """Return COLUMNS of the response tokens of a sequence in the last update that trained on it, in order. Empty: none did.

    Raises:
        DataError: A file is damaged.
    """
    paths = sorted(folder.glob("update-*-shard-*.safetensors"), reverse=True)
    for _, shards in itertools.groupby(paths, key=lambda path: path.name.split("-shard-")[0]):
        parts = [part for path in shards if (part := _part(path, sequence))]
        if parts:  # with context parallelism every rank has a part of the sequence
            whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            order = np.argsort(whole.pop("position"), kind="stable")
            return {name: x.astype(np.float64)[order] for name, x in whole.items()}
    return {}


def _part(path: Path, sequence: int) -> dict[str, Array]:
    """Return the rows of a sequence in the file of one rank; empty if there are none."""
    try:
        with safe_open(path, framework="np") as f:
            rows = np.flatnonzero(f.get_tensor("sequence") == sequence)
            if not rows.size:
                return {}
            first, end = int(rows[0]), int(rows[-1]) + 1
            return {name: f.get_slice(name)[first:end][rows - first] for name in ("position", *COLUMNS)}
    except DAMAGE as e:
        raise DataError(f"{path}: not an audit record of a rank ({e!r}); record the step again") from None
