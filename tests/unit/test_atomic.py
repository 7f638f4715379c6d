"""Files that are replaced whole or not at all."""

import os
from pathlib import Path

import pytest

from tepo_megatron.base import storage


def test_the_file_is_synced_before_it_has_its_name_and_the_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")

    def fsync(file: int) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{file}"), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    storage.replace_file(path, b"all of the new")
    assert seen == [(str(tmp_path / "file.partial"), b"old"), (str(tmp_path), b"all of the new")]
    assert os.listdir(tmp_path) == ["file"]
    storage.replace_file(path, b"newer", durable=False)
    assert path.read_bytes() == b"newer" and len(seen) == 2


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), storage.replacing(path) as unfinished:
        unfinished.write_bytes(b"a part of")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    storage.replace_file(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]
