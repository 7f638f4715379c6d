"""A disk that takes nothing: refused with the folder's name before a process starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
READ_ONLY = 'mount -t tmpfs -o ro tmpfs "$1" && shift && exec "$@"'


def can_mount(folder: Path) -> bool:
    words = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", folder, "true"]
    return os.geteuid() == 0 and subprocess.run(words, capture_output=True).returncode == 0


def test_a_read_only_output_folder_is_refused(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    if not can_mount(folder):
        pytest.skip("mounting a file system takes root and a mount namespace")
    by = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(folder), sys.executable]
    command = tepo(*arguments(random_model), engine="good", by=by)
    assert command.wait(60) == 1, command.output
    assert f"{folder}" in command.output and "Read-only file system" in command.output, command.output
    assert command.output.count("tepo: error:") == 1 and "Traceback" not in command.output, command.output
    command.assert_nothing_left()
