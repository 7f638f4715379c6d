"""Compare a run with its repetition: what each step counted, what was decided, and the weights at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tepo_megatron.errors import DataError
from tepo_megatron.observability.sinks import read_metrics
from tepo_megatron.rollout import decisions

# Numbers of the machine and of the engine that sampled, which a repetition has of its own.
_OWN = ("seconds/", "memory/", "alert/", "gate/", "sync/", "server/", "tokens_per_second", "rollout/server_restarts")


@dataclass(frozen=True)
class Comparison:
    """The outcome.

    Attributes:
        steps: Number of the steps that were compared.
        difference: The first number of a step that differs, as a sentence. None: all are equal.
        decision: The first decision that differs, as a sentence. It explains a difference, and is none by itself: groups arrive
            in another order each time. None: all are equal, or the repetition made none.
        tensors: Number of compared weights; None if there were none to compare.
    """

    steps: int
    difference: str | None
    decision: str | None
    tensors: int | None
    other_tensors: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Return whether everything that was compared is equal, bit for bit."""
        return self.difference is None and not self.other_tensors

    def lines(self) -> Iterator[str]:
        """Yield lines for the user."""
        if self.decision is not None and not self.equal:
            yield f"the first decision that differs: {self.decision}"
        yield self.difference or f"every number of the steps 1 to {self.steps} is equal"
        if self.tensors is None:
            yield "weights: not compared, because not both of the runs have exported those of this step"
        elif self.other_tensors:
            yield f"weights: {len(self.other_tensors)} of {self.tensors} tensors differ, the first: {self.other_tensors[0]}"
        else:
            yield f"weights: {self.tensors} tensors are equal bit for bit"


def compare(first: Path, again: Path, until: int, *, compares_weights: bool) -> Comparison:
    """Compare the steps of two runs up to one of them."""
    rows = {row["step"]: row for row in read_metrics(first)}
    rows_again = {row["step"]: row for row in read_metrics(again)}
    differences = (_difference(step, rows.get(step, {}), rows_again.get(step, {})) for step in range(1, until + 1))
    tensors, other = None, tuple[str, ...]()
    if compares_weights and all((folder / "hf").is_dir() for folder in (first, again)):
        tensors, other = _weights(first / "hf", again / "hf")
    return Comparison(until, next(filter(None, differences), None), _decision(first, again, until), tensors, other)


def _difference(step: int, row: dict[str, Any], row_again: dict[str, Any]) -> str | None:
    for key in [*row, *(key for key in row_again if key not in row)]:
        if not key.startswith(_OWN) and row.get(key) != row_again.get(key):
            return f"step {step}: {key} was {row.get(key)} and is {row_again.get(key)}"
    return None


def _decision(first: Path, again: Path, until: int) -> str | None:
    try:
        steps, steps_again = decisions.read_history(first).steps, decisions.read_history(again).steps
    except DataError:  # a run of a version that logged none
        return None
    if not steps_again:
        return None
    for step in range(1, until + 1):
        line, line_again = steps.get(step, {}), steps_again.get(step, {})
        for name in ("asked", "arrived", "left", "minibatches"):
            was, now = line.get(name, []), line_again.get(name, [])
            if name == "arrived":  # whatever their order and their servers, which do not change what is sampled
                was, now = (sorted((group[:3] for group in groups), key=lambda group: group[0]) for groups in (was, now))
            for place in range(max(len(was), len(now))):
                pair = [rows[place] if place < len(rows) else "nothing" for rows in (was, now)]
                if pair[0] != pair[1]:
                    return f"step {step}: entry {place} of {name!r} was {pair[0]} and is {pair[1]}"
    return None


def _weights(first: Path, again: Path) -> tuple[int, tuple[str, ...]]:
    """Return the number of tensors and the names of those that differ. One tensor of each is in memory at a time."""
    files, files_again = _files_of(first), _files_of(again)
    names = sorted(files.keys() | files_again.keys())
    other = [name for name in names if name not in files or name not in files_again]
    for name in (name for name in names if name not in other):
        if not torch.equal(_bits(files[name], name), _bits(files_again[name], name)):
            other.append(name)
    return len(names), tuple(sorted(other))


def _files_of(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _bits(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
