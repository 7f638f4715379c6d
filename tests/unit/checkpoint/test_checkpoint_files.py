"""Files, manifests and folders of checkpoints, without ranks."""

import multiprocessing
import resource
import shutil
from pathlib import Path

import pytest
import torch

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint.folder import (
    MANIFEST,
    ChecksummedFile,
    FileChecksum,
    read_manifest,
    write_manifest,
)


def test_a_write_that_the_kernel_refuses_raises_its_own_error(tmp_path: Path) -> None:
    """torch.save alone would say `unexpected pos`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), ChecksummedFile(tmp_path / "a") as f:
            torch.save(torch.zeros(10_000_000), f)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_any_change_of_a_manifest_is_found(tmp_path: Path) -> None:
    sums = {"b": FileChecksum(3, 1), "hf/a": FileChecksum(2**40, 2**32 - 1)}
    write_manifest(tmp_path, sums)
    path = tmp_path / MANIFEST
    data = path.read_bytes()
    assert read_manifest(tmp_path) == sums
    for i in range(len(data)):
        for changed in (data[:i], data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], data[:i] + b" " + data[i:]):
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"manifest\.txt: not as it was written"):
                read_manifest(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.txt: cannot be read \(No such file"):
        read_manifest(tmp_path)


def make(folder: Path, step: int, content: str = "x") -> None:
    (folders.prepare(folder, step) / "file").write_text(content)
    folders.publish(folder, step)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_left_unfinished_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    make(tmp_path, 3)
    for name in ("step-00000004.partial", "step-00000005.deleted-0a", "step-00000001.partial", "notes", "step-00000002.mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").touch()  # not a folder
    assert folders.steps(tmp_path) == [3] and folders.steps(tmp_path / "missing") == []
    folders.sweep(tmp_path, writing=4)
    assert names(tmp_path) == [
        "notes", "step-00000002.mine", "step-00000003", "step-00000004.partial", "step-00000007",
    ]  # fmt: skip


def test_retention_keeps_the_newest_and_every_nth(tmp_path: Path) -> None:
    for step in (100_000_000, 5, 6, 7, 9, 12):
        shutil.copytree(folders.prepare(tmp_path, step), folders.complete(tmp_path, step))
    folders.prune(tmp_path, keep_last=2, keep_every=3)
    assert names(tmp_path) == ["step-00000006", "step-00000009", "step-00000012", "step-100000000"]
    folders.prune(tmp_path, keep_last=2, keep_every=None, best=6)
    assert folders.steps(tmp_path) == [6, 12, 100_000_000]
    folders.prune(tmp_path, keep_last=2, keep_every=None, best=5)  # there is none any more
    assert folders.steps(tmp_path) == [12, 100_000_000]


def test_a_deletion_that_is_interrupted_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))  # killed as it begins
    with pytest.raises(KeyboardInterrupt):
        folders.prune(tmp_path, keep_last=1, keep_every=None)
    assert folders.steps(tmp_path) == [2] and len(names(tmp_path)) == 2
    monkeypatch.undo()
    folders.sweep(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def hold_for_a_while(path: Path, held: object, done: object) -> None:
    with folders.hold(path):
        held.set()  # type: ignore[attr-defined]
        done.wait(30)  # type: ignore[attr-defined]


def test_a_checkpoint_that_another_process_reads_is_not_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    reader = context.Process(target=hold_for_a_while, args=(folders.complete(tmp_path, 1), held, done))
    reader.start()
    assert held.wait(30)
    folders.prune(tmp_path, keep_last=1, keep_every=None)
    assert folders.steps(tmp_path) == [1, 3]
    reader.kill()  # the lock goes with its holder
    reader.join()
    folders.prune(tmp_path, keep_last=1, keep_every=None)
    assert folders.steps(tmp_path) == [3]
    with pytest.raises(FileNotFoundError), folders.hold(folders.complete(tmp_path, 1)):
        pass


def test_later_checkpoints_of_a_former_course_are_set_aside(tmp_path: Path) -> None:
    for step, content in ((1, "a"), (2, "a"), (3, "a"), (4, "a")):
        make(tmp_path, step, content)
    make(tmp_path, 2, "b")
    assert names(tmp_path) == [
        "step-00000001", "step-00000002", "step-00000002.abandoned", "step-00000003.abandoned", "step-00000004.abandoned",
    ]  # fmt: skip
    assert (folders.complete(tmp_path, 2) / "file").read_text() == "b"
    make(tmp_path, 2, "c")
    assert (tmp_path / "step-00000002.abandoned" / "file").read_text() == "b"
