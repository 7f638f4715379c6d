"""The dry runs with SkyPilot, as cases.py has those with Slurm. `python -m tests.launch.skypilot_cases` writes them again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.launch import cases

PYTHON = cases.ROOT / ".venv-sky" / "bin" / "python"
WHY_NOT = "no .venv-sky; `make launch-sky` makes it"
SKYPILOT = {"infra": "k8s/lab", "gpu": "H100", "cpus": "64+", "memory": "800+", "workdir": "/shared/me"}
BUCKET = SKYPILOT | {
    "infra": "aws/us-east-1", "use_spot": True, "disk_size": 1000, "setup": ['echo "it is $HOME"'], "error_restarts": 3,
    "storage": {
        "/shared": {"name": "runs", "store": "s3", "mode": "MOUNT_CACHED"},
        "/models": {"source": "s3://models/qwen", "mode": "COPY"},
    },
}  # fmt: skip
CLUSTER: dict[str, Any] = {key: value for key, value in cases.CLUSTER.items() if key != "slurm"}
FILES = {
    "run.yaml": cases.CONFIG,
    "volume.yaml": CLUSTER | {"container": {"image": "lab/tepo:vllm"}, "skypilot": SKYPILOT | {"volumes": {"/shared": "lab"}}},
    "bucket.yaml": CLUSTER | {"python": ".venv/bin/python", "skypilot": BUCKET},
}
APART = [*cases.APART, "--sync.transport.folder", "weights"]
CASES = {
    "skypilot-one": ["run.yaml", "--cluster", "bucket.yaml", "--model.path", "/models/14b"],
    "skypilot-apart": ["run.yaml", "--cluster", "volume.yaml", *APART],
    "skypilot-in-turns": [
        "run.yaml", "--cluster", "volume.yaml", "--parallel.dp", "2", *cases.SERVERS, "--sync.transport.folder", "weights",
    ],
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write the files that the cases name."""
    for name, tree in FILES.items():
        (folder / name).write_text(yaml.safe_dump(tree, sort_keys=False))


def call(folder: Path, calls: dict[str, list[str]]) -> dict[str, tuple[int, str, str]]:
    """Run `python -m launch WORDS --executor skypilot` without a preflight; return the results, for a project in /project.

    Args:
        folder: Working directory.
        calls: Words of each call, by name.
    """
    words = {name: [*words, "--executor", "skypilot", "--no-preflight"] for name, words in calls.items()}
    done = cases.call(folder, words, PYTHON)
    return {
        name: (s, out.replace(str(folder), "/project"), err.replace(str(folder), "/project"))
        for name, (s, out, err) in done.items()
    }


def dry_runs(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Return the output of all cases."""
    prepare(folder)
    return call(folder, {name: [*words, "--dry-run"] for name, words in CASES.items()})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for case, (status, text, said) in dry_runs(Path(scratch)).items():
            assert status == 0, said
            (cases.GOLDEN / f"{case}.txt").write_text(text)
