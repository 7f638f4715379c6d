"""Faults of checkpoints: damaged files, full disks, killed and hanging ranks, another model."""

import os
import random
import re
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.base.errors import CheckpointError
from tests.parallel import cases
from tests.parallel import checkpoint_worlds as w
from tests.tiny import tiny_qwen3
from tests.worlds import run_world

pytestmark = pytest.mark.slow


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def remove(path: Path, dice: random.Random) -> None:
    path.unlink()


def damage_everything(rank: int, cfg: Any, folder: Path) -> list[tuple[str, str, int | None, tuple[str, ...]]]:
    """Damage every file of the newer of two checkpoints in three ways, one at a time, and restore it."""
    actor, dice, out = cases.open_actor(cfg), random.Random(0), []
    with w.checkpoints(folder, actor) as checkpoints, w.checkpoint_warnings():
        for step in (1, 2):
            checkpoints.save(step, actor, {"step": step})
        checkpoints.wait()
        newer = folder / "step-00000002"
        for path in sorted(p for p in newer.iterdir()):
            for damage in (flip, truncate, remove):
                kept = path.read_bytes()
                dist.barrier()
                if rank == 0:
                    damage(path, dice)
                dist.barrier()
                found = checkpoints.newest()
                out.append((path.name, damage.__name__, found.run_state["step"], found.passed_over))
                dist.barrier()
                if rank == 0:
                    path.write_bytes(kept)
                dist.barrier()
        assert checkpoints.newest().step == 2
    return out


def test_any_damaged_file_is_found_and_the_former_checkpoint_taken(case: cases.Case, tmp_path: Path) -> None:
    first, second = run_world(2, damage_everything, w.run_config(case.model, {"dp": 2}), tmp_path)
    assert first == second
    names = {"__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "metadata.json", "run.json", "manifest.txt"}
    assert {name for name, *_ in first} == names and len(first) == 3 * len(names)
    for name, damage, step, passed_over in first:
        assert step == 1, (name, damage)
        assert len(passed_over) == 1 and str(tmp_path / "step-00000002" / name) in passed_over[0], (name, damage)


def all_damaged(rank: int, cfg: Any, folder: Path) -> Any:
    actor = cases.open_actor(cfg)
    with w.checkpoints(folder, actor) as checkpoints, w.checkpoint_warnings():
        nothing = checkpoints.newest()
        for step in (1, 2):
            checkpoints.save(step, actor, {})
        checkpoints.wait()
        if rank == 0:
            (folder / "step-00000001" / "__1_0.distcp").unlink()
            truncate(folder / "step-00000002" / "run.json", random.Random(0))
        dist.barrier()
        return nothing, refused(checkpoints.newest)


def test_when_none_is_valid_each_is_named(case: cases.Case, tmp_path: Path) -> None:
    ranks = run_world(2, all_damaged, w.run_config(case.model, {"dp": 2}), tmp_path)
    assert ranks[0] == ranks[1]
    nothing, message = ranks[0]
    assert nothing is None
    assert str(tmp_path / "step-00000001" / "__1_0.distcp") in message and "cannot be read (No such file" in message
    assert str(tmp_path / "step-00000002" / "run.json") in message and "bytes, not" in message


def fill_the_disk(rank: int, cfg: Any, batch: Any, folder: Path, victim: int) -> Any:
    """The kernel refuses what rank `victim` writes beyond 1 MB, in the midst of its file."""
    actor = cases.open_actor(cfg)
    with w.checkpoints(folder, actor) as checkpoints:
        checkpoints.save(1, actor, {})
        checkpoints.wait()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
        checkpoints.save(2, actor, {})
        w.update(actor, 2, batch)  # training goes on meanwhile
        message = refused(checkpoints.wait)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        dist.barrier()
        names = sorted(p.name for p in folder.iterdir())
        found = checkpoints.newest()
        checkpoints.save(3, actor, {})
        return message, names, found.step, checkpoints.wait().step


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_former(
    case: cases.Case, tmp_path: Path, victim: int
) -> None:
    cfg = w.run_config(case.model, {"dp": 2})
    ranks = run_world(2, fill_the_disk, cfg, case.batches[0], tmp_path, victim)
    assert ranks[0] == ranks[1]
    message, names, found, next_one = ranks[0]
    assert f"rank {victim}: " in message and f"__{victim}_0.distcp" in message and "File too large" in message
    assert "MiB free" in message
    assert names == ["step-00000001"] and found == 1 and next_one == 3


def hang(rank: int, cfg: Any, folder: Path) -> Any:
    actor = cases.open_actor(cfg)
    with pytest.raises(CheckpointError, match="no more"), w.checkpoints(folder, actor, timeout_seconds=5) as checkpoints:
        checkpoints.save(1, actor, {})
        checkpoints.wait()
        if rank == 1:
            w.hold_back_writing()  # for a minute
        start = time.perf_counter()
        checkpoints.save(2, actor, {})
        message, seconds = refused(checkpoints.wait), time.perf_counter() - start
        found = checkpoints.newest()
        checkpoints.save(3, actor, {})
    return message, seconds, found.step


def test_a_rank_that_hangs_costs_the_checkpoint_and_not_the_run(case: cases.Case, tmp_path: Path) -> None:
    ranks = run_world(2, hang, w.run_config(case.model, {"dp": 2}), tmp_path)
    for message, seconds, found in ranks:
        assert "rank" in message and seconds < 40 and found == 1  # the hang lasts a minute
    assert ranks[0][0] == ranks[1][0]


def load_into_others(rank: int, cfg: Any, others: list[Any], folder: Path) -> list[tuple[str, bool]]:
    """Save, and load into an actor of each other config: the message, and whether its weights are what they were."""
    from tepo_megatron.actor.actor import Actor

    actor, out = cases.open_actor(cfg), []
    with w.checkpoints(folder, actor) as checkpoints:
        checkpoints.save(1, actor, {})
        checkpoints.wait()
        for other in others:
            another = Actor.open(other, actor.groups)
            before = w.raw_state(another)
            message = refused(lambda another=another: checkpoints.load(checkpoints.newest(), another))
            weights = [x for x in before if isinstance(x, torch.Tensor)]
            after = [x for x in w.raw_state(another) if isinstance(x, torch.Tensor) and (x != 0).any()]
            out.append((message, w.same([x for x in weights if (x != 0).any()], after)))
    return out


OTHER_MODELS = [
    ({"layers": 3}, r"holds decoder\.layers\.3\..*which this model lacks"),
    ({"layers": 5}, r"has no tensor decoder\.layers\.4\..*resume with the model"),
    ({"vocab_size": 72}, r"the vocabulary had 70 tokens and has 72"),
    ({"precision": "bf16"}, r"is torch\.float32, and torch\.bfloat16 here.*model\.precision"),
]


def test_the_checkpoint_of_another_model_is_refused_before_anything_changes(case: cases.Case, tmp_path: Path) -> None:
    cfg, others = w.run_config(case.model, {"tp": 2}), []
    for number, (change, _) in enumerate(OTHER_MODELS):
        model = {"path": str(tmp_path / f"other-{number}")}
        if "precision" in change:
            model = change
        else:
            tiny_qwen3(Path(model["path"]), **({"layers": 4, "vocab_size": cases.VOCAB} | change))
        others.append(replace(cfg, model=replace(cfg.model, **model)))
    for found in run_world(2, load_into_others, cfg, others, tmp_path / "checkpoints"):
        assert len(found) == len(OTHER_MODELS)
        for (change, message), (text, unchanged) in zip(OTHER_MODELS, found, strict=True):
            assert re.search(message, text), f"{change}: {text}"
            assert unchanged, change
