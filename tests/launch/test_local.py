"""`python -m launch --executor local`: real runs of the real commands, and what becomes of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.launch.cases import PYTHON, ROOT, SECRET, files_with_secret
from tests.living_folder import files_below

pytestmark = pytest.mark.e2e
STAND_IN = """#!/bin/bash
[[ $1 = *.py ]] && exit  # the record of packages
trap 'kill $! 2>/dev/null; echo told to end; exit 3' TERM
echo "called: $*; secret: ${WANDB_API_KEY:+there}"
[ "${2:-}" = tepo_megatron ] && [ "${3:-}" = serve ] && nap=60
[ -z "${nap:-$NAP}" ] || { sleep "${nap:-$NAP}" & wait; }
"""


def launch(folder: Path, *words: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "WANDB_API_KEY": SECRET}
    command, out = [PYTHON, "-m", "launch", *words], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, output


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A config, a profile of this machine, and one whose `python` only prints its arguments."""
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    run = {"name": "a", "platform": "cpu", "model": {"path": "no-model"}, "data": {"train": "t.jsonl"}}
    here = {"python": sys.executable, "environment": {"PYTHONPATH": str(ROOT)}}
    stand_in_for = {"python": str(stand_in), "secrets": ["WANDB_API_KEY"]}
    short, long = (stand_in_for | {"environment": {"NAP": seconds}} for seconds in ("3", "60"))
    for name, tree in {"run": run, "here": here, "short": short, "long": long}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


@pytest.mark.full
def test_a_run_that_fails_says_why_and_its_logs_are_found(project: Path) -> None:
    status, output = ended(launch(project, "run.yaml", "--allow-dirty", "--cluster", "here.yaml", "--name", "b"))
    why = "tepo: error: no-model/config.json: not found"
    assert status == 1 and why in output, output
    assert yaml.safe_load((project / "runs/b/launch/jobs/1/config.yaml").read_text())["name"] == "b"
    assert "local job" in (said := ended(launch(project, "status", "runs/b"))[1]) and said.rstrip().endswith("ended")
    status, output = ended(launch(project, "logs", "runs/b"))
    assert status == 0 and why in output


@pytest.mark.full
def test_servers_apart_end_with_the_run(project: Path) -> None:
    apart = ["--rollout.server.rendezvous", "servers", "--sync.transport.folder", "weights", "--rollout.servers", "2"]
    status, _ = ended(launch(project, "run.yaml", "--allow-dirty", "--cluster", "short.yaml", *apart))
    (log,) = _logs(project)
    text = log.read_text()
    assert status == 0, text
    assert f"called: -m tepo_megatron train {project}/runs/a/launch/jobs/1/config.yaml; secret: there" in text
    assert (
        f"serve {project}/runs/a/launch/jobs/1/config.yaml --rollout.servers 2 --rollout.min_servers 1; secret: there\n" in text
    )
    assert "told to end" in text
    assert files_with_secret(project) == []


def test_cancel_ends_the_run_and_all_that_it_started(project: Path) -> None:
    process = launch(project, "run.yaml", "--allow-dirty", "--cluster", "long.yaml")
    try:
        deadline = time.monotonic() + 240
        while not any("called" in log.read_text() for log in _logs(project)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        assert json.loads((project / "runs/a/launch/jobs/1/job.json").read_text())["id"] == str(process.pid)
        assert "sent SIGTERM to process" in ended(launch(project, "cancel", "runs/a"))[1]
        status, _ = ended(process)
    finally:
        process.send_signal(signal.SIGTERM)
    assert status == 1
    (log,) = _logs(project)
    # what the process wrote itself: torchx copies it into combined.log ten times a second, until it ends
    assert "told to end" in log.with_name("stdout.log").read_text()
    assert not any(str(project).encode() in line for line in _command_lines())


def _logs(project: Path) -> list[Path]:
    return [path for path in files_below(project) if path.name == "combined.log"]


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes()
