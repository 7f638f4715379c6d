"""A real Slurm whose machines have GPUs as generic resources.

In the first tests the GPUs are empty files, and `nvidia-smi` is a script that lists as many as Slurm has given to the step.
In the others they are devices without a driver, and Slurm's cgroups keep a step from those of other jobs: to open one fails
with "No such device" where it is allowed, and with "Operation not permitted" where it is not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import slurm
from tests.launch.cases import PYTHON, ROOT
from tests.tiny import tiny_qwen3

pytestmark = [
    pytest.mark.full,
    pytest.mark.slurm,
    pytest.mark.e2e,
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]
NVIDIA_SMI = "#!/bin/bash\nfor i in $(seq ${SLURM_GPUS_ON_NODE:-0}); do echo 580.65.06; done\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.running(tmp_path_factory.mktemp("slurm"), machines=2, gpus=2) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        yield cluster


def doctor(cluster: slurm.Slurm, folder: Path, nodes: int, listing: str = NVIDIA_SMI, **keys: Any) -> tuple[int, str]:
    """Run `launch doctor` as a job on machines with two GPUs each; return its status and output."""
    (folder / "nvidia-smi").write_text(listing)
    (folder / "nvidia-smi").chmod(0o755)
    check = {"skip": ["driver", "cudnn", "all_reduce"], "timeout_seconds": 60}
    tree = {
        "python": sys.executable, "environment": {"PATH": f"{folder}:{slurm.PATH}"}, "gpus_per_node": 2, "node_check": check,
        "slurm": {"account": "lab", "partition": "all", "time": "00:30:00"},
    }  # fmt: skip
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree | keys))
    call = [PYTHON, "-m", "launch", "doctor", "--cluster", "profile.yaml", "--nodes", str(nodes)]
    done = subprocess.run(
        call, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_an_exclusive_job_gets_the_gpus_that_its_profile_names(cluster: slurm.Slurm, tmp_path: Path) -> None:
    status, said = doctor(cluster, tmp_path, 2)
    assert status == 0 and "good: n1, n2" in said, said
    (job,) = (path.name.split("-")[-1].removesuffix(".log") for path in tmp_path.glob("jobs/doctor/launch/*batch*.log"))
    about = cluster.about(job)
    assert about["TresPerNode"] == "gres:gpu:2" and about["OverSubscribe"] == "NO", about


def test_more_gpus_than_a_machine_has_are_refused_by_slurm_in_one_line(cluster: slurm.Slurm, tmp_path: Path) -> None:
    status, said = doctor(cluster, tmp_path, 1, gpus_per_node=4)
    assert status == 1 and "launch: error: " in said and "Traceback" not in said, said
    assert "Requested node configuration is not available" in said or "gpus_per_node=4" in said, said


def test_a_conversion_shares_a_machine_and_takes_no_gpu(cluster: slurm.Slurm, tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "model", layers=1)
    section = {"account": "lab", "partition": "all", "time": "00:30:00", "convert": {"mem": "100", "time": "00:10:00"}}
    tree = {"python": sys.executable, "gpus_per_node": 2, "slurm": section}
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(tree))
    words = [
        "convert",
        "jobs/look",
        "--executor",
        "slurm",
        "--cluster",
        "profile.yaml",
        "--allow-dirty",
        "--",
        "inspect",
        "model",
    ]
    call = [PYTHON, "-m", "launch", *words]
    done = subprocess.run(call, cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split(";")[0].removeprefix("job ").strip()
    assert cluster.ended(job, timeout=120) == "COMPLETED"
    about = cluster.about(job)
    assert about["OverSubscribe"] == "OK" and "TresPerNode" not in about and about["TimeLimit"] == "00:10:00", about
    assert any("vocab" in log.read_text() for log in tmp_path.glob("jobs/look/launch/*convert*.log"))


# lists the devices that the process may open, as NVIDIA's does
OPENING = """#!/bin/bash
for gpu in {folder}/gpu[0-9]; do
  if ! cat $gpu 2>&1 | grep -q 'not permitted'; then echo 580.65.06; fi
done
"""
# in the place of python: the node check runs, `tepo train` and `tepo serve` say what they see
SEEING = """#!/bin/bash
if [[ $1 = *node_check.py ]]; then exec {python} "$@"; fi
echo "$3 sees $(nvidia-smi | wc -l) GPUs, $CUDA_VISIBLE_DEVICES"
if [ "$3" = serve ]; then sleep 60; else sleep 8; fi
"""


@pytest.fixture(scope="module")
def constrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    if why := slurm.no_cgroups():
        pytest.skip(why)
    with slurm.running(tmp_path_factory.mktemp("cgroups"), machines=1, gpus=2, cgroups=True) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        yield cluster


def test_a_step_may_open_the_gpus_of_its_job_and_no_others(constrained: slurm.Slurm, tmp_path: Path) -> None:
    opening = OPENING.format(folder=constrained.folder)
    status, said = doctor(constrained, tmp_path, 1, opening, gpus_per_node=2)
    assert status == 0 and "n1: " in said and "2 GPUs, driver 580.65.06" in said, said
    status, said = doctor(constrained, tmp_path, 1, opening, gpus_per_node=1)
    assert status == 0 and "1 GPUs, driver 580.65.06" in said, said
    status, said = doctor(constrained, tmp_path, 1, opening, gpus_per_node=None, ranks_per_node=2)
    assert status == 1 and "n1: nvidia-smi fails" in said, said  # a profile that asks Slurm for none


def test_ranks_and_servers_of_one_machine_see_the_same_gpus(constrained: slurm.Slurm, tmp_path: Path) -> None:
    """Both are steps of one job, which overlap."""
    for name, text in {"nvidia-smi": OPENING, "python": SEEING}.items():
        (tmp_path / name).write_text(text.format(folder=constrained.folder, python=sys.executable))
        (tmp_path / name).chmod(0o755)
    tiny_qwen3(tmp_path / "model", layers=2)
    (tmp_path / "model" / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 40)
    tree = {
        "python": str(tmp_path / "python"), "gpus_per_node": 2, "environment": {"PATH": f"{tmp_path}:{slurm.PATH}"},
        "node_check": {"skip": ["all_reduce"]}, "slurm": {"account": "lab", "time": "00:30:00", "restarts": 0},
    }  # fmt: skip
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(tree))
    settings = {
        "model.path": "model", "data.train": "model/train.jsonl", "data.eval": "null", "parallel.tp": "2", "name": "run",
        "rollout.colocate": "true", "rollout.servers": "2", "rollout.server.rendezvous": "servers",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    call = [PYTHON, "-m", "launch", ROOT / "examples" / "demo.yaml", "--executor", "slurm", "--cluster", "profile.yaml"]
    done = subprocess.run(
        [*call, "--allow-dirty", "--no-preflight", *words],
        cwd=tmp_path, env=constrained.environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split(";")[0].removeprefix("job ")
    assert constrained.ended(job, timeout=120) == "COMPLETED", constrained.logs()
    for task in ("train", "serve"):
        (log,) = tmp_path.glob(f"runs/run/launch/run-{task}-{job}-0-*.log")
        assert f"{task} sees 2 GPUs, 0,1\n" in log.read_text()
