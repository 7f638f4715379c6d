"""A real Slurm whose machines have GPUs as generic resources.

The GPUs are empty files, for which Slurm sets no CUDA_VISIBLE_DEVICES. There are no cgroups to keep a job from those of others.
`nvidia-smi` is a script that lists as many GPUs as Slurm has given to the step.
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


def doctor(cluster: slurm.Slurm, folder: Path, nodes: int, **keys: Any) -> tuple[int, str]:
    """Run `launch doctor` as a job on machines with two GPUs each; return its status and output."""
    (folder / "nvidia-smi").write_text(NVIDIA_SMI)
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
