"""Faults of checkpoints: damaged files, full disks, killed and hanging ranks, another model."""

import hashlib
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tepo_megatron.errors import CheckpointError
from tests.parallel import cases
from tests.parallel import checkpoint_worlds as w
from tests.tiny import tiny_qwen3
from tests.worlds import run_world

pytestmark = pytest.mark.slow


def refused(action: Callable[[], Any]) -> str:
    """The message of the CheckpointError that `action` raises."""
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
    actor, dice, out = w.start(cfg), random.Random(0), []
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
    actor = w.start(cfg)
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
    actor = w.start(cfg)
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


def hf_on_a_full_disk(rank: int, cfg: Any, folder: Path, victim: int) -> tuple[str, float]:
    """The kernel refuses what rank `victim` writes of the model for transformers beyond 0.1 MB; and how long it takes."""
    from tepo_megatron.weights import hf_io

    actor, write_shards = w.start(cfg), hf_io.write_shards
    # small files, so that it comes in the midst of them
    hf_io.write_shards = lambda *args, limit: write_shards(*args, limit=10**5)  # type: ignore[assignment]
    with w.checkpoints(folder, actor, hf=True) as checkpoints:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, hard))
        start = time.perf_counter()
        message = refused(lambda: checkpoints.save(1, actor, {}))
        return message, time.perf_counter() - start


@pytest.mark.parametrize(("layout", "victim"), [({"pp": 2}, 1), ({"pp": 2}, 0), ({"tp": 2}, 0)], ids=str)
def test_a_model_that_one_rank_cannot_write_fails_on_all_at_once(
    case: cases.Case, tmp_path: Path, layout: dict[str, int], victim: int
) -> None:
    """The other ranks hold parts of its tensors, which they continue to send, and fail too."""
    ranks = run_world(2, hf_on_a_full_disk, w.run_config(case.model, layout), tmp_path, victim)
    (message, _), (other, _) = ranks
    assert message == other and all(seconds < 40 for _, seconds in ranks)
    assert message.startswith(f"rank {victim}: {tmp_path}") and f"model-stage{victim * ('pp' in layout):02d}-0000" in message
    assert "cannot be written" in message and "too large" in message.lower()


def run_until_killed(rank: int, cfg: Any, batch: Any, folder: Path, digests: Path, delay: float | None) -> Any:
    """Go on from the newest checkpoint, check that it is the state of its step, save the next; rank 1 is killed meanwhile."""
    actor = w.start(cfg)

    def digest(step: int) -> Path:
        data = b"".join(x.numpy().tobytes() for x in w.raw_state(actor) if isinstance(x, torch.Tensor))
        return digests / f"{step}-{rank}-{hashlib.sha256(data).hexdigest()}"

    with w.checkpoints(folder, actor) as checkpoints, w.checkpoint_warnings() as warnings:
        found = checkpoints.newest()
        step = 1
        if found is not None:
            step = checkpoints.load(found, actor)["step"] + 1
            assert digest(step - 1).exists() and not warnings, (step, warnings)
        w.update(actor, step, batch)
        digest(step).touch()
        if rank == 1 and delay is not None:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        start = time.perf_counter()
        checkpoints.save(step, actor, {"step": step})
        checkpoints.wait()
        if delay is not None:
            time.sleep(60)
        return time.perf_counter() - start, step, sorted(p.name for p in folder.iterdir())


@pytest.mark.full
def test_a_killed_rank_leaves_a_checkpoint_to_go_on_from(case: cases.Case, tmp_path: Path) -> None:
    cfg = w.run_config(case.model, {"dp": 2})
    folder, digests = tmp_path / "checkpoints", tmp_path / "digests"
    digests.mkdir()
    ((seconds, *_), _) = run_world(2, run_until_killed, cfg, case.batches[0], folder, digests, None)
    dice = random.Random(0)
    for part in range(8):
        delay = seconds * (part + dice.random()) / 7
        with pytest.raises(AssertionError, match=r"SIGKILL|gloo/transport"):
            run_world(2, run_until_killed, cfg, case.batches[0], folder, digests, delay)
    (_, step, names), _ = run_world(2, run_until_killed, cfg, case.batches[0], folder, digests, None)
    assert 2 <= step <= 10 and names[-1] == f"step-{step:08d}" and len(names) == 2, names


def hang(rank: int, cfg: Any, folder: Path) -> Any:
    actor = w.start(cfg)
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


def fail_in_training(rank: int, cfg: Any, folder: Path) -> list[str]:
    actor = w.start(cfg)
    go = w.hold_back_writing()
    with pytest.raises(ZeroDivisionError), w.checkpoints(folder, actor) as checkpoints:
        checkpoints.save(1, actor, {})
        threading.Timer(0.3, go.set).start()
        raise ZeroDivisionError
    dist.barrier()
    return sorted(p.name for p in folder.iterdir())


def test_an_error_of_the_run_does_not_cost_the_checkpoint_under_way(case: cases.Case, tmp_path: Path) -> None:
    assert run_world(2, fail_in_training, w.run_config(case.model, {"dp": 2}), tmp_path) == [["step-00000001"]] * 2


def replace_the_folder(rank: int, cfg: Any, run: Path) -> tuple[str, list[str]]:
    """The run's folder becomes that of another run, with the same files of the same sizes, while a checkpoint is written."""
    actor, folder = w.start(cfg), run / "checkpoints"
    begun = threading.Event()
    go = w.hold_back_writing(begun)
    with w.checkpoints(folder, actor) as checkpoints:
        checkpoints.save(1, actor, {})
        partial = folder / "step-00000001.partial"
        assert begun.wait(60)
        dist.barrier()
        if rank == 0:
            run.rename(run.with_name("moved"))
            shutil.copytree(run.with_name("moved"), run)
            (partial / "of another run").touch()
        dist.barrier()
        go.set()
        message = refused(checkpoints.wait)
    return message, sorted(p.name for p in folder.rglob("*") if not p.name.endswith(".distcp"))


def test_a_checkpoint_is_not_completed_in_a_folder_of_another_run(case: cases.Case, tmp_path: Path) -> None:
    ranks = run_world(2, replace_the_folder, w.run_config(case.model, {"dp": 2}), tmp_path / "run")
    for message, names in ranks:
        assert "step-00000001.partial was removed, moved or replaced while it was written" in message
        assert names == ["of another run", "step-00000001.partial"], "what the other run had written is as it was"


def retain(rank: int, cfg: Any, folder: Path) -> Any:
    actor = w.start(cfg)
    names = []
    with w.checkpoints(folder, actor, keep_last=2, keep_every=3, asynchronous=False) as checkpoints:
        for step in range(1, 8):
            if step == 6:
                held = checkpoints.newest()  # 5, which keep_last would drop at 7
            checkpoints.save(step, actor, {})
            saved = checkpoints.poll()
            assert saved.step == step and saved.blocked_seconds == saved.seconds > 0
            names.append(sorted(int(p.name.removeprefix("step-")) for p in folder.iterdir()))
        checkpoints.load(held, actor)
        checkpoints.save(8, actor, {})
        names.append(sorted(int(p.name.removeprefix("step-")) for p in folder.iterdir()))
    return names


def test_the_newest_and_every_third_stay_and_so_does_one_that_is_to_be_loaded(case: cases.Case, tmp_path: Path) -> None:
    (names,) = run_world(1, retain, w.run_config(case.model, {}), tmp_path)
    assert names == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 5, 6, 7], [3, 6, 7, 8]]


def go_back(rank: int, cfg: Any, folder: Path) -> Any:
    """Step 2 is damaged, so the run goes on from 1 and comes to 2 again."""
    actor = w.start(cfg)
    with w.checkpoints(folder, actor) as checkpoints, w.checkpoint_warnings() as warnings:
        for step in (1, 2, 4):
            checkpoints.save(step, actor, {"course": 1})
        checkpoints.wait()
        shutil.copytree(folder / "step-00000002", folder / "step-00000001")
        for step in (2, 4):
            flip(folder / f"step-{step:08d}" / "common.pt", random.Random(0))
        (folder / "step-00000003.partial").mkdir()
        found = checkpoints.newest()
        checkpoints.save(2, actor, {"course": 2})
        checkpoints.wait()
        return found.path.name, checkpoints.newest().run_state, sorted(p.name for p in folder.iterdir()), warnings


def test_a_run_that_went_back_does_not_return_to_its_former_course(case: cases.Case, tmp_path: Path) -> None:
    ((found, newest, names, warnings),) = run_world(1, go_back, w.run_config(case.model, {}), tmp_path)
    assert found == "step-00000001" and newest == {"course": 2}
    assert names == ["step-00000001", "step-00000002", "step-00000002.abandoned", "step-00000004.abandoned"]
    assert sum("set aside" in line for line in warnings) == 2


def load_into_others(rank: int, cfg: Any, others: list[Any], folder: Path) -> list[tuple[str, bool]]:
    """Save, and load into an actor of each other config: the message, and whether its weights are what they were."""
    from tepo_megatron.actor.actor import Actor

    actor, out = w.start(cfg), []
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


def save_nonsense(rank: int, cfg: Any, folder: Path, fields: dict[str, bool]) -> tuple[str, list[str]]:
    """Raise the error in `save` itself where it waits for the end or for the folder; else in the next call."""
    actor = w.start(cfg)
    with w.checkpoints(folder, actor, **fields) as checkpoints:
        if not fields:
            checkpoints.save(1, actor, {"stream": object()})
            message = refused(checkpoints.wait)
        else:
            message = refused(lambda: checkpoints.save(1, actor, {"stream": object()}))
        checkpoints.save(2, actor, {})
    return message, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fields", [{}, {"asynchronous": False}, {"hf": True}], ids=str)
def test_a_run_state_that_is_not_json_is_refused_on_all_ranks(
    case: cases.Case, tmp_path: Path, fields: dict[str, bool]
) -> None:
    ranks = run_world(2, save_nonsense, w.run_config(case.model, {"dp": 2}), tmp_path, fields)
    message, names = ranks[0]
    assert ranks[1][0] == message and "not JSON serializable" in message
    assert "step-00000001.partial: cannot be begun" in message and names == ["step-00000002"]


def save_to_no_folder(rank: int, cfg: Any, folder: Path) -> list[str]:
    actor, messages = w.start(cfg), []
    checkpoints = w.checkpoints(folder, actor)
    checkpoints.save(1, actor, {})
    messages.append(refused(lambda: checkpoints.save(2, actor, {})))  # the message of the first save
    checkpoints.save(3, actor, {})
    messages.append(refused(checkpoints.close))
    return messages


def test_a_folder_that_cannot_be_made_is_reported_by_the_next_call(case: cases.Case, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ranks = run_world(2, save_to_no_folder, w.run_config(case.model, {"dp": 2}), tmp_path / "file")
    assert ranks[0] == ranks[1]
    for step, message in zip((1, 3), ranks[0], strict=True):
        assert f"file/step-{step:08d}.partial: cannot be begun" in message and "Not a directory" in message


def save_one_after_the_other(rank: int, cfg: Any, folder: Path) -> int:
    """Rank 1 saves once rank 0's call is over."""
    actor = w.start(cfg)
    with w.checkpoints(folder, actor, timeout_seconds=20) as checkpoints:
        for step in (1, 2):
            if rank == 1:
                dist.barrier()
            checkpoints.save(step, actor, {})
            if rank == 0:
                dist.barrier()
            checkpoints.wait()
        return checkpoints.newest().step


def test_training_waits_for_no_other_rank(case: cases.Case, tmp_path: Path) -> None:
    assert run_world(2, save_one_after_the_other, w.run_config(case.model, {"dp": 2}), tmp_path) == [2, 2]
