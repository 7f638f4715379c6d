"""All jobs of a run: a config and a record for each, no two at once, and status, logs, cancel and attach for each."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch import jobs
from launch.__main__ import main
from launch.executors import slurm
from launch.jobs import JobFolder
from launch.snapshot import CodeVersion
from tepo_megatron.base.errors import ConfigError
from tests.launch.cases import PROGRAM, PYTHON, ROOT

CALLS = ["run.yaml", "--executor", "slurm", "--cluster", "mine.yaml", "--no-preflight", "--allow-dirty"]
TREE = {"name": "a", "platform": "cpu", "model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"every": 1}}
# a Slurm whose jobs are in the state that the file `state` names
COMMANDS = {
    "sbatch": 'n=$(cat "{0}/number" 2>/dev/null || echo 46); echo $((n + 1)) | tee "{0}/number"',
    "scontrol": """if [ $2 = hostnames ]; then printf 'n1\\nn2\\n'; exit; fi
state=$(cat "{0}/state.$4" 2>/dev/null || echo RUNNING)
if [ $state = UNKNOWN ]; then echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi
if [ $state = DOWN ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi
echo "JobId=$4 JobState=$state Reason=None RunTime=0 TimeLimit=1 Restarts=0 NodeList=n[1-2]\"""",
    "scancel": 'echo "$*" >> "{0}/cancelled"',
    "srun": 'echo "srun $*" | head -n 1; while [ "$1" != bash ]; do shift; done; exec "$@"',
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin, folder = tmp_path / "bin", tmp_path / "work"
    for path in (bin, folder):
        path.mkdir()
    for name, body in COMMANDS.items():
        (bin / name).write_text(f"#!/bin/bash\n{body.replace('{0}', str(tmp_path))}\n")
        (bin / name).chmod(0o755)
    profile = {"environment": {"NOTE": "it's here"}, "slurm": {"account": "lab", "srun_args": ["--mpi=none"]}}
    for name, tree in (("run", TREE), ("mine", profile)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    return folder


def state(project: Path, job: int, word: str) -> None:
    """Set the state that Slurm gives a job."""
    (project.parent / f"state.{job}").write_text(word)


def launch(project: Path, *calls: list[str]) -> list[tuple[int, str, str]]:
    """Call `python -m launch` several times in one process; return exit status, stdout and stderr of each."""
    words = [PYTHON, "-c", PROGRAM, json.dumps(dict(enumerate(calls)))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        words, cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1]).values()]


@pytest.mark.full
@pytest.mark.e2e
def test_each_submission_has_its_config_and_waits_for_the_end_of_the_former(project: Path) -> None:
    first, again = launch(project, CALLS, [*CALLS, "--optimizer.lr", "0.5"])
    assert first[:2] == (0, "job 47; python -m launch status|logs|cancel|attach runs/a\n"), first
    said = "runs/a: job 1 of this run (slurm job 47) has not ended; wait for its end, cancel it with"
    assert again[0] == 1 and said in again[2] and "--job 1" in again[2]
    state(project, 47, "COMPLETED")
    ((status, _, error),) = launch(project, [*CALLS, "--optimizer.lr", "0.5"])
    assert status == 0, error
    home = project / "runs" / "a" / "launch" / "jobs"
    rates = [yaml.safe_load((home / number / "config.yaml").read_text())["optimizer"]["lr"] for number in ("1", "2")]
    assert rates[0] != rates[1] == 0.5
    scripts = [path.read_text() for path in sorted((home.parent / "experiments").rglob("*.sh"))]
    assert len([text for text in scripts if "jobs/1/config.yaml" in text]) == 1
    assert [job.id for job in jobs.submitted_jobs(project / "runs" / "a")] == ["47", "48"]


def submitted(project: Path, *ids: str) -> Path:
    """Record jobs of a run and return its folder."""
    run = project / "runs" / "a"
    for number, id in enumerate(ids, 1):
        JobFolder(run, number).record("slurm", id, ["--mpi=none", "bash", "-c", 'echo "$0 in $PWD"; exec cat', "shell"])
    return run


@pytest.mark.parametrize(
    ("word", "unfinished"),
    [("PENDING", True), ("RUNNING", True), ("FAILED", False), ("UNKNOWN", False), ("REQUEUE_HOLD", True)],
)
def test_a_run_is_refused_while_a_job_of_it_may_still_run(project: Path, word: str, unfinished: bool) -> None:
    run = submitted(project, "47", "48")
    state(project, 48, "COMPLETED")
    state(project, 47, word)  # an older job counts too
    if unfinished:
        with pytest.raises(ConfigError, match=r"job 1 of this run \(slurm job 47\) has not ended"):
            jobs.refuse_unfinished(run, slurm.ended)
    else:
        jobs.refuse_unfinished(run, slurm.ended)
        state(project, 47, "DOWN")
        jobs.refuse_unfinished(run, slurm.ended)  # not asked again
    assert jobs.read(run).ended


def test_two_submissions_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = (jobs.next_job(tmp_path / "a", CodeVersion(tmp_path, "1")) for _ in range(2))
    first.create("name: a\n")
    with pytest.raises(ConfigError, match="another submission of a is being made"):
        second.create("name: b\n")
    assert Path(first.config).read_text() == "name: a\n"


def test_status_and_cancel_of_each_job(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(project, "47", "48")
    state(project, 47, "COMPLETED")
    assert main(["status", "runs/a"]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("job 2: slurm job 48, submitted ") and "RUNNING" in said and "\njob 1: slurm job 47, submitted" in said
    )
    assert main(["status", "runs/a", "--job", "1"]) == 0
    assert "COMPLETED" in capsys.readouterr().out
    assert main(["cancel", "runs/a", "--job", "1"]) == main(["cancel", "runs/a"]) == 0
    assert (project.parent / "cancelled").read_text() == "47\n48\n"
    assert main(["cancel", "runs/a", "--job", "3"]) == 1
    assert "--job 3: runs/a has no such job; it has 1 (slurm job 47), 2 (slurm job 48)" in capsys.readouterr().err


def test_logs_of_each_machine_and_rank(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = submitted(project, "47", "478") / "launch"
    names = (
        "a-train-47-0-n1.log",
        "a-train-47-1-n2.log",
        "a-serve-47-2-n3.log",
        "a-train-batch-47.log",
        "a-train-478-0-n1.log",
    )
    for name in names:
        (home / name).write_text(f"first\nend of {name}\n")
    for rank in (1, 5):
        (home / "jobs" / "1" / f"rank-{rank}.log").write_text(f"end of rank {rank}\n")

    def printed(*words: str) -> list[str]:
        assert main(["logs", "runs/a", "--job", "1", "--lines", "1", *words]) == 0
        return [line.removeprefix("end of ") for line in capsys.readouterr().out.splitlines() if line.startswith("end of ")]

    assert printed() == [*sorted(names[:4]), "rank 1", "rank 5"]
    assert printed("--node", "n2") == printed("--node", "1") == ["a-train-47-1-n2.log"]
    assert printed("--rank", "5") == ["rank 5"]
    assert main(["logs", "runs/a", "--job", "1", "--rank", "7"]) == 0
    assert capsys.readouterr().out == "job 47 has no such logs yet\n"


def typed(words: list[str], text: str, folder: Path, environment: dict[str, str]) -> str:
    """Call `python -m launch` at a terminal, type a line, and return what the terminal shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-m", "launch", *words], environment | {"PYTHONPATH": str(ROOT)})
    shown, sent, deadline = b"", False, time.monotonic() + 120
    with contextlib.suppress(OSError):  # at the end, the terminal is closed
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 65536)
            if not sent and re.search(rb"[#$] (\x1b\S*)?$|shell in", shown):  # before that, srun would drop what is typed
                os.write(terminal, f"{text}\nexit\n\x04".encode())
                sent = True
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.decode()
