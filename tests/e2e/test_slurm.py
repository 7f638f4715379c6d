"""Real jobs of a real Slurm, whose machines are all this one."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.rollout import record
from tests import slurm
from tests.e2e.conftest import write_model
from tests.e2e.test_faults import SHORT
from tests.launch.cases import PYTHON, ROOT, SECRET, files_with_secret
from tests.launch.test_jobs import typed
from tests.parallel.resume_worlds import records
from tests.recorded import steps_taken

pytestmark = slurm.MARKS
# in the place of the training environment's python: the node check, and `tepo train` with an engine that needs no server
SCRIPTED = f"""#!/bin/bash
if [[ $1 = *.py ]]; then exec {sys.executable} "$@"; fi
shift 2
exec {sys.executable} -m tests.e2e.scripted_run "$@"
"""
SLURM = {"account": "lab", "exclusive": False, "warning_seconds": 150}
PATHS = {"PYTHONPATH": str(ROOT)}
APART_STEPS, PROMPTS = 24, 8  # steps of a second; more than are taken before the batch script looks at its tasks
STEPS = 240  # steps of at least half a second; more than fit before the signal, which comes within two minutes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.running(tmp_path_factory.mktemp("slurm"), machines=4) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TEPO_SERVER_KEY": SECRET}
        cluster.environment |= {"TEPO_TEST_ENGINE": "slow"}
        yield cluster


def launch(cluster: slurm.Slurm, folder: Path, *words: str | Path) -> str:
    call = [PYTHON, "-m", "launch", *words]
    done = subprocess.run(
        call, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submitted(cluster: slurm.Slurm, folder: Path, *words: str | Path) -> str:
    said = launch(cluster, folder, *words, "--executor", "slurm", "--allow-dirty")
    return said.split(";")[0].removeprefix("job ")


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def words_of(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", str(value))]


def no_secret_in(folder: Path) -> bool:
    return files_with_secret(folder) == []


def scripted(cluster: slurm.Slurm, folder: Path, name: str, limit: str, warning: int = 150, **more: object) -> tuple[str, Path]:
    """Submit a job of one machine whose engine needs no server, on 40 prompts; return its number and the run."""
    python = folder / "python"
    python.write_text(SCRIPTED)
    python.chmod(0o755)
    profile = write(
        folder / "profile.yaml",
        {"python": str(python), "environment": PATHS, "slurm": SLURM | {"time": limit, "warning_seconds": warning}},
    )
    write_model(folder / "model")
    settings = SHORT | {
        "parallel__tp": 1, "name": name, "overwrite": "true", "model__path": "model", "data__train": "model/train.jsonl",
        "data__eval": "model/eval.jsonl", **more,
    }  # fmt: skip
    job = submitted(cluster, folder, ROOT / "examples" / "demo.yaml", "--cluster", profile, *words_of(settings))
    return job, folder / "runs" / name


def test_a_run_longer_than_its_time_limit_resumes_until_it_is_done(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """All checkpoints but the last are those that the run saves before a limit: no step is taken twice."""
    job, run = scripted(cluster, tmp_path, "long", "00:03:00", 60, training__steps=STEPS, checkpoint__every=STEPS)
    assert cluster.ended(job, timeout=1500) == "COMPLETED", launch(cluster, tmp_path, "logs", "runs/long")
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))
    batch = (run / "launch" / f"long-train-batch-{job}.log").read_text()
    restarts = batch.count("launch: the run has saved and ended; queued again; newest checkpoint: step-")
    assert restarts >= 1 and batch.count("queued again") == restarts, batch
    log = (run / "log.txt").read_text()
    ends = re.findall(r"ended on request after step (\d+);", log)
    assert re.findall(r"resume: from the checkpoint of step (\d+)\n", log) == ends and len(ends) == restarts, log
    lost = run / "metrics.lost.jsonl"
    print(f"{restarts} restarts, after steps {ends}; steps taken twice: {len(records_of(lost))}")
    assert records_of(lost) == []
    status = launch(cluster, tmp_path, "status", "runs/long")
    assert "COMPLETED, " in status and f"restarts: {restarts}" in status and f"{STEPS} steps recorded, ended" in status
    assert f"long-train-{job}-0-" in launch(cluster, tmp_path, "logs", "runs/long")


@pytest.mark.alone  # and so in `make test-full`, which runs no other test of this file
def test_a_killed_rank_is_restarted_inside_the_allocation_and_no_prompt_is_lost(cluster: slurm.Slurm, tmp_path: Path) -> None:
    more = {"training__steps": 5, "checkpoint__every": 2, "rollout__record": "true", "rollout__filter_uniform_groups": "false"}
    job, run = scripted(cluster, tmp_path, "killed", "00:20:00", **more)
    wait_for(lambda: steps_taken(run) >= 3, cluster, job)
    rank = next(p for p in cluster.processes() if "tepo_megatron.trainer.worker" in p.line)
    assert rank.environment["PYTHONPATH"].startswith(f"{run}/launch/code/")
    os.kill(rank.pid, signal.SIGKILL)
    assert cluster.ended(job, timeout=200) == "COMPLETED", launch(cluster, tmp_path, "logs", "runs/killed")
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5]
    assert re.search("ranks restarted from the checkpoint of step [24];", (run / "log.txt").read_text())
    assert cluster.about(job)["Restarts"] == "0"
    assert sorted(prompt for step in prompts_of(run).values() for prompt in step) == list(range(40))


def records_of(path: Path) -> list[str]:
    """Return the lines of a file of records; none if there is no such file."""
    return path.read_text().splitlines() if path.exists() else []


def prompts_of(run: Path) -> dict[int, list[int]]:
    folder = run / record.FOLDER
    return {step: sorted({prompt for prompt, _ in record.scores(folder, step)}) for step in record.steps(folder)}


def wait_for(condition: Callable[[], bool], cluster: slurm.Slurm, job: str) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert cluster.state(job) not in ("FAILED", "CANCELLED", "COMPLETED", "NODE_FAIL", "TIMEOUT"), cluster.logs()
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.2)


@dataclass(frozen=True)
class Apart:
    """A job of two machines with ranks and one with servers: a launcher on each of two machines, a real vLLM on the third."""

    cluster: slurm.Slurm
    folder: Path
    job: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "apart"

    @classmethod
    def submit(cls, cluster: slurm.Slurm, base: Path, folder: Path) -> "Apart":
        tree = {"python": sys.executable, "environment": PATHS, "ranks_per_node": 1, "slurm": SLURM | {"time": "00:20:00"}}
        profile = write(folder / "profile.yaml", tree)
        settings = {
            "name": "apart", "parallel__tp": 2, "training__steps": APART_STEPS, "checkpoint__every": 2, "model__path": base,
            "data__train": base / "train.jsonl", "data__eval": base / "eval.jsonl", "evaluation__max_problems": 8,
            "rollout__server__rendezvous": folder / "servers", "sync__transport__folder": folder / "weights",
            "rollout__prompts_per_step": PROMPTS, "training__minibatch_prompts": 4, "rollout__samples_per_prompt": 4,
            "rollout__filter_uniform_groups": "false", "rollout__record": "true",
        }  # fmt: skip
        job = submitted(cluster, folder, ROOT / "examples" / "demo.yaml", "--cluster", profile, *words_of(settings))
        return cls(cluster, folder, job)

    def ends_well(self) -> None:
        """Assert that every step is on record once, and that nothing is left of the job."""
        assert self.cluster.ended(self.job, timeout=500) == "COMPLETED", self.logs()
        found = records(self.run)
        assert [r["step"] for r in found] == list(range(1, APART_STEPS + 1)), self.logs()
        assert all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in found)
        assert (self.run / "hf" / "config.json").exists() and list((self.folder / "weights").iterdir()) == []
        assert no_secret_in(self.folder)
        left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(self.folder).encode() in _bytes(path)]
        assert left == []

    def resumed(self) -> list[int]:
        path = self.run / "log.txt"
        log = path.read_text() if path.exists() else ""
        return [int(step) for step in re.findall(r"resume: from the checkpoint of step (\d+)", log)]

    def logs(self) -> str:
        return launch(self.cluster, self.folder, "logs", "runs/apart")


@pytest.fixture(scope="module")
def straight(cluster: slurm.Slurm, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Apart:
    """The finished run that nothing disturbed."""
    job = Apart.submit(cluster, base, tmp_path_factory.mktemp("straight"))
    job.ends_well()
    return job


@pytest.mark.server
def test_two_machines_of_ranks_and_one_of_servers(straight: Apart) -> None:
    """The ranks find the server, send it weights, and end it with the run."""
    (serve,) = straight.run.glob(f"launch/apart-serve-{straight.job}-*.log")  # one for each machine
    assert "is ready: http://" in serve.read_text()
    assert len(list(straight.run.glob(f"launch/apart-train-{straight.job}-*.log"))) == 2
    assert (straight.run / "launch" / "jobs" / "1" / "rank-1.log").exists()
    assert len({prompt for step in prompts_of(straight.run).values() for prompt in step}) == APART_STEPS * PROMPTS


def ranks_of(processes: list[slurm.Process]) -> list[slurm.Process]:
    found = [p for p in processes if "RANK" in p.environment and "-m tepo_megatron.trainer.worker" in p.line]
    assert len(found) == 2, found
    return sorted(found, key=lambda p: p.environment["RANK"])


# victim -> its processes among those of the job, given the process of rank 1
KILLS: dict[str, Callable[[slurm.Process, slurm.Process], bool]] = {
    "rank": lambda p, rank: p.pid == rank.pid,
    "launcher": lambda p, rank: p.machine == rank.machine and "-m tepo_megatron train" in p.line,
    "server": lambda p, rank: "-m vllm.entrypoints" in p.line and "guard" not in p.line,
    "serve": lambda p, rank: "-m tepo_megatron serve" in p.line,
    "srun": lambda p, rank: p.line.startswith("srun") and p.line.endswith("/apart-0.sh"),
    "batch": lambda p, rank: p.line.endswith("/slurm_script"),
}
STAYS = ["rank", "server"]  # victims that the job replaces without restarting itself


@pytest.mark.server
@pytest.mark.parametrize("what", [*KILLS, "node", "first node"])
def test_whatever_is_killed_the_run_ends_with_the_same_prompts(
    cluster: slurm.Slurm, base: Path, straight: Apart, tmp_path: Path, what: str, request: pytest.FixtureRequest
) -> None:
    job = Apart.submit(cluster, base, tmp_path)
    wait_for(lambda: steps_taken(job.run) >= 3, cluster, job.job)
    before, everything, killed = steps_taken(job.run), cluster.processes(), time.monotonic()
    if what in KILLS:
        rank = ranks_of(everything)[1]
        dying = [p.pid for p in everything if KILLS[what](p, rank)]
        assert dying, "\n".join(p.line for p in everything)
        for pid in dying:
            os.kill(pid, signal.SIGKILL)
    else:
        first = next(p.machine for p in everything if KILLS["batch"](p, p))
        machine = first if what == "first node" else next(p.machine for p in ranks_of(everything) if p.machine != first)
        cluster.kill(machine)
        request.addfinalizer(functools.partial(cluster.boot, machine))
    wait_for(lambda: steps_taken(job.run) > before + 1 and (what in STAYS or len(job.resumed()) > 0), cluster, job.job)
    back = time.monotonic() - killed
    job.ends_well()
    restarts = int(cluster.about(job.job)["Restarts"])
    assert restarts == len(job.resumed()) == (what not in STAYS), job.logs()
    assert prompts_of(job.run) == prompts_of(straight.run)
    print(f"{what}: killed after step {before}, resumed from {job.resumed()}, further than before {back:.0f} s later")


def test_a_job_waits_for_another_and_is_cancelled(cluster: slurm.Slurm, tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/bash\nexec sleep 100\n")
    sleeper.chmod(0o755)
    profile = write(tmp_path / "profile.yaml", {"python": str(sleeper), "slurm": SLURM | {"restarts": 0}})
    first = submitted(cluster, tmp_path, "convert", "first", "--cluster", profile)
    second = submitted(cluster, tmp_path, "convert", "second", "--cluster", profile, "--after", "first")
    assert "PENDING (Dependency)" in launch(cluster, tmp_path, "status", "second")
    assert f"job {first} is cancelled" in launch(cluster, tmp_path, "cancel", "first")
    assert cluster.ended(first, timeout=120) == "CANCELLED"
    launch(cluster, tmp_path, "cancel", "second")
    assert cluster.ended(second, timeout=120) == "CANCELLED"


def test_a_run_has_one_job_at_a_time_and_a_shell_opens_in_it(cluster: slurm.Slurm, tmp_path: Path) -> None:
    job, run = scripted(cluster, tmp_path, "once", "00:20:00", training__steps=10 * STEPS, checkpoint__every=16)
    wait_for(lambda: steps_taken(run) >= 1, cluster, job)
    with pytest.raises(AssertionError, match=f"job 1 of this run .slurm job {job}. has not ended"):
        scripted(cluster, tmp_path, "once", "00:20:00", training__steps=10 * STEPS, checkpoint__every=16)
    shown = typed(["attach", "runs/once"], 'echo "in $SLURM_JOB_ID: ${PYTHONPATH##*/once/}"', tmp_path, cluster.environment)
    assert f"in {job}: launch/code/" in shown
    assert f"job {job} is cancelled" in launch(cluster, tmp_path, "cancel", "runs/once")
    assert cluster.ended(job, timeout=120) == "CANCELLED"
    second, _ = scripted(cluster, tmp_path, "once", "00:20:00", training__steps=1, checkpoint__every=1)
    assert cluster.ended(second, timeout=300) == "COMPLETED", launch(cluster, tmp_path, "logs", "runs/once")
    said = launch(cluster, tmp_path, "status", "runs/once")
    assert said.startswith(f"job 2: slurm job {second}") and f"\njob 1: slurm job {job}" in said
    assert "CANCELLED" in launch(cluster, tmp_path, "status", "runs/once", "--job", "1")


# on n2 of the simulated machines one of two GPUs is missing
NVIDIA_SMI = """#!/bin/bash
for i in $(seq $([ "$SLURMD_NODENAME" = n2 ] && echo 1 || echo 2)); do echo 580.65.06; done
"""


def test_doctor_names_a_bad_machine_or_leaves_it_out_and_a_job_does_not_start_on_it(
    cluster: slurm.Slurm, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    check = {"skip": ["driver", "cudnn", "all_reduce"], "timeout_seconds": 60}
    tree = {"python": sys.executable, "environment": {"PATH": f"{tmp_path}:{slurm.PATH}"}, "ranks_per_node": 2}

    def doctor(nodes: int, spares: int) -> tuple[int, str]:
        keys = {"node_check": check | {"spare_nodes": spares}, "slurm": SLURM | {"time": "00:10:00"}}
        profile = write(tmp_path / "profile.yaml", tree | keys)
        call = [PYTHON, "-m", "launch", "doctor", "--cluster", profile, "--nodes", str(nodes)]
        done = subprocess.run(
            call, cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    status, said = doctor(4, 0)
    assert status == 1 and "node check: n2: has 1 GPUs, and gpus_per_node is 2; drain it" in said and "FAILED" in said
    batch = "".join(path.read_text() for path in tmp_path.glob("jobs/doctor/launch/*batch*.log"))
    assert "launch: the node check failed and nothing was started" in batch and "the machines are good" not in batch
    status, said = doctor(3, 1)
    assert status == 0 and "node check: left out: n2: has 1 GPUs" in said and "good: n1, n3, n4" in said


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
