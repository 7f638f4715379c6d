"""Private folders for what a run needs for a while, and errors of disks, which name the file, the reason and the fix."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tepo_megatron.base import scratch
from tepo_megatron.base.errors import ConfigError, StorageError
from tepo_megatron.base.scratch import PrivateFolder
from tepo_megatron.base.storage import disk_fault, writing

HOLDER = """
import sys, time
from pathlib import Path
from tepo_megatron.base.scratch import PrivateFolder
folder = PrivateFolder.create("test", Path(sys.argv[1]))
(folder.path / "file").touch()
print(folder.path, flush=True)
time.sleep(300)
"""


def test_a_folder_is_private_and_goes_with_its_end(tmp_path: Path) -> None:
    with PrivateFolder.create("test", tmp_path) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700 and folder.path.name.startswith("tepo-test-")
        (folder.path / "file").touch()
        assert scratch.sweep(tmp_path) == [] and folder.path.exists()
    assert list(tmp_path.iterdir()) == []
    folder.remove()


def test_who_has_no_home_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no passwd entry: `~` stays `~`, and libraries make a folder of that name."""
    before = os.environ.get("HOME")
    with scratch.home():
        assert os.environ.get("HOME") == before
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", os.environ.get("HOME", "~"), 1))
    with scratch.home():
        home = Path(os.environ["HOME"])
        assert home.is_absolute() and home.is_dir()
    assert not home.exists() and "HOME" not in os.environ


def test_a_killed_owners_folder_is_swept_and_a_live_ones_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        scratch.sweep(tmp_path)
        assert (path / "file").exists()
        owner.kill()
        owner.wait(60)
        assert path.exists()
    with PrivateFolder.create("other", tmp_path) as next_one:
        assert list(tmp_path.iterdir()) == [next_one.path]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("tepo-notes", "tepo-test-0123", f"tepo-test-{'0' * 16}x", ".tepo-config")]
    for folder in kept:
        folder.mkdir()
        (folder / "file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / f"tepo-test-{'1' * 16}").symlink_to(elsewhere)
    (tmp_path / f"tepo-test-{'2' * 16}").touch()
    abandoned = tmp_path / f"tepo-test-{'3' * 16}"
    abandoned.mkdir()
    assert scratch.sweep(tmp_path, tmp_path / "missing") == [abandoned]
    assert all((folder / "file").exists() for folder in (*kept, elsewhere))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_stays_even_with_root(tmp_path: Path) -> None:
    theirs = tmp_path / f"tepo-test-{'0' * 16}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    assert scratch.sweep(tmp_path) == [] and theirs.exists()


def test_segments_go_with_the_folder_that_names_them_while_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", memory)
    for name in ("psm_a", "psm_b", "kept"):
        (memory / name).touch()
    segments = {name: (memory / name).stat().st_ino for name in ("psm_a", "psm_b")}
    (memory / "another").touch()  # takes no inode that is still in use
    shutil.copy(memory / "another", memory / "psm_c")
    (memory / "psm_c").replace(memory / "psm_b")  # another file under that name by now
    folder = PrivateFolder.create("test", tmp_path)
    scratch.record_segments(folder.path, segments | {"../kept": 1, "missing": 1})
    folder.remove()
    assert sorted(path.name for path in memory.iterdir()) == ["another", "kept", "psm_b"]


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
            pytest.raises(StorageError, match=f"^{path}: cannot be written: {said}.*tepo resume"),
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
