"""Tests read the folder of a run while the run changes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.living_folder import files_below, paths_below

TESTS = Path(__file__).parents[1]
# tests and helpers that start whole runs or submissions
WITH_RUNS = [
    *sorted((TESTS / "e2e").glob("*.py")),
    *(TESTS / n for n in ("hurts.py", "harness/chaos.py", "launch/test_local.py")),
]


def test_a_subfolder_that_vanishes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for place in ("a", "b.part", "c/d"):
        (run / place).mkdir(parents=True)
        (run / place / "file").touch()
    listing = os.scandir

    def moved_first(path: str) -> object:
        if Path(path).name == "b.part":
            os.rename(path, tmp_path / "b")
        return listing(path)

    monkeypatch.setattr(os, "scandir", moved_first)
    found = [str(path.relative_to(run)) for path in paths_below(run)]
    assert found == ["a", "a/file", "b.part", "c", "c/d", "c/d/file"]
    assert files_below(run) == [run / "a/file", run / "c/d/file"]
    with pytest.raises(FileNotFoundError):
        paths_below(run / "nothing")


@pytest.mark.parametrize("path", WITH_RUNS, ids=lambda path: path.stem)
def test_the_folder_of_a_run_is_read_as_one_that_changes(path: Path) -> None:
    assert "rglob(" not in path.read_text(), "use tests.living_folder"
