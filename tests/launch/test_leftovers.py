"""A `launch` that is killed leaves nothing that the next submission does not clean up, and no job that nobody knows."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch import jobs
from launch.executors import slurm
from launch.jobs import JobFolder, submitting
from tepo_megatron.errors import ConfigError
from tests.launch import test_jobs
from tests.launch.cases import PYTHON, ROOT
from tests.launch.test_dry_run import wait_for
from tests.launch.test_jobs import CALLS, launch, state

project = test_jobs.project
# git stops in the middle of the snapshot, and sbatch after the job is in the queue; then the launcher is killed
GIT = """#!/bin/bash
PATH=${{PATH#*:}}
if [[ " $* " != *" archive "* ]]; then exec git "$@"; fi
git "$@" | head -c 100000
touch "{0}/stopped"
sleep 60
"""
SBATCH = """#!/bin/bash
echo 47 > "{0}/number"
echo "47|${{@: -1}}" > "{0}/queue"
touch "{0}/stopped"
sleep 60
"""
SQUEUE = """#!/bin/bash
cat "{0}/queue" 2>/dev/null || true
"""


def killed(project: Path, program: str, text: str) -> None:
    """Submit a job with a program that stops, and kill the launcher with all that it started.

    Args:
        project: The project.
        program: Name of the program.
        text: Its text.
    """
    bin = project.parent / "bin"
    before = (bin / program).read_text() if (bin / program).exists() else None
    (bin / program).write_text(text.format(project.parent))
    (bin / program).chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (project.parent / "output").open("w") as out:
        process = subprocess.Popen(
            [PYTHON, "-m", "launch", *CALLS],
            cwd=project, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(lambda: (project.parent / "stopped").exists() or process.poll() is not None)
        assert process.poll() is None, (project.parent / "output").read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if before is None:
        (bin / program).unlink()
    else:
        (bin / program).write_text(before)


@pytest.mark.full
@pytest.mark.e2e
def test_an_incomplete_snapshot_is_removed_by_the_next_submission(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = project.parent / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    killed(project, "git", GIT)
    code = project / "runs" / "a" / "launch" / "code"
    (left,) = (path for path in code.iterdir() if path.is_dir())
    assert left.name.startswith("tepo-code-") and any(left.iterdir())
    ((status, out, error),) = launch(project, CALLS)
    assert status == 0 and out.startswith("job 47;"), error
    (folder,) = (path for path in code.iterdir() if path.is_dir())
    assert not folder.name.startswith("tepo-") and (folder / "launch" / "__main__.py").exists()
    assert folder.stat().st_mode & 0o755 == 0o755 and list(temporary.glob("tepo-*")) == []


@pytest.mark.full
@pytest.mark.e2e
def test_a_job_that_was_queued_before_its_record_is_found_again(project: Path) -> None:
    """Otherwise a second job of the run would start next to it, and `cancel` would not reach it."""
    (project.parent / "bin" / "squeue").write_text(SQUEUE.format(project.parent))
    (project.parent / "bin" / "squeue").chmod(0o755)
    killed(project, "sbatch", SBATCH)
    run = project / "runs" / "a"
    assert jobs.submitted_jobs(run) == []
    again, cancelled = launch(project, CALLS, ["cancel", "runs/a"])
    assert again[0] == 1 and "job 1 of this run (slurm job 47) has not ended" in again[2], again
    assert "runs/a: job 1 (slurm job 47) was submitted by a `launch` that was killed; it is recorded now" in again[2]
    assert cancelled[1] == "job 47 is cancelled\n"
    state(project, 47, "CANCELLED")
    ((status, out, error),) = launch(project, CALLS)
    assert status == 0 and out.startswith("job 48;"), error
    assert [(job.number, job.id) for job in jobs.submitted_jobs(run)] == [(1, "47"), (2, "48")]
    assert not (run / "launch" / "run.lock").exists()


@pytest.mark.e2e
def test_the_folder_of_a_job_that_was_never_queued_is_removed(project: Path) -> None:
    (project.parent / "bin" / "squeue").write_text(SQUEUE.format(project.parent))
    (project.parent / "bin" / "squeue").chmod(0o755)
    killed(project, "sbatch", SBATCH)
    (project.parent / "queue").write_text(f"48|{project}/runs/b/launch/experiments/b/b_1/b-train_sbatch.sh\n")  # another run's
    home = project / "runs" / "a" / "launch" / "jobs"
    assert [path.name for path in home.iterdir()] == ["1"]
    ((status, _, error),) = launch(project, CALLS)
    assert status == 0, error
    assert [path.name for path in home.iterdir()] == ["2"]  # experiments/ has the number of the first one


def test_what_a_job_has_written_stays(tmp_path: Path) -> None:
    """A job that ended before the next submission is in no queue."""
    slot = JobFolder(tmp_path / "a", 1)
    slot.create("name: a\n")
    (slot.path / "rank-1.log").write_text("step 1\n")
    with submitting(tmp_path / "a", slurm.NAME, lambda slot: None):
        assert (slot.path / "rank-1.log").exists()


def test_two_submissions_at_once_are_refused_by_name(tmp_path: Path) -> None:
    def find(slot: JobFolder) -> None: ...

    said = rf"a submission of a is under way in another process \(process {os.getpid()} on "
    with submitting(tmp_path / "a", slurm.NAME, find):
        with pytest.raises(ConfigError, match=said), submitting(tmp_path / "a", slurm.NAME, find):
            pass
        with submitting(tmp_path / "b", slurm.NAME, find):
            pass
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
