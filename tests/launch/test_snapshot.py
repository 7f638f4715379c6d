"""A job imports the version of the code that was submitted, whatever happens to the checkout afterwards."""

import shutil
import subprocess
from pathlib import Path

import pytest

from launch import snapshot
from tepo_megatron.base.errors import ConfigError


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name in ("tepo_megatron/a.py", "tepo_megatron/page.html", "examples/run.yaml", "README.md", "mine/reward.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n")
    (tmp_path / ".gitignore").write_text("runs/\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    return tmp_path


def test_a_snapshot_is_the_commit_and_is_used_again(small: Path) -> None:
    (small / "README.md").write_text("two\n")  # no code
    (small / "notes.txt").write_text("")
    code = snapshot.read(small)
    code.refuse_changes()
    folder = code.take(small / "runs")
    assert folder == small / "runs" / "code" / git(small, "rev-parse", "HEAD")[:12]
    assert (folder / "README.md").read_text() == "one\n" and not (folder / "notes.txt").exists()
    (folder / "of-a-job").write_text("")
    assert code.take(small / "runs") == folder and (folder / "of-a-job").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert code.frozen(str(small / "mine/reward.py"), small / "runs") == str(folder / "mine/reward.py")
    assert code.frozen("/etc/hosts", small / "runs") == "/etc/hosts"


@pytest.mark.parametrize("name", ["tepo_megatron/a.py", "tepo_megatron/page.html", "tepo_megatron/new.py", "mine/new.py"])
def test_changed_code_is_refused_or_recorded(small: Path, name: str) -> None:
    (small / name).write_text("two\n")
    (small / "mine/reward.py").unlink()
    before = git(small, "status", "--porcelain")
    code = snapshot.read(small)
    with pytest.raises(ConfigError, match=f"differs from its commit: .*{name}.*; commit, stash.*--allow-dirty"):
        code.refuse_changes()
    folder = code.take(small / "runs")
    assert folder is not None and (folder / name).read_text() == "two\n" and not (folder / "mine/reward.py").exists()
    diff = folder.with_name(f"{folder.name}.diff").read_text()
    assert f"+++ b/{name}" in diff and "--- a/mine/reward.py" in diff
    assert git(small, "status", "--porcelain") == before
    (small / name).write_text("three\n")
    assert snapshot.read(small).name != code.name
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="was changed during the submission"):
        code.take(small / "runs")
