"""A job imports the version of the code that was submitted, whatever happens to the checkout afterwards."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch import snapshot
from tepo_megatron.errors import ConfigError
from tests.launch.cases import PROGRAM, PYTHON, ROOT

# Files of the checkout that are changed after the submission -> the process of the job that imports or runs it.
FILES = {
    "tepo_megatron/__init__.py": "all processes",
    "tepo_megatron/errors.py": "all processes",
    "tepo_megatron/config/io.py": "the launcher of ranks",
    "tepo_megatron/cli/parsers.py": "tepo serve and torchrun's ranks",
    "tepo_megatron/cli/commands.py": "tepo serve and torchrun's ranks",
    "tepo_megatron/launcher/ranks.py": "the launcher of ranks",
    "tepo_megatron/launcher/launcher.py": "ranks of the own launcher",
    "tepo_megatron/launcher/worker.py": "ranks of the own launcher",
    "tepo_megatron/controller/service_client.py": "rank 0",
    "tepo_megatron/controller/service.py": "the rollout service",
    "tepo_megatron/rewards/process.py": "the rollout service",
    "tepo_megatron/grading/worker.py": "the reward workers",
    "tepo_megatron/inference/servers/process.py": "the servers' owner",
    "tepo_megatron/inference/servers/guard.py": "the servers' guard",
    "tepo_megatron/weight_sync/receiver/vllm_plugin.py": "vLLM",
    "tepo_megatron/weight_sync/receiver/receiver.py": "vLLM",
    "tepo_megatron/weight_sync/receiver/sglang_server.py": "SGLang",
    "tools/convert.py": "the command convert",
    "launch/node_check.py": "the node check",
    "launch/packages.py": "the record of packages",
    "examples/functions.py": "the user's functions",
}
NEW = ("yaml.py", "sitecustomize.py", "tepo_megatron/__main__/__init__.py")  # they would hide a module of Python or of the job
MARK = '__import__("os").environ.get("MARKS") and open(__import__("os").environ["MARKS"], "a").write("{} {}\\n")\n'
FUNCTIONS = "def sample(sampler, prompt): ...\n\n\ndef grade(prompt, response, answer):\n    return 1.0\n"
SBATCH = """#!/bin/bash
number=$(($(ls "{jobs}" | wc -l) + 1))
cp "${{@: -1}}" "{jobs}/$number.sh"
echo $number
"""
# runs a step once; the options end where `bash` begins
SRUN = """#!/bin/bash
while [ $# -gt 0 ] && [ "$1" != bash ]; do
  case $1 in --output=*guard*) exit;; esac
  shift
done
SLURM_PROCID=0 SLURMD_NODENAME=n1 exec "$@"
"""
# in the place of the training environment's python: a server's machine, and the processes of a run in the place of `tepo train`
STUB = f"""#!/bin/bash
if [[ $* = *" train "* ]]; then exec {sys.executable} {ROOT}/tests/launch/processes.py "$4"; fi
if [[ $* = *" serve "* ]]; then exec {sys.executable} -m tepo_megatron --version; fi
exec {sys.executable} "$@"
"""
TREE = {
    "name": "a", "platform": "cpu", "model": {"path": "none"}, "data": {"train": "none.jsonl"}, "checkpoint": {"every": 1},
    "reward": {"terms": [{"type": "custom", "function": "examples/functions.py:grade"}]},
    "rollout": {"function": "examples/functions.py:sample"},
}  # fmt: skip
CHECK = {"skip": ["gpus", "driver", "cudnn", "clock", "all_reduce"], "timeout_seconds": 60}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True).stdout


def mark(folder: Path, name: str, word: str) -> None:
    """Have a file write a word and its name where MARKS says when it is imported or run."""
    path = folder / name
    lines = path.read_text().splitlines(keepends=True)
    lines = [line for line in lines if 'environ["MARKS"]' not in line]
    # after what has to come first: the docstring and imports from the future
    starts = [i for i, line in enumerate(lines) if re.match("(import|from|def) ", line) and "__future__" not in line]
    at = starts[0] if starts else len(lines)
    path.write_text("".join([*lines[:at], MARK.format(word, name), *lines[at:]]))


class Checkout:
    """A checkout of the code, as in a clone, with a Slurm that only keeps the batch scripts."""

    def __init__(self, folder: Path) -> None:
        self.path, self.bin, self.jobs, self.marks = folder / "work", folder / "bin", folder / "jobs", folder / "marks"
        for path in (self.bin, self.jobs):
            path.mkdir()
        for name in ("launch", "tepo_megatron", "tools"):
            shutil.copytree(ROOT / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__"))
        (self.path / "examples").mkdir()
        (self.path / "examples" / "functions.py").write_text(FUNCTIONS)
        (self.path / ".gitignore").write_text("__pycache__/\nruns/\nout/\n*.yaml\n")
        for name in FILES:
            mark(self.path, name, "ran")
        programs = {"sbatch": SBATCH.format(jobs=self.jobs), "srun": SRUN, "scontrol": "#!/bin/bash\necho n1\n", "py": STUB}
        for name, text in programs.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        git(self.path, "init")
        git(self.path, "add", ".")
        git(self.path, "commit", "-m", "a")
        (self.path / "run.yaml").write_text(yaml.safe_dump(TREE))
        slurm = {"account": "lab", "exclusive": False}
        profile = {
            "python": str(self.bin / "py"),
            "node_check": CHECK,
            "slurm": slurm,
            "environment": {"MARKS": str(self.marks)},
        }
        (self.path / "mine.yaml").write_text(yaml.safe_dump(profile))

    @property
    def environment(self) -> dict[str, str]:
        """Environment of all calls."""
        path = f"{self.bin}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}

    def launch(self, *calls: list[str]) -> list[tuple[int, str, str]]:
        """Call `python -m launch` several times in one process; return exit status, stdout and stderr of each."""
        words = [PYTHON, "-c", PROGRAM, json.dumps(dict(enumerate(calls)))]
        done = subprocess.run(
            words, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1]).values()]

    def run(self, job: int, restarts: int) -> str:
        """Run the batch script of a job, and return what its processes wrote."""
        more = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(
            ["bash", self.jobs / f"{job}.sh"], cwd="/", env=self.environment | more, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


SLURM = ["--executor", "slurm", "--cluster", "mine.yaml", "--no-preflight"]


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """Return which files the processes of the jobs ran or imported, by start. Before each start the checkout is changed."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    words = [["run.yaml", *SLURM], *([kind, f"out/{kind}", *SLURM, "--", "--help"] for kind in ("convert", "evaluate"))]
    answers = checkout.launch(*words)
    assert [status for status, _, _ in answers] == [0, 0, 0], answers
    found = {}
    for start in (0, 1):
        for name in list(FILES)[start::2] if start == 0 else FILES:
            mark(checkout.path, name, f"seen{start}")
        for name in NEW:
            (checkout.path / name).parent.mkdir(exist_ok=True)
            (checkout.path / name).write_text(MARK.format(f"seen{start}", name))
        checkout.marks.write_text("")
        for job in (1, 2, 3):
            checkout.run(job, restarts=start)
        found[start] = set(checkout.marks.read_text().splitlines())
    return found


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.parametrize("name", FILES)
def test_a_change_of_the_checkout_reaches_no_process_of_a_job_that_was_submitted(marks: dict[int, set[str]], name: str) -> None:
    for start, found in marks.items():
        assert [line for line in found if line.startswith("seen")] == [], f"start {start} of {FILES[name]}"
        if FILES[name] != "vLLM" or importlib.util.find_spec("vllm") is not None:
            assert f"ran {name}" in found, f"{FILES[name]} did not run in start {start}"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout with one file of each kind."""
    for name in ("tepo_megatron/a.py", "tepo_megatron/page.html", "examples/run.yaml", "README.md", "mine/reward.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n")
    (tmp_path / ".gitignore").write_text("runs/\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    return tmp_path


def test_a_snapshot_is_the_commit_and_is_used_again(small: Path) -> None:
    (small / "README.md").write_text("two\n")  # no code
    (small / "notes.txt").write_text("")
    code = snapshot.read(small)
    code.refuse_changes()
    folder = code.take(small / "runs")
    assert folder == small / "runs" / "code" / git(small, "rev-parse", "HEAD")[:12]
    assert (folder / "README.md").read_text() == "one\n" and not (folder / "notes.txt").exists()
    (folder / "of-a-job").write_text("")
    assert code.take(small / "runs") == folder and (folder / "of-a-job").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert code.frozen(str(small / "mine/reward.py"), small / "runs") == str(folder / "mine/reward.py")
    assert code.frozen("/etc/hosts", small / "runs") == "/etc/hosts"


@pytest.mark.parametrize("name", ["tepo_megatron/a.py", "tepo_megatron/page.html", "tepo_megatron/new.py", "mine/new.py"])
def test_changed_code_is_refused_or_recorded(small: Path, name: str) -> None:
    (small / name).write_text("two\n")
    (small / "mine/reward.py").unlink()
    before = git(small, "status", "--porcelain")
    code = snapshot.read(small)
    with pytest.raises(ConfigError, match=f"differs from its commit: .*{name}.*; commit, stash.*--allow-dirty"):
        code.refuse_changes()
    folder = code.take(small / "runs")
    assert folder is not None and (folder / name).read_text() == "two\n" and not (folder / "mine/reward.py").exists()
    diff = folder.with_name(f"{folder.name}.diff").read_text()
    assert f"+++ b/{name}" in diff and "--- a/mine/reward.py" in diff
    assert git(small, "status", "--porcelain") == before
    (small / name).write_text("three\n")
    assert snapshot.read(small).name != code.name
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="was changed during the submission"):
        code.take(small / "runs")
