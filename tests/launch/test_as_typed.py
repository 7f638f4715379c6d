"""README's lines for a cluster, as typed: the dry run prints the scripts, and the same line without --dry-run is queued."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tepo_megatron.plan.models import KNOWN
from tests.launch.cases import ROOT
from tests.lint.docs.pages import commands

BENCHMARKS = ("aime24", "aime25", "amc", "math500", "omni_math", "olympiad_bench", "minerva")
pytestmark = pytest.mark.e2e


def lines_of(page: str) -> list[list[str]]:
    """Return the commands of the block that begins with `make launch`, without it."""
    found = list(commands(ROOT / page))
    start = next(i for i, words in enumerate(found) if words == ["make", "launch"])
    return found[start + 1 : start + 3]


def clone(folder: Path) -> None:
    """Make a folder with what a clone has after `make launch`."""
    for name in ("launch", "examples", "tepo_megatron", ".venv-launch"):
        (folder / name).symlink_to(ROOT / name)


def call(folder: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **more}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("page", ["README.md", "docs/launch.md"])
def test_the_lines_print_the_scripts(tmp_path: Path, page: str) -> None:
    clone(tmp_path)
    copy, dry_run = lines_of(page)
    assert copy[0] == "cp" and dry_run[-1] == "--dry-run"
    for words in (copy, dry_run):
        done = call(tmp_path, words)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("#==== ") == 2 and "#SBATCH --gpus-per-node=8" in done.stdout and "node_check.py" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_the_line_is_queued_once_what_preflight_asks_for_is_there(tmp_path: Path) -> None:
    """First everything is missing; after the steps that the README links, the job is queued."""
    clone(tmp_path)
    copy, dry_run = lines_of("README.md")
    call(tmp_path, copy)
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "sbatch").write_text(f"#!/bin/bash\necho called >> {shlex.quote(str(tmp_path / 'calls'))}\necho 4711\n")
    (bin / "sbatch").chmod(0o755)
    path = f"{bin}:{os.environ['PATH']}"
    done = call(tmp_path, dry_run[:-1], PATH=path)
    asked = (
        "container.image=",
        "container.mounts: /shared",
        "slurm.account=",
        "model.path=",
        "data.train=",
        "benchmark_folder=",
    )
    assert done.returncode == 1 and all(key in done.stderr for key in asked), done.stderr
    assert not (tmp_path / "calls").exists()

    profile = tmp_path / "cluster.yaml"
    text = profile.read_text().replace("my-account", "lab")
    profile.write_text(text.replace("/shared/images", f"{tmp_path}/images").replace("/shared:/shared", f"{tmp_path}:/shared"))
    files = {f"data/benchmarks/{name}.jsonl": '{"problem": "1+1?", "answer": "2"}\n' for name in BENCHMARKS}
    files |= {"images/tepo-train-vllm.sqsh": "an image", "data/dapo-math-17k.jsonl": '{"prompt": "1+1?", "answer": "2"}\n'}
    files |= {"models/Qwen3-14B/tokenizer.json": "{}", "models/Qwen3-14B/model.safetensors": "weights"}
    files["models/Qwen3-14B/config.json"] = json.dumps(dict(KNOWN["Qwen3-14B"]))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    done = call(tmp_path, [*dry_run[:-1], "--allow-dirty"], PATH=path)  # the checkout may be under work
    assert done.returncode == 0, done.stderr
    assert "job 4711" in done.stdout and (tmp_path / "calls").read_text() == "called\n"
