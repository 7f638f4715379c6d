"""Find the newest valid checkpoint of a run, and restore the actor from it."""

import contextlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tepo_megatron.actor.actor import Actor
from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.base.restricted_pickle import MetadataReader
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint import optimizer, rng_state
from tepo_megatron.checkpoint.folder import FileChecksum, check, read_manifest, shares
from tepo_megatron.checkpoint.saving import RUN
from tepo_megatron.checkpoint.state import ShardSlice, loaded_slices
from tepo_megatron.checkpoint.tensors import chunk
from tepo_megatron.dist.objects import all_gather_object, broadcast_object, same_error
from tepo_megatron.dist.parallel import ParallelDims

FORMAT = 1  # version of run.json and of the folder's content
_log = logging.getLogger(__name__)


class SliceReader:
    """Reads shard slices out of a checkpoint. They need not be the shard slices that were written."""

    def __init__(self, folder: Path, reader: MetadataReader, metadata: Metadata) -> None:
        self._folder, self._reader, self._metadata = folder, reader, metadata

    @classmethod
    def open(cls, folder: Path) -> "SliceReader":
        """Read the metadata of the checkpoint in `folder`. Raises CheckpointError when it is missing or damaged."""
        reader = MetadataReader(folder)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        return cls(folder, reader, metadata)

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return {n for n, m in self._metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}

    def plan(self, shard_slices: Sequence[ShardSlice]) -> list[list[ReadItem]]:
        """Return the read items of each shard slice."""
        return [self._items(shard_slice, i) for i, shard_slice in enumerate(shard_slices)]

    def read(self, shard_slices: Sequence[ShardSlice], items: Sequence[Sequence[ReadItem]]) -> None:
        """Fill the data of the shard slices, in place. What a flexible shard slice has beyond the stored tensor becomes 0.

        Raises OSError if a file cannot be read.
        """
        for shard_slice in shard_slices:
            if shard_slice.flexible:
                shard_slice.data.zero_()
        everything = [item for of_box in items for item in of_box]
        self._reader.read_data(LoadPlan(everything), _Targets(shard_slices)).value()  # it has read when it returns

    def read_bytes(self, name: str) -> bytes:
        """Return the byte string of this name. Raises OSError."""
        index, targets = MetadataIndex(name), _Targets(())
        zero = torch.Size((0,))
        item = ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
        self._reader.read_data(LoadPlan([item]), targets).value()
        return targets.bytes[name]

    def _items(self, shard_slice: ShardSlice, place: int) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata.get(shard_slice.name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{self._folder}: has no tensor {shard_slice.name}; resume with the model that it was saved from"
            )
        if stored.properties.dtype != shard_slice.data.dtype:
            raise CheckpointError(
                f"{self._folder}: {shard_slice.name} is {stored.properties.dtype}, and {shard_slice.data.dtype} here; "
                "resume with the model.precision that it was saved with"
            )
        if tuple(stored.size) != shard_slice.shape and not shard_slice.flexible:
            raise CheckpointError(
                f"{self._folder}: {shard_slice.name} has the shape {tuple(stored.size)}, and {shard_slice.shape} here; "
                "resume with the model that it was saved from"
            )
        items = create_read_items_for_chunk_list(shard_slice.name, stored, [chunk(shard_slice)])
        # `_Targets` finds a shard slice by its index in the list, because two shard slices may have the same name and offset
        return [replace(item, dest_index=MetadataIndex(str(place))) for item in items]


class _Targets:
    """Tells `FileSystemReader.read_data`, in the place of a load planner, where to put each item."""

    def __init__(self, shard_slices: Sequence[ShardSlice]) -> None:
        self._shard_slices = shard_slices
        self.bytes: dict[str, bytes] = {}

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        target = self._shard_slices[int(item.dest_index.fqn)].data
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.bytes[item.dest_index.fqn] = value.getvalue()


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint whose files are all intact."""

    path: Path
    step: int
    run_state: dict[str, Any]
    layout: dict[str, Any]  # the layout of the run that saved it (`describe_layout`)
    numbers: dict[str, int]  # step counts of the optimizer ("adam_step") and of the learning rate schedule ("scheduler_steps")
    passed_over: tuple[str, ...] = ()  # why newer checkpoints were skipped, one message for each defect


def describe_layout(actor: Actor) -> dict[str, Any]:
    """Return the parallel layout and the vocabulary size, as plain JSON."""
    groups = actor.groups
    axes = {name: getattr(groups, name).size for name in ("tp", "pp", "cp", "ep", "dp")}
    return {**axes, "vpp": groups.vpp, "vocab_size": actor.arch.vocab_size}


def describe_run(step: int, actor: Actor, run_state: Mapping[str, Any]) -> bytes:
    """Return the content of run.json, on one line."""
    numbers = {"adam_step": optimizer.adam_steps(actor.optimizer), "scheduler_steps": actor.scheduler.num_steps}
    content = {"format": FORMAT, "step": step, "layout": describe_layout(actor), "numbers": numbers, "run": dict(run_state)}
    stops = {"stop_token_ids": actor.cfg.rollout.stop_token_ids}  # of the models that are exported from it
    return json.dumps(content | stops).encode()  # with an indent this would take ten times as long


def rng_name(rank: int, ranks: int) -> str:
    """Return the name of a rank's RNG states in a checkpoint."""
    return f"rng_state/shard_{rank}_{ranks}"


def newest(folder: Path, group: dist.ProcessGroup, held: contextlib.ExitStack) -> FoundCheckpoint | None:
    """Return the newest valid checkpoint, which is the same on every rank; None if there is no checkpoint.

    Each file is read once for the check, by one of the ranks. Collectives are over `group`: for each checkpoint that is tried,
    one broadcast and one all-gather of objects. Raises CheckpointError if there are checkpoints but none is valid (the message
    names each and its defect), or the newest valid one has another format.
    """
    passed_over: list[str] = []
    last: int | None = None
    while True:
        offer, wrong = broadcast_object(_offer(folder, last, held) if group.rank() == 0 else (None, []), group)
        passed_over += wrong
        if offer is None:
            break
        last, sums = offer
        path = folders.complete(folder, last)
        mine = shares(sums, group.size())[group.rank()]
        if not (wrong := [line for lines in all_gather_object(check(path, sums, mine), group) for line in lines]):
            return _read_run(path, tuple(passed_over))
        passed_over += wrong
    if passed_over:
        raise CheckpointError(
            f"{folder}: no checkpoint is valid: {'; '.join(passed_over)}. Restore one from a copy, or move the folder away to "
            "start again"
        )
    return None


def restore(checkpoint: FoundCheckpoint, actor: Actor, groups: ParallelDims, group: dist.ProcessGroup) -> None:
    """Restore the saved state of the actor, on any parallel layout. Collectives are over `group`.

    Raises CheckpointError on every rank. If the checkpoint belongs to another model or precision, no value was changed; if
    it cannot be read, some may have been.
    """
    if (before := checkpoint.layout["vocab_size"]) != (here := actor.arch.vocab_size):
        raise CheckpointError(
            f"{checkpoint.path}: the vocabulary had {before} tokens and has {here}; resume with the same model"
        )
    shard_slices = list(loaded_slices(actor))
    reader = items = None
    with same_error(group, (CheckpointError,), CheckpointError):
        reader = SliceReader.open(checkpoint.path)
        items = reader.plan(shard_slices)
    assert reader is not None and items is not None
    if left_over := sorted(reader.names - set().union(*all_gather_object({b.name for b in shard_slices}, group))):
        raise CheckpointError(
            f"{checkpoint.path}: holds {left_over[0]} (and {len(left_over) - 1} more), which this model lacks; resume with the "
            "model that it was saved from"
        )
    with same_error(group, (OSError, RuntimeError), CheckpointError):
        reader.read(shard_slices, items)
        if checkpoint.layout == describe_layout(actor):
            rng_state.restore(reader.read_bytes(rng_name(groups.rank, groups.world_size)))
        elif groups.is_main:
            _log.warning(
                "%s was saved on the layout %s; random generators start from the seed on %s",
                checkpoint.path, checkpoint.layout, describe_layout(actor),
            )  # fmt: skip
    optimizer.set_adam_steps(actor.optimizer, checkpoint.numbers["adam_step"])
    actor.scheduler.num_steps = 0
    actor.scheduler.step(increment=checkpoint.numbers["scheduler_steps"])  # the rates come from the current config


def _offer(
    folder: Path, last: int | None, held: contextlib.ExitStack
) -> tuple[tuple[int, dict[str, FileChecksum]] | None, list[str]]:
    """Return, on rank 0, the newest checkpoint before `last` whose manifest is valid, and the defects of those in between."""
    wrong: list[str] = []
    try:
        for step in reversed(folders.steps(folder)):
            if last is not None and step >= last:
                continue
            held.close()
            path = folders.complete(folder, step)
            try:
                held.enter_context(folders.hold(path))
                return (step, read_manifest(path)), wrong
            except CheckpointError as e:
                wrong.append(str(e))
            except FileNotFoundError:  # deleted since it was listed
                continue
    except OSError as e:
        wrong.append(f"{folder}: cannot be read ({e.strerror})")
    held.close()
    return None, wrong


def _read_run(path: Path, passed_over: tuple[str, ...]) -> FoundCheckpoint:
    content = json.loads((path / RUN).read_bytes())
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: of format {content['format']}, and this version reads {FORMAT}; resume with the version that wrote it"
        )
    return FoundCheckpoint(path, content["step"], content["run"], content["layout"], content["numbers"], passed_over)
