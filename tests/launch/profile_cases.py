"""Dry runs with each profile of launch/profiles and with each key of a profile, whose output is in golden/profiles.

`python -m tests.launch.profile_cases` in .venv writes them again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.launch import cases

FOLDER = cases.GOLDEN / "profiles"
PROFILES = cases.ROOT / "launch" / "profiles"
SLURM: dict[str, Any] = {
    "qos": "high", "mem": "0", "constraint": "h100&nvme", "reservation": "tuesday", "time": "08:00:00", "account": "lab",
    "srun_args": ["--mpi=none", "--container-writable"], "setup": ["module load cuda/13.0", 'export NOTE="it is $HOME"'],
    "options": {"exclude": "n13", "mail-type": "END"}, "exclusive": True, "partition": "batch",
}  # fmt: skip
# every key that changes a script of Slurm
ALL_OF_SLURM: dict[str, Any] = {
    "python": "/opt/venv/bin/python",
    "gpus_per_node": None,
    "ranks_per_node": 8,
    "cache": "/raid/cache",
    "network": {"interface": "=eth0,eth1", "infiniband": "=mlx5_0,mlx5_1", "port": 29411},
    "container": {"image": "lab#tepo:sglang", "mounts": ["/shared:/shared"], "node_mounts": ["/raid:/raid"]},
    "node_check": {
        "skip": ["cudnn", "clock"], "spare_nodes": 2, "min_gb_per_second": 40.0, "max_clock_seconds": 1.0,
        "timeout_seconds": 600,
    },
    "slurm": SLURM,
}  # fmt: skip
HERE = ["--model.path", "models/Qwen3-14B", "--data.train", "data/train.jsonl"]
TWO = ["--parallel.dp", "2", "--rollout.servers", "2", "--rollout.server.rendezvous", "servers"]


def profiles() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return name -> (executor, profile) of all cases."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted(PROFILES.glob("*.yaml")):
        tree = yaml.safe_load(path.read_text())
        found[path.stem] = "slurm" if "slurm" in tree else "local", tree
    found["all-of-slurm"] = "slurm", ALL_OF_SLURM
    return found


def dry_runs(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Return the output of all cases for a project in /project."""
    cases.prepare(folder)
    calls = {}
    for name, (executor, tree) in profiles().items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        more = HERE if executor == "local" else [*HERE, *TWO]
        calls[name] = ["run.yaml", "--cluster", f"{name}.yaml", "--executor", executor, "--dry-run", *more]
    calls["local"] += ["--platform", "cpu"]
    return {name: (status, cases.normal(out, folder), said) for name, (status, out, said) in cases.call(folder, calls).items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        FOLDER.mkdir(exist_ok=True)
        for case, (status, text, said) in dry_runs(Path(scratch)).items():
            assert status == 0, (case, said)
            (FOLDER / f"{case}.txt").write_text(text)
