"""A real Slurm whose machines are on two hosts: network namespaces in which the host's own name is 127.0.1.1.

Debian and Ubuntu write such a line into /etc/hosts. n1 and n3 are on the first host with the controller, n2 on the second.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import hosts, slurm
from tests.e2e.test_faults import SHORT
from tests.e2e.test_slurm import PATHS, SLURM, words_of
from tests.hosts import Host
from tests.launch.cases import PYTHON, ROOT
from tests.parallel.resume_worlds import records

pytestmark = slurm.MARKS
# in the place of the training environment's python: `tepo train` with an engine that needs no server
SCRIPTED = f"""#!/bin/bash
words=()
for word in "$@"; do
  [ "$word" = tepo_megatron ] && word=tests.e2e.scripted_run
  words+=("$word")
done
exec {sys.executable} "${{words[@]}}"
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    if why := hosts.missing():
        pytest.skip(why)
    names = tmp_path_factory.mktemp("etc") / "hosts"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    with hosts.two_hosts() as two:
        for host in two:
            host.call("mount", "--bind", str(names), "/etc/hosts")
            assert host.call("hostname", "--ip-address").strip() == "127.0.1.1"
        yield two


@pytest.fixture(scope="module")
def cluster(two: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.running(tmp_path_factory.mktemp("slurm"), machines=3, hosts=two) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TEPO_TEST_ENGINE": "good"}
        yield cluster


def called(cluster: slurm.Slurm, folder: Path, *words: str | Path) -> tuple[int, str]:
    """Run the launcher on the controller's host; return its status and output."""
    call = [*cluster.enter, "env", f"--chdir={folder}", PYTHON, "-m", "launch", *words]
    done = subprocess.run(call, env=cluster.environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def trains(cluster: slurm.Slurm, folder: Path, model: Path, *words: str, **keys: Any) -> tuple[int, str]:
    """Submit a run of two machines with a rank each, whose engine needs no server; return the launcher's status and output."""
    python = folder / "python"
    python.write_text(SCRIPTED)
    python.chmod(0o755)
    tree = {"python": str(python), "ranks_per_node": 1, "environment": PATHS, "slurm": SLURM | {"time": "00:20:00"}} | keys
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree))
    settings = SHORT | {
        "name": "run", "parallel__tp": 1, "parallel__dp": 2, "training__steps": 2, "checkpoint__every": 2, "model__path": model,
        "data__train": model / "train.jsonl", "data__eval": model / "eval.jsonl", "evaluation__every": 0,
        "rollout__server__urls": "[http://127.0.0.1:9]", "sync__transport__folder": "weights",
    }  # fmt: skip
    of_launch = ["--executor", "slurm", "--cluster", "profile.yaml", "--allow-dirty", *words]
    return called(cluster, folder, ROOT / "examples" / "demo.yaml", *of_launch, *words_of(settings))


def job_of(said: tuple[int, str]) -> str:
    status, text = said
    assert status == 0, text
    return text.split(";")[0].removeprefix("job ")


def log_of(folder: Path, kind: str, job: str) -> str:
    return (folder / "runs" / "run" / "launch" / f"run-{kind}-{job}.log").read_text()


def test_two_machines_whose_own_name_is_a_loopback_address_train(
    cluster: slurm.Slurm, two: tuple[Host, Host], random_model: Path, tmp_path: Path
) -> None:
    job = job_of(trains(cluster, tmp_path, random_model, node_check={"timeout_seconds": 200}))
    assert cluster.ended(job, timeout=300) == "COMPLETED", called(cluster, tmp_path, "logs", "runs/run")
    check = log_of(tmp_path, "check", job)
    assert "node check: good: n1, n2" in check and "all-reduce over 2 machines x 1: " in check, check
    (endpoint,) = tmp_path.glob("runs/run/launch/check-*/endpoint")
    assert endpoint.read_text().split()[0] == two[0].address
    assert [r["step"] for r in records(tmp_path / "runs" / "run")] == [1, 2]
    assert (tmp_path / "runs/run/launch/jobs/1/rank-1.log").exists()


def test_a_machine_without_the_shared_folder_ends_the_job_by_name_or_is_left_out(
    cluster: slurm.Slurm, two: tuple[Host, Host], random_model: Path, tmp_path: Path
) -> None:
    two[1].call("mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    check = {"skip": ["all_reduce"], "timeout_seconds": 60}
    slurm_keys = SLURM | {"time": "00:20:00", "options": {"nodelist": "n1,n2"}}
    try:
        job = job_of(trains(cluster, tmp_path, random_model, node_check=check, slurm=slurm_keys | {"restarts": 0}))
        assert cluster.ended(job, timeout=200) == "FAILED"
        said = log_of(tmp_path, "train-batch", job)
        assert "launch: the node check failed and nothing was started" in said, said
        assert "n2: does not see " in said and "1 of 2 machines are good, and 2 are needed" in said, said
        assert records(tmp_path / "runs" / "run") == []
        status, again = trains(cluster, tmp_path, random_model, node_check=check | {"spare_nodes": 1})
        job = job_of((status, again))
        assert cluster.ended(job, timeout=300) == "COMPLETED", called(cluster, tmp_path, "logs", "runs/run")
        checked = log_of(tmp_path, "check", job)
        assert "node check: left out: n2: does not see " in checked and "node check: good: n1, n3" in checked, checked
        assert [r["step"] for r in records(tmp_path / "runs" / "run")] == [1, 2]
    finally:
        two[1].call("umount", "--lazy", str(tmp_path))


def test_a_job_whose_warning_comes_before_its_first_step_ends(cluster: slurm.Slurm, random_model: Path, tmp_path: Path) -> None:
    """The warning comes within half a minute, and each task waits first: no start finishes a step."""
    keys = SLURM | {"time": "00:03:00", "warning_seconds": 150, "setup": ["sleep 20"], "idle_starts": 2}
    job = job_of(trains(cluster, tmp_path, random_model, slurm=keys, node_check={"skip": ["all_reduce"]}))
    assert cluster.ended(job, timeout=600) == "FAILED", called(cluster, tmp_path, "logs", "runs/run")
    said = log_of(tmp_path, "train-batch", job)
    assert said.count("launch: the run has saved and ended; queued again; newest checkpoint: none") == 1, said
    assert (
        "newest checkpoint: none, as at the beginning of 2 starts in a row: this is the end; raise slurm.time=00:03:00" in said
    )
    assert records(tmp_path / "runs" / "run") == [] and cluster.about(job)["Restarts"] == "1"


def test_a_queued_job_without_a_record_is_found_by_its_script(cluster: slurm.Slurm, random_model: Path, tmp_path: Path) -> None:
    """A `launch` that is killed between sbatch and the record leaves such a job."""
    keys = {"setup": ["sleep 100"], "restarts": 0}
    job = job_of(trains(cluster, tmp_path, random_model, slurm=SLURM | {"time": "00:20:00"} | keys))
    (tmp_path / "runs/run/launch/jobs/1/job.json").unlink()
    status, said = trains(cluster, tmp_path, random_model, slurm=SLURM | keys)
    assert status == 1 and f"job 1 of this run (slurm job {job}) has not ended" in said, said
    assert f"job {job} is cancelled" in called(cluster, tmp_path, "cancel", "runs/run")[1]
    assert cluster.ended(job, timeout=120) == "CANCELLED"
