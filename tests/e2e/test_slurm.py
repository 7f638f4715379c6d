"""Real jobs of a real Slurm, whose machines are all this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import slurm
from tests.e2e.test_faults import SHORT
from tests.launch.cases import PYTHON, ROOT, SECRET
from tests.parallel.resume_worlds import records
from tests.tiny import tiny_qwen3

pytestmark = [
    pytest.mark.full,
    pytest.mark.slurm,
    pytest.mark.e2e,
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]
# in the place of the training environment's python: `tepo train`, with an engine that needs no server
SCRIPTED = f"""#!/bin/bash
shift 2
exec {sys.executable} -m tests.e2e.scripted_run "$@"
"""
SLURM = {"account": "lab", "exclusive": False, "warning_seconds": 150, "time": "00:03:00"}
PATHS = {"PYTHONPATH": str(ROOT)}
STEPS = 64  # of half a second at least: more than fit before the signal, which comes within the first half minute


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.running(tmp_path_factory.mktemp("slurm"), machines=3) as cluster:
        cluster.environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TEPO_SERVER_KEY": SECRET}
        cluster.environment |= {"TEPO_TEST_ENGINE": "slow"}
        yield cluster


def launch(cluster: slurm.Slurm, folder: Path, *words: str | Path) -> str:
    call = [PYTHON, "-m", "launch", *words]
    done = subprocess.run(
        call, cwd=folder, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submitted(cluster: slurm.Slurm, folder: Path, *words: str | Path) -> str:
    """The number of the job."""
    said = launch(cluster, folder, *words, "--executor", "slurm")
    return said.split(";")[0].removeprefix("job ")


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def words_of(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", str(value))]


def no_secret_in(folder: Path) -> bool:
    return not any(SECRET in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_a_run_longer_than_its_time_limit_resumes_until_it_is_done(cluster: slurm.Slurm, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(SCRIPTED)
    python.chmod(0o755)
    profile = write(tmp_path / "profile.yaml", {"python": str(python), "environment": PATHS, "slurm": SLURM})
    tiny_qwen3(tmp_path / "model", layers=2)
    rows = [{"prompt": f"1+{i}?\n", "answer": str(1 + i)} for i in range(40)]
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / "model" / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = SHORT | {
        "training__steps": STEPS, "checkpoint__every": 16, "parallel__tp": 1, "name": "long", "overwrite": "true",
        "model__path": "model", "data__train": "model/train.jsonl", "data__eval": "model/eval.jsonl",
    }  # fmt: skip
    job = submitted(cluster, tmp_path, ROOT / "examples" / "demo.yaml", "--cluster", profile, *words_of(settings))
    assert cluster.ended(job, timeout=900) == "COMPLETED", launch(cluster, tmp_path, "logs", "runs/long")
    run = tmp_path / "runs" / "long"
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))
    batch = (run / "launch" / f"long-train-batch-{job}.log").read_text()
    restarts = batch.count("launch: queued again; newest checkpoint: step-")
    assert restarts >= 1, batch
    told = (run / "log.txt").read_text()
    assert told.count("resume: from the checkpoint of step ") == restarts, told
    status = launch(cluster, tmp_path, "status", "runs/long")
    assert "COMPLETED, " in status and f"restarts: {restarts}" in status and f"{STEPS} steps recorded, ended" in status
    assert f"long-train-{job}.log" in launch(cluster, tmp_path, "logs", "runs/long")


@pytest.mark.server
def test_two_machines_of_ranks_and_one_of_servers(cluster: slurm.Slurm, base: Path, tmp_path: Path) -> None:
    """torchrun over two machines, a real vLLM on the third, which is found, sent weights, and ended with the run."""
    slow = SLURM | {"time": "00:20:00"}
    tree = {"python": sys.executable, "environment": PATHS, "ranks_per_node": 1, "slurm": slow}
    profile = write(tmp_path / "profile.yaml", tree)
    settings = {
        "name": "apart", "parallel__tp": 2, "training__steps": 3, "checkpoint__every": 2, "model__path": base,
        "data__train": base / "train.jsonl", "data__eval": base / "eval.jsonl", "evaluation__max_problems": 8,
        "rollout__server__rendezvous": tmp_path / "servers", "sync__folder": tmp_path / "weights",
        "rollout__prompts_per_step": 8, "training__minibatch_prompts": 4, "rollout__filter_uniform_groups": "false",
    }  # fmt: skip
    job = submitted(cluster, tmp_path, ROOT / "examples" / "demo.yaml", "--cluster", profile, *words_of(settings))
    assert cluster.ended(job, timeout=500) == "COMPLETED", launch(cluster, tmp_path, "logs", "runs/apart")
    run = tmp_path / "runs" / "apart"
    found = records(run)
    assert len(found) == 3 and all(r["rollout/logprob_diff_mean"] <= 1e-5 for r in found)
    assert "is ready: http://" in (run / "launch" / f"apart-serve-{job}.log").read_text()
    assert (run / "hf" / "config.json").exists() and list((tmp_path / "weights").iterdir()) == []
    assert no_secret_in(tmp_path)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _bytes(path)]
    assert left == []


def test_a_job_waits_for_another_and_is_cancelled(cluster: slurm.Slurm, tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/bash\nexec sleep 100\n")
    sleeper.chmod(0o755)
    profile = write(tmp_path / "profile.yaml", {"python": str(sleeper), "slurm": SLURM | {"restarts": 0}})
    first = submitted(cluster, tmp_path, "convert", "first", "--cluster", profile)
    second = submitted(cluster, tmp_path, "convert", "second", "--cluster", profile, "--after", "first")
    assert "PENDING (Dependency)" in launch(cluster, tmp_path, "status", "second")
    assert f"job {first} is cancelled" in launch(cluster, tmp_path, "cancel", "first")
    assert cluster.ended(first, timeout=30) == "CANCELLED"
    launch(cluster, tmp_path, "cancel", "second")
    assert cluster.ended(second, timeout=30) == "CANCELLED"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
