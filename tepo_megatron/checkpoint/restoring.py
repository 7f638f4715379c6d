"""Which checkpoint a run goes on from, and going on from it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tepo_megatron.actor.actor import Actor
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint import generators, optimizer
from tepo_megatron.checkpoint.agreement import from_all, from_main
from tepo_megatron.checkpoint.files import FileSum, check, read_manifest, shares
from tepo_megatron.checkpoint.reading import Reader
from tepo_megatron.checkpoint.saving import RUN
from tepo_megatron.checkpoint.state import wanted
from tepo_megatron.errors import CheckpointError
from tepo_megatron.parallel import Groups

FORMAT = 1  # of run.json and of what the folder holds
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint whose every byte is as it was written.

    run_state: what `save` was given; layout: of the run that saved it; numbers: what the optimizer and its schedule count;
    passed_over: why newer ones were not taken, one sentence each.
    """

    path: Path
    step: int
    run_state: dict[str, Any]
    layout: dict[str, Any]
    numbers: dict[str, int]
    passed_over: tuple[str, ...] = ()


def describe_layout(actor: Actor) -> dict[str, Any]:
    """What random generators belong to, and the vocabulary (its padding hides a change of it). Plain JSON."""
    groups = actor.groups
    axes = {name: getattr(groups, name).size for name in ("tp", "pp", "cp", "ep", "dp")}
    return {**axes, "vpp": groups.vpp, "vocab_size": actor.arch.vocab_size}


def describe_run(step: int, actor: Actor, run_state: Mapping[str, Any]) -> bytes:
    """The content of run.json, on one line. Raises TypeError or ValueError for a run state that is not JSON."""
    numbers = {
        "adam_step": optimizer.count(actor.optimizer),
        "scheduler_steps": actor.scheduler.num_steps,
    }
    content = {"format": FORMAT, "step": step, "layout": describe_layout(actor), "numbers": numbers, "run": dict(run_state)}
    return json.dumps(content).encode()  # indented it would take ten times as long


def rng_name(rank: int, ranks: int) -> str:
    """The name of a rank's generators in a checkpoint."""
    return f"rng_state/shard_{rank}_{ranks}"


def newest(folder: Path, group: dist.ProcessGroup, held: contextlib.ExitStack) -> Found | None:
    """The newest valid checkpoint, the same on every rank; None where there is none at all.

    Each file is read once, by one of the ranks. held: keeps it from deletion, on rank 0. Collectives over `group`.

    Raises CheckpointError, naming each and what is wrong with it, when there are some and none is valid.
    """
    passed_over: list[str] = []
    last: int | None = None
    while True:
        offer, wrong = from_main(_offer(folder, last, held) if group.rank() == 0 else (None, []), group)
        passed_over += wrong
        if offer is None:
            break
        last, sums = offer
        path = folders.complete(folder, last)
        mine = shares(sums, group.size())[group.rank()]
        wrong = [line for lines in from_all(check(path, sums, mine), group) for line in lines]
        if not wrong:
            return _read_run(path, tuple(passed_over))
        passed_over += wrong
    if passed_over:
        raise CheckpointError(
            f"{folder}: no checkpoint is valid: {'; '.join(passed_over)}. Restore one from a copy, or move the folder away to "
            "start anew"
        )
    return None


def restore(found: Found, actor: Actor, groups: Groups, group: dist.ProcessGroup) -> None:
    """Bring the actor into the state that was saved, on any layout. Collectives over `group`.

    Raises CheckpointError, on every rank, before anything is changed when the checkpoint is that of another model, and in
    the middle when it cannot be read.
    """
    if (before := found.layout["vocab_size"]) != (here := actor.arch.vocab_size):
        raise CheckpointError(f"{found.path}: the vocabulary had {before} tokens and has {here}; resume with the same model")
    boxes = list(wanted(actor))
    reader = items = None
    with _agreed(group, (CheckpointError,)):
        reader = Reader(found.path)
        items = reader.plan(boxes)
    assert reader is not None and items is not None
    left_over = sorted(reader.names - set().union(*from_all({b.name for b in boxes}, group)))
    if left_over:
        raise CheckpointError(
            f"{found.path}: holds {left_over[0]} (and {len(left_over) - 1} more), which this model lacks; resume with the "
            "model that it was saved from"
        )
    with _agreed(group, (OSError, RuntimeError)):
        reader.read(boxes, items)
        if found.layout == describe_layout(actor):
            generators.restore(reader.read_bytes(rng_name(groups.rank, groups.world_size)))
        elif groups.is_main:
            _log.warning(
                "%s was saved on the layout %s; random generators start anew on %s",
                found.path, found.layout, describe_layout(actor),
            )  # fmt: skip
    optimizer.set_count(actor.optimizer, found.numbers["adam_step"])
    actor.scheduler.num_steps = 0
    actor.scheduler.step(increment=found.numbers["scheduler_steps"])  # rates are those of the config now


def _offer(
    folder: Path, last: int | None, held: contextlib.ExitStack
) -> tuple[tuple[int, dict[str, FileSum]] | None, list[str]]:
    """On rank 0: the newest checkpoint before `last` whose manifest is valid, and what is wrong with those in between."""
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


def _read_run(path: Path, passed_over: tuple[str, ...]) -> Found:
    content = json.loads((path / RUN).read_bytes())
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: of format {content['format']}, and this version reads {FORMAT}; resume with the version that wrote it"
        )
    return Found(path, content["step"], content["run"], content["layout"], content["numbers"], passed_over)


@contextlib.contextmanager
def _agreed(group: dist.ProcessGroup, kinds: tuple[type[Exception], ...]) -> Any:
    """An error of these kinds within, on any rank, is a CheckpointError on all of them."""
    error = None
    try:
        yield
    except kinds as e:
        error = f"rank {group.rank()}: {e}"
    errors = [e for e in from_all(error, group) if e is not None]
    if errors:
        raise CheckpointError(errors[0])
