"""`python -m launch ... --dry-run`, in the environment of `make launch`: the whole text of what Slurm would run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.profile import Cluster, SlurmConfig
from launch.scripts import batch_setup
from tepo_megatron.config_io import validate, validate_as
from tests.launch import cases

SLURM = ["run.yaml", "--executor", "slurm"]
REFUSED = {
    "no slurm": (SLURM, "the cluster's profile has no slurm section"),
    "kuberay": (["run.yaml", "--executor", "kuberay"], "--executor kuberay: NeMo-Run makes Ray clusters with it"),
    "skypilot": (["run.yaml", "--executor", "skypilot"], "--executor skypilot: its pins contradict NeMo-Run's"),
    "no such key": (["run.yaml", "--optimiser.lr", "1"], "optimiser: unknown key; did you mean optimizer?"),
    "nothing launched": (["status", "nowhere"], "nowhere: nothing was launched there"),
    "wait for nothing": ([*SLURM, "--cluster", "bare.yaml", "--after", "nowhere"], "nowhere: nothing was launched there"),
    "local container": (["run.yaml", "--cluster", "contained.yaml"], "--executor local starts no container"),
    "local machines": (["run.yaml", "--cluster", "bare.yaml", *cases.APART, "--sync.folder", "w"], "takes 4 machines of 8"),
    "no sbatch": ([*SLURM, "--cluster", "bare.yaml"], "sbatch refused the job: "),
    "words": (["convert", "out", "--cluster", "bare.yaml", "--hf"], "--hf: words of `convert` come after --"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What each call answers, and "left": the files that the dry runs left."""
    folder = tmp_path_factory.mktemp("project")
    dry = cases.dry_runs(folder)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    others = cases.call(folder, {name: words for name, (words, _) in REFUSED.items()})
    return {**dry, **others, "left": (0, "\n".join(left), "")}


@pytest.mark.parametrize("case", cases.CASES)
def test_the_scripts(told: dict[str, tuple[int, str, str]], case: str, tmp_path: Path) -> None:
    status, text, error = told[case]
    assert (status, error) == (0, "")
    assert text == (cases.GOLDEN / f"{case}.sh").read_text()
    assert cases.SECRET not in text
    for i, script in enumerate(text.split("#==== ")[1:]):
        file = tmp_path / f"{i}.sh"
        file.write_text(script.partition("\n")[2])
        subprocess.run(["bash", "-n", file], check=True)


def test_a_dry_run_leaves_nothing(told: dict[str, tuple[int, str, str]]) -> None:
    assert told["left"][1].split("\n") == ["bare.yaml", "before/launch/job.json", "contained.yaml", "run.yaml"]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_in_one_line(told: dict[str, tuple[int, str, str]], case: str) -> None:
    status, _, error = told[case]
    assert status == 1 and error.startswith("launch: error: ") and error.count("\n") == 1
    assert REFUSED[case][1] in error


@pytest.mark.parametrize("checkpoint", [True, False])
def test_before_its_time_limit_a_job_waits_for_a_checkpoint_and_is_queued_again(tmp_path: Path, checkpoint: bool) -> None:
    """The batch script's own code, with a task that sleeps and an `scontrol` that writes down what it is told."""
    tree = {"name": "a", "output": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"every": 5}}
    slurm = validate_as(Cluster, {"slurm": {"account": "a", "warning_seconds": 30}}, "c").slurm
    (tmp_path / "a" / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert isinstance(slurm, SlurmConfig)
    patience = "end=$((SECONDS + 15))"  # half of the warning: Slurm has to end the job in the other half
    setup = batch_setup(validate(tree), slurm)
    assert patience in setup
    if not checkpoint:
        setup = setup.replace(patience, "end=$((SECONDS + 1))")
    calls = tmp_path / "calls"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* >> {calls}\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = f"{setup}\nsleep 60 & pids[0]=$!\necho ready\nwhile [ ! -e {calls} ]; do sleep 0.1; done\nkill $pids"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGUSR1)
        near = "launch: the time limit is near; newest checkpoint: step-00000005; waiting for the next\n"
        assert job.stdout.readline() == near
        if checkpoint:
            time.sleep(0.5)
            assert not calls.exists()
            writing = tmp_path / "a" / "checkpoints" / "step-00000010.partial"
            writing.mkdir()
            writing.rename(writing.with_suffix(""))
        newest = "step-00000010" if checkpoint else "step-00000005"
        assert job.stdout.readline() == f"launch: queued again; newest checkpoint: {newest}\n"
        assert job.wait(20) == 0 and calls.read_text() == "requeue 7\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
