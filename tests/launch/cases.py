"""The dry runs whose scripts are in golden/. `python -m tests.launch.cases` in .venv writes them again."""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import yaml

from launch.jobs import JobFolder
from tests.living_folder import files_below

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-launch" / "bin" / "python"
GOLDEN = Path(__file__).parent / "golden"
SECRET = "not-for-any-file-c0ffee"

CONFIG = {
    "name": "qwen",
    "model": {"path": "/shared/models/Qwen3-14B"},
    "data": {"train": "/shared/data/train.jsonl"},
    "parallel": {"tp": 8},
    "rollout": {"colocate": True, "server": {"tp": 8}},
    "checkpoint": {"every": 5},
}
CLUSTER = {
    "gpus_per_node": 8,
    "environment": {"NCCL_DEBUG": "WARN", "NOTE": "it's $HOME"},
    "secrets": ["WANDB_API_KEY"],
    "network": {"interface": "eth0", "infiniband": "mlx5"},
    "slurm": {"account": "lab", "partition": "batch", "time": "04:00:00"},
}
CONTAINER = {"image": "/shared/tepo.sqsh", "mounts": ["/shared:/shared:ro", "/scratch:/scratch"]}
SHARING = {
    "convert": {"mem": "128G", "cpus-per-task": "16", "partition": "cpu", "time": "00:10:00"},
    "evaluate": {"gpus-per-node": "2"},
}
# every key that changes a script of Slurm
EVERY_KEY = {
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
    "slurm": {
        "qos": "high", "mem": "0", "constraint": "h100&nvme", "reservation": "tuesday", "time": "08:00:00", "account": "lab",
        "srun_args": ["--mpi=none", "--container-writable"],
        "setup": ["module load cuda/13.0", 'export NOTE="it is $HOME"'],
        "options": {"exclude": "n13", "mail-type": "END"}, "exclusive": True, "partition": "batch",
    },
}  # fmt: skip
FILES = {
    "run.yaml": CONFIG,
    "bare.yaml": CLUSTER | {"python": ".venv/bin/python"},
    "contained.yaml": CLUSTER | {"container": CONTAINER},
    "every_key.yaml": EVERY_KEY,
    "sharing.yaml": CLUSTER | {"python": ".venv/bin/python", "slurm": CLUSTER["slurm"] | SHARING},
}
SERVERS = ["--rollout.servers", "2", "--rollout.server.rendezvous", "servers"]
APART = ["--parallel.dp", "2", "--rollout.colocate", "false", *SERVERS]
HERE = ["--model.path", "models/Qwen3-14B", "--data.train", "data/train.jsonl"]
CASES = {
    "colocated": ["run.yaml", "--cluster", "contained.yaml"],
    "apart": ["run.yaml", "--cluster", "bare.yaml", *APART, "--sync.transport.folder", "weights", "--rollout.top_k", "50"],
    "in_turns": ["run.yaml", "--cluster", "bare.yaml", "--parallel.dp", "2", *SERVERS],
    "every_key": ["run.yaml", "--cluster", "every_key.yaml", *HERE, "--parallel.dp", "2", *SERVERS],
    "convert": ["convert", "out", "--cluster", "bare.yaml", "--after", "before", "--", "inspect", "a model"],
    "convert_shared": ["convert", "out", "--cluster", "sharing.yaml", "--", "inspect", "a model"],
    "evaluate_shared": ["evaluate", "out", "--cluster", "sharing.yaml", "--", "models/one"],
}
# all in one process, because the import of NeMo-Run takes most of the time
PROGRAM = """
import contextlib, io, json, sys
from launch.__main__ import main
def call(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return [status, out.getvalue(), err.getvalue()]
print(json.dumps({name: call(words) for name, words in json.loads(sys.argv[1]).items()}))
"""


def call(folder: Path, calls: dict[str, list[str]], python: Path = PYTHON) -> dict[str, tuple[int, str, str]]:
    """Run `python -m launch WORDS` in `folder` several times; return exit status, stdout and stderr by name."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "WANDB_API_KEY": SECRET}
    environment["TEPO_SERVER_KEY"] = SECRET
    words = [python, "-c", PROGRAM, json.dumps(calls)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return {name: tuple(result) for name, result in json.loads(done.stdout.splitlines()[-1]).items()}


def files_with_secret(folder: Path) -> list[Path]:
    """Return the files below a folder that hold the secret, except snapshots of the code, which have this file."""
    files = (path for path in files_below(folder) if "/launch/code/" not in str(path))
    return [path for path in files if SECRET in path.read_text(errors="replace")]


def prepare(folder: Path) -> None:
    """Write the files that the cases name, and a job for which one of them waits."""
    for name, tree in FILES.items():
        (folder / name).write_text(yaml.safe_dump(tree, sort_keys=False))
    JobFolder(folder / "before", 1).record("slurm", "4711")


def dry_runs(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Return the output of all cases for a project in /project."""
    prepare(folder)
    calls = {name: [*before_dashes(words, "--executor", "slurm", "--dry-run")] for name, words in CASES.items()}
    return {name: (s, normal(out, folder), err) for name, (s, out, err) in call(folder, calls).items()}


def normal(text: str, folder: Path) -> str:
    """Return the output of a dry run for a project in /project and a checkout of a commit c0ffee."""
    text = text.replace(str(folder), "/project").replace(f":{ROOT}:", ":/checkout:")
    return re.sub(r"/launch/code/[0-9a-f-]+", "/launch/code/c0ffee", text)


def before_dashes(words: list[str], *more: str) -> list[str]:
    """Return the words with others inserted before their "--", behind which a command begins; appended if there is none."""
    at = words.index("--") if "--" in words else len(words)
    return [*words[:at], *more, *words[at:]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for case, (status, text, said) in dry_runs(Path(scratch)).items():
            assert status == 0, said
            GOLDEN.mkdir(exist_ok=True)
            (GOLDEN / f"{case}.sh").write_text(text)
