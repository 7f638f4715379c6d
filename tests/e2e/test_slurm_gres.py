"""A real Slurm whose machines have GPUs as generic resources.

The GPUs are empty files, and `nvidia-smi` is a script that lists as many as Slurm has given to the step.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import slurm
from tests.launch.cases import PYTHON, ROOT
from tests.tiny import tiny_qwen3

pytestmark = slurm.MARKS
NVIDIA_SMI = "#!/bin/bash\nfor i in $(seq ${SLURM_GPUS_ON_NODE:-0}); do echo 580.65.06; done\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.running(tmp_path_factory.mktemp("slurm"), machines=2, gpus=2) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        yield cluster


def test_an_exclusive_job_gets_the_gpus_that_its_profile_names(cluster: slurm.Slurm, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    tree = {
        "python": sys.executable, "environment": {"PATH": f"{tmp_path}:{slurm.PATH}"}, "gpus_per_node": 2,
        "node_check": {"skip": ["driver", "cudnn", "all_reduce"], "timeout_seconds": 60},
        "slurm": {"account": "lab", "partition": "all", "time": "00:30:00"},
    }  # fmt: skip
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(tree))
    call = [PYTHON, "-m", "launch", "doctor", "--cluster", "profile.yaml", "--nodes", "2"]
    done = subprocess.run(call, cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "good: n1, n2" in done.stdout + done.stderr, done.stdout + done.stderr
    (job,) = (path.name.split("-")[-1].removesuffix(".log") for path in tmp_path.glob("jobs/doctor/launch/*batch*.log"))
    about = cluster.about(job)
    assert about["TresPerNode"] == "gres:gpu:2" and about["OverSubscribe"] == "NO", about


def test_a_conversion_shares_a_machine_and_takes_no_gpu(cluster: slurm.Slurm, tmp_path: Path) -> None:
    tiny_qwen3(tmp_path / "model", layers=1)
    section = {"account": "lab", "partition": "all", "time": "00:30:00", "convert": {"mem": "100", "time": "00:10:00"}}
    tree = {"python": sys.executable, "gpus_per_node": 2, "slurm": section}
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(tree))
    call = [PYTHON, "-m", "launch", "convert", "jobs/look", "--executor", "slurm", "--cluster", "profile.yaml", "--allow-dirty"]
    call += ["--", "inspect", "model"]
    done = subprocess.run(call, cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split(";")[0].removeprefix("job ").strip()
    assert cluster.ended(job, timeout=120) == "COMPLETED"
    about = cluster.about(job)
    assert about["OverSubscribe"] == "OK" and "TresPerNode" not in about and about["TimeLimit"] == "00:10:00", about
    assert any("vocab" in log.read_text() for log in tmp_path.glob("jobs/look/launch/*convert*.log"))
