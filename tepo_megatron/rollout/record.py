"""Record the graded rollouts of each step on disk, so that another run can train on them without an engine."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.tensor_files import DAMAGE, read_tensors, write_tensors
from tepo_megatron.base.types import MASK_TIES, MOST_MASKED, Rollout, Routing, SamplingMask
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.rollout.streaming import MinibatchStream

FOLDER = "rollouts"
_TEXTS = ("stop_reason", "answer", "status", "later_versions", "servers", "terms")  # as JSON
_NUMBERS = {
    "prompt_id": torch.int64, "policy_version": torch.int64, "sample": torch.int64,
    "reward": torch.float64, "score": torch.float64,
}  # fmt: skip
_TOKENS = ("token_ids_L", "response_mask_L", "rollout_logprobs_L")
_MASK_IDS, _MASK_COUNTS = "sampling_mask.ids_M", "sampling_mask.counts_N"  # per response token, if every rollout has them
_EXPERTS = "experts_LKT"  # per token, too, if expert choices were requested


def file_of(folder: Path, step: int) -> Path:
    """Return the path of a step's rollouts."""
    return folder / f"step-{step:06d}.safetensors"


def write(folder: Path, step: int, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Record the rollouts that a step trains on, and the metrics of everything that it sampled. The write is atomic."""
    tensors: dict[str, Tensor] = {"length": torch.tensor([r.token_ids_L.numel() for r in rollouts])}
    for name in _TOKENS:
        tensors[name] = torch.cat([getattr(r, name) for r in rollouts]) if rollouts else torch.empty(0)
    experts = [r.experts_LKT for r in rollouts if r.experts_LKT is not None]
    if experts and len(experts) == len(rollouts):
        tensors[_EXPERTS] = torch.cat(experts)
    masks = [r.sampling_mask for r in rollouts if r.sampling_mask is not None]
    if masks and len(masks) == len(rollouts):
        whole = SamplingMask.cat(masks)
        tensors |= {_MASK_IDS: whole.ids_M, _MASK_COUNTS: whole.counts_N}
    for name, dtype in _NUMBERS.items():
        tensors[name] = torch.tensor([getattr(r, name) for r in rollouts], dtype=dtype)
    text = {name: json.dumps([getattr(r, name) for r in rollouts]) for name in _TEXTS}
    text["metrics"] = json.dumps(metrics.pairs())
    write_tensors(file_of(folder, step), tensors, text)


def set_aside(folder: Path, after: int) -> list[str]:
    """Rename the recordings of later steps, which the run repeats: a replay must not mix steps of two histories."""
    later = [step for step in steps(folder) if step > after]
    for step in later:
        path = file_of(folder, step)
        path.replace(path.with_suffix(".lost"))
    return [f"{len(later)} rollout files of steps that are repeated were renamed to *.lost"] if later else []


def faults(folder: Path, last: int) -> list[str]:
    """Return why the recordings of the steps up to `last` cannot be replayed, one sentence each. Tokens are not read."""
    sentences, present = [], set(steps(folder))
    if missing := [step for step in range(1, last + 1) if step not in present]:
        sentences.append(
            f"{folder.name}: no recording of step {', '.join(map(str, missing[:5]))}{', ...' * (len(missing) > 5)}"
        )
    for step in sorted(present):
        if step <= last:
            try:
                scores(folder, step)
            except DataError as e:
                sentences.append(str(e))
    return sentences


def steps(folder: Path) -> list[int]:
    """Return the recorded steps in ascending order; empty if there is no such folder."""
    names = (path.stem.removeprefix("step-") for path in folder.glob("step-*.safetensors"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def scores(folder: Path, step: int) -> list[tuple[int, float]]:
    """Return (prompt id, score) of each rollout, without reading the tokens, which may be gigabytes."""
    prompts, values = (column(folder, step, name) for name in ("prompt_id", "score"))
    return list(zip(map(int, prompts), values, strict=True))


def column(folder: Path, step: int, name: str) -> list[float]:
    """Return one number of each rollout, without reading the tokens. Raises DataError if the file is missing or damaged."""
    path = file_of(folder, step)
    try:
        with safe_open(path, framework="pt") as f:
            return list(f.get_tensor(name).tolist())
    except (OSError, SafetensorError, ValueError, OverflowError) as e:
        raise DataError(f"{path}: not the recorded rollouts of a step ({e!r}); record them again") from None


def read_some(folder: Path, step: int, chosen: Sequence[int]) -> list[Rollout]:
    """Return some rollouts of a step without their experts and masks, and without reading the tokens of the others."""
    path = file_of(folder, step)
    try:
        with safe_open(path, framework="pt") as f:
            lengths, text = f.get_tensor("length").tolist(), f.metadata()
            ends = list(itertools.accumulate(lengths))
            columns = {name: f.get_tensor(name).tolist() for name in ("prompt_id", "policy_version", "reward", "score")}
            columns |= {name: json.loads(text[name]) for name in ("stop_reason", "answer", "status")}
            slices = {name: f.get_slice(name) for name in _TOKENS}
            return [
                Rollout(
                    **{name: x[ends[i] - lengths[i] : ends[i]] for name, x in slices.items()},
                    **{name: column[i] for name, column in columns.items()},
                )
                for i in chosen
            ]
    except DAMAGE as e:
        raise DataError(f"{path}: not the recorded rollouts of a step ({e!r}); record them again") from None


def read(folder: Path, step: int) -> tuple[list[Rollout], Metrics]:
    """Return what `write` recorded, bit for bit. Raises DataError if the file is missing or damaged."""
    path = file_of(folder, step)
    try:
        tensors, text = read_tensors(path)
        lengths = tensors.pop("length").tolist()
        names = [*_TOKENS, _EXPERTS] if _EXPERTS in tensors else _TOKENS
        # Copies: a view would keep the tensor of the whole step in memory, and pickle all of it.
        per_token = {name: [x.clone() for x in tensors.pop(name).split(lengths)] for name in names}
        for name in ("servers", "terms"):  # older recordings lack them
            text.setdefault(name, json.dumps([[]] * len(lengths)))
        tensors.setdefault("sample", torch.full((len(lengths),), -1))  # older recordings lack it
        columns = {name: tensors[name].tolist() for name in _NUMBERS} | {name: json.loads(text[name]) for name in _TEXTS}
        for name in ("later_versions", "servers", "terms"):
            columns[name] = [tuple(map(tuple, changes)) for changes in columns[name]]
        metrics = Metrics(json.loads(text["metrics"]))
        if _MASK_IDS in tensors:
            responses = [int(mask.sum()) for mask in per_token["response_mask_L"]]
            masks = SamplingMask(tensors[_MASK_IDS], tensors[_MASK_COUNTS]).split(responses)
            for mask, ids_L, response_L in zip(masks, per_token["token_ids_L"], per_token["response_mask_L"], strict=True):
                mask.check(ids_L[response_L], MOST_MASKED + MASK_TIES + 1)
            per_token["sampling_mask"] = [SamplingMask.cat([mask]) for mask in masks]
        fields = {**per_token, **columns}
        rows = zip(*fields.values(), strict=True)
        return [Rollout(**dict(zip(fields, row, strict=True))) for row in rows], metrics
    except FileNotFoundError:
        raise DataError(f"{path}: no rollouts of step {step} were recorded; lower training.steps or record more") from None
    except DAMAGE as e:
        raise DataError(f"{path}: not the recorded rollouts of a step ({e!r}); record them again") from None


class Replay:
    """Returns the recorded rollouts of each step."""

    def __init__(self, folder: Path, routing: Routing | None = None) -> None:
        self._folder, self._routing = folder, routing

    def collect(self, step: int, clock: Clock, stream: MinibatchStream | None = None) -> tuple[list[Rollout], Metrics]:
        """Return the step's graded rollouts and their metrics."""
        with clock.phase("rollout"):
            rollouts, metrics = read(self._folder, step)
            for rollout in rollouts if self._routing is not None else ():
                self._check(rollout, step)
        if stream is not None:
            groups = [list(group) for _, group in itertools.groupby(rollouts, key=lambda rollout: rollout.prompt_id)]
            stream.expect(len(groups))
            for place, group in enumerate(groups):
                stream.add(place, group)
        return rollouts, metrics

    def _check(self, rollout: Rollout, step: int) -> None:
        file, routing = file_of(self._folder, step), self._routing
        assert routing is not None
        if rollout.experts_LKT is None:
            raise DataError(
                f"{file}: recorded without experts; record it with rollout.replay_experts=true, or set that to false"
            )
        try:
            routing.check(rollout.experts_LKT)
        except ValueError as e:
            raise DataError(f"{file}: prompt {rollout.prompt_id} was sampled by another model ({e})") from None
