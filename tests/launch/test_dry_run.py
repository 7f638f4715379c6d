"""`python -m launch ... --dry-run`, in the environment of `make launch`: the whole text of what Slurm would run."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch.executors.slurm import batch_setup
from launch.profile import Cluster
from launch.sections import SlurmConfig
from tepo_megatron.config.io import validate, validate_as
from tests.launch import cases
from tests.waiting import lives, until

pytestmark = pytest.mark.slow

SLURM = ["run.yaml", "--executor", "slurm"]
NOT_CHECKED = "--no-preflight"
DIRTY = "--allow-dirty"
REFUSED = {
    "no slurm": ([*SLURM, NOT_CHECKED], "the cluster's profile has no slurm section"),
    "no such key": (["run.yaml", "--optimiser.lr", "1"], "optimiser: unknown key; did you mean optimizer?"),
    "nothing launched": (["status", "nowhere"], "nowhere: nothing was launched there"),
    "wait for nothing": ([*SLURM, "--cluster", "bare.yaml", "--after", "nowhere"], "nowhere: nothing was launched there"),
    "local container": (["run.yaml", "--cluster", "contained.yaml"], "--executor local starts no container"),
    "local machines": (
        ["run.yaml", "--cluster", "bare.yaml", *cases.APART, "--sync.transport.folder", "w"],
        "takes 4 machines of 8",
    ),
    "no sbatch": ([*SLURM, "--cluster", "bare.yaml", NOT_CHECKED, DIRTY], "sbatch refused the job: "),
    "words": (["convert", "out", "--cluster", "bare.yaml", "--hf"], "--hf: words of `convert` come after --"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return the result of each call, and as "left" the files that the dry runs left."""
    folder = tmp_path_factory.mktemp("project")
    dry = cases.dry_runs(folder)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    others = cases.call(folder, {name: words for name, (words, _) in REFUSED.items()})
    return {**dry, **others, "left": (0, "\n".join(left), "")}


@pytest.mark.parametrize("case", cases.CASES)
def test_the_scripts_equal_the_golden_files(results: dict[str, tuple[int, str, str]], case: str, tmp_path: Path) -> None:
    status, text, error = results[case]
    assert (status, error) == (0, "")
    assert text == (cases.GOLDEN / f"{case}.sh").read_text()
    assert cases.SECRET not in text
    for i, script in enumerate(text.split("#==== ")[1:]):
        file = tmp_path / f"{i}.sh"
        file.write_text(script.partition("\n")[2])
        subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_in_one_line(results: dict[str, tuple[int, str, str]], case: str) -> None:
    status, _, error = results[case]
    assert status == 1 and error.startswith("launch: error: ") and error.count("\n") == 1
    assert REFUSED[case][1] in error


def batch_code(folder: Path, scontrol: str, srun: str) -> tuple[str, dict[str, str]]:
    """Return the code of a batch script without its tasks, with these bodies of commands; the run is at checkpoint 5."""
    tree = {"name": "a", "output": str(folder), "model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"every": 5}}
    slurm = validate_as(Cluster, {"slurm": {"account": "a", "warning_seconds": 30, "restarts": 9}}, "c").slurm
    assert isinstance(slurm, SlurmConfig)
    (folder / "a" / "checkpoints" / "step-00000005").mkdir(parents=True)
    for name, body in (("scontrol", scontrol), ("srun", srun)):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return batch_setup(validate(tree), slurm, folder), environment


# a job as `scontrol` shows it, and an `srun` that behaves as this test needs
SHOWN = """
if [ $1 != show ]; then echo $* >> calls; exit; fi
echo "JobId=7 JobState=$STATE Reason=$REASON Restarts=0 ExitCode=$EXIT Nodes=1"
"""
SAVED = "mkdir a/checkpoints/step-00000007; touch a/stop.done; exit 75"
# what the run does once it is asked to end -> restarts before, status of the batch script, its last line, if it requeues
WARNED = {
    SAVED: ("0", 75, "launch: the run has saved and ended; queued again; newest checkpoint: step-00000007", True),
    "sleep 60": (
        "0",
        -15,
        "launch: the run has not ended 15 s after the warning; queued again; newest checkpoint: step-00000005",
        True,
    ),
    "exit 0": ("0", 0, "newest checkpoint: step-00000005; the run is asked to save and end", False),
    "exit 1": ("0", 1, "launch: a task ended with status 1; queued again; newest checkpoint: step-00000005", True),
    f"true; {SAVED}": ("9", 75, "launch: the run has saved and ended, and slurm.restarts=9 were made: this is the end", False),
}


@pytest.mark.parametrize("reaction", WARNED)
def test_before_its_time_limit_a_job_asks_the_run_to_end_and_is_queued_again(tmp_path: Path, reaction: str) -> None:
    """Run the batch script's own code, with a shell in place of the run and an `scontrol` that records its arguments."""
    patience = "end=$((SECONDS + 15))"  # half of the warning: Slurm has to end the job in the other half
    requeues = "echo $* >> calls; kill $(cat batch)" if reaction == "sleep 60" else "echo $* >> calls"
    setup, environment = batch_code(tmp_path, SHOWN.replace("echo $* >> calls", requeues), srun="")
    (tmp_path / "a" / "stop.done").touch()  # by an earlier start
    assert patience in setup
    if reaction == "sleep 60":
        setup = setup.replace(patience, "end=$((SECONDS + 1))")
    restarts, status, last, again = WARNED[reaction]
    environment |= {"STATE": "RUNNING", "REASON": "None", "EXIT": "0:0", "SLURM_RESTART_COUNT": restarts}
    run = f"while [ ! -e a/stop.request ]; do sleep 0.1; done; {reaction}"
    wait = "while kill -0 $pids 2>/dev/null; do sleep 0.1; done; wait $pids"
    script = f"echo $$ > batch\n{setup}\nbash -c '{run}' & pids[0]=$!\necho ready\n{wait}"
    job = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == status
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # a run that has not ended holds the pipe
        lines = job.stdout.read().splitlines()
        asked = "launch: the time limit is near; newest checkpoint: step-00000005; the run is asked to save and end"
        assert lines[0] == asked and lines[-1].endswith(last)
        assert (tmp_path / "calls").exists() == again
        assert not again or (tmp_path / "calls").read_text() == "requeue 7\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


HERE = """while [ "$1" != bash ]; do shift; done; echo $$ > guard; exec "$@" > guard.log"""
NEVER = "this is the end"


def test_a_failure_has_the_job_queued_again_once_at_each_checkpoint(tmp_path: Path) -> None:
    setup, environment = batch_code(tmp_path, SHOWN, srun="")
    calls = tmp_path / "calls"

    def ends(status: int, state: str = "RUNNING", restarts: int = 0) -> str:
        calls.unlink(missing_ok=True)
        more = {"STATE": state, "REASON": "None", "EXIT": "0:0", "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(
            ["bash", "-c", f"{setup}\nset -e\nexit {status}"],
            cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == status and done.stderr == ""
        assert calls.exists() == ("queued again" in done.stdout) and (not calls.exists() or calls.read_text() == "requeue 7\n")
        return done.stdout

    assert ends(0) == ends(1, state="COMPLETING") == ""
    assert "slurm.restarts=9 were made: this is the end" in ends(1, restarts=9)
    assert ends(1) == "launch: a task ended with status 1; queued again; newest checkpoint: step-00000005\n"
    assert "newest checkpoint: step-00000005, where slurm.error_restarts=1 were made: this is the end" in ends(137)
    (tmp_path / "a" / "checkpoints" / "step-00000010").mkdir()
    assert "queued again; newest checkpoint: step-00000010" in ends(1)
    assert NEVER in ends(1)


@pytest.mark.parametrize(
    ("reason", "exit_code", "again"),
    [("JobLaunchFailure", "0:9", True), ("None", "0:9", False), ("None", "0:15", False), ("NonZeroExitCode", "1:0", False)],
)
def test_when_the_batch_script_was_killed_its_guard_has_the_job_queued_again(
    tmp_path: Path, reason: str, exit_code: str, again: bool
) -> None:
    setup, environment = batch_code(tmp_path, SHOWN, HERE)
    environment |= {"STATE": "COMPLETING", "REASON": reason, "EXIT": exit_code}
    script = subprocess.Popen(["bash", "-c", f"{setup}\nsleep 60"], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        until(lambda: "sleep" in children_of(tmp_path / "guard"))
        script.kill()
        os.kill(int((tmp_path / "guard").read_text()), signal.SIGTERM)
        until(lambda: not lives(int((tmp_path / "guard").read_text())))  # between two of its commands it has no child either
        said = "launch: the batch script was killed; queued again; newest checkpoint: step-00000005\n"
        assert (tmp_path / "guard.log").read_text() == (said if again else "")
        assert (tmp_path / "calls").exists() == again
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def children_of(pid_file: Path) -> str:
    """Return the commands of the processes that a process started."""
    if not pid_file.exists():
        return ""
    words = ["ps", "--no-headers", "-o", "comm", "--ppid", pid_file.read_text().strip() or "0"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
