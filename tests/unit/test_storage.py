"""A disk error names the file, the reason and the fix. Other errors stay as they are."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tepo_megatron.errors import ConfigError, StorageError
from tepo_megatron.utils.storage import disk_fault, writing


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"the disk is full \(No space left on device, [\d.]+ MiB free\); free some space there"),
        (errno.EDQUOT, r"the quota of this user is used up \(Disk quota exceeded, [\d.]+ MiB free\); free some space there"),
        (errno.EROFS, r"its file system is read-only, .* \(Read-only file system\); see `dmesg`"),
        (errno.EIO, r"the disk failed \(Input/output error\); see `dmesg`"),
        (errno.ESTALE, r"its file server has lost it \(Stale file handle\); mount"),
    ],
)
def test_an_error_of_a_disk_names_the_file_and_the_fix(number: int, said: str, tmp_path: Path) -> None:
    for error, path in (
        (OSError(number, os.strerror(number)), tmp_path / "metrics.jsonl"),
        (OSError(number, os.strerror(number), str(tmp_path / "inner")), tmp_path / "inner"),
        (SafetensorError(f"Error while serializing: I/O error: why (os error {number})"), tmp_path / "metrics.jsonl"),
    ):
        with (
            pytest.raises(StorageError, match=f"^{path}: cannot be written: {said}.*--resume true"),
            writing(tmp_path / "metrics.jsonl"),
        ):
            raise error


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    for error in (ValueError("no"), ConfigError("no"), refused, SafetensorError("header too large")):
        with pytest.raises(type(error), match=str(error.args[-1])) as found, writing(tmp_path):
            raise error
        assert found.value is error
    assert disk_fault(PermissionError(errno.EACCES, "no"), tmp_path, written=False) is None
    assert "may not be written" in str(disk_fault(PermissionError(errno.EACCES, "no"), tmp_path))
    assert "disk is full" in str(disk_fault(OSError(errno.ENOSPC, "no"), tmp_path, written=False))
