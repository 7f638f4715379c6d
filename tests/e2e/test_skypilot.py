"""The scripts of a managed job of SkyPilot, as it would run them: setup on all machines, then run on all, all of them this one.

No cloud, no API server: SKYPILOT_* are set by hand. Real are the scripts, torchrun and its rendezvous, the ranks, the
checkpoints; the engine is scripted, and `tepo serve` a shell that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from launch import nemo_sky
from launch.executors import skypilot
from launch.layout import Layout, lay_out
from launch.profile import Cluster
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, to_yaml, validate_as
from tests.e2e.conftest import settings
from tests.e2e.test_faults import SHORT
from tests.living_folder import paths_below
from tests.parallel import resume_worlds as w

pytestmark = [pytest.mark.full, pytest.mark.e2e]
ROOT = Path(__file__).parents[2]
# in the place of the training environment's python; a file `broken` takes the third machine's interface away
PYTHON = f"""#!/bin/bash
if [[ $1 = *node_check.py && $SKYPILOT_NODE_RANK = 2 && -e BROKEN ]]; then set -- "$@" --interfaces bond7; fi
[[ "$*" != *"-m tepo_megatron serve"* ]] || {{ echo "serving: $*"; exec sleep 600; }}
words=()
for word in "$@"; do [ "$word" != tepo_megatron ] || word=tests.e2e.scripted_run; words+=("$word"); done
exec {sys.executable} "${{words[@]}}"
"""
RUN = SHORT | {
    "training__steps": 6, "parallel__tp": 1, "parallel__dp": 2, "checkpoint__every": 2, "name": "run", "output": "runs",
    "rollout__server__rendezvous": "servers", "rollout__max_response_tokens": 16, "training__max_tokens_per_microbatch": 512,
    "parallel__heartbeat_timeout": 10,
}  # fmt: skip


@dataclass
class Job:
    """A managed job of three machines: two with ranks, one that serves. `task` is SkyPilot's id, the same in each start."""

    folder: Path
    cfg: Config
    cluster: Cluster
    layout: Layout
    task: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "volume" / "runs" / "run"

    def hand_over(self) -> None:
        """Copy what SkyPilot copies to /nemo_run, to another place, since this machine is shared."""
        home = self.folder / "handed-over"
        scripts = {
            nemo_sky.SETUP: skypilot.setup_script(self.cluster),
            nemo_sky.RUN: skypilot.run_script(self.cfg, self.cluster, self.layout),
        }
        for path, text in (scripts | {nemo_sky.CONFIG: to_yaml(self.cfg)}).items():
            file = home / Path(path).relative_to(nemo_sky.HOME)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(nemo_sky.HOME, str(home)))
        if not (home / "code").exists():
            (home / "code").symlink_to(ROOT)

    def start(self, script: str, variable: str) -> list[subprocess.Popen[bytes]]:
        """Run a script on all machines at once."""
        more = {"SKYPILOT_TASK_ID": self.task, "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * 3), "TEPO_TEST_ENGINE": "slow"}
        environment = {**os.environ, **more, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        started = []
        for rank in range(3):
            log = (self.folder / f"machine-{rank}.log").open("ab")
            file = self.folder / "handed-over" / Path(script).relative_to(nemo_sky.HOME)
            started.append(
                subprocess.Popen(
                    ["bash", file],
                    env=environment | {variable: str(rank)}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
        self.processes += started
        return started

    def set_up(self) -> list[int]:
        """Run the setup and return the exit status of each machine."""
        return [process.wait(240) for process in self.start(nemo_sky.SETUP, "SKYPILOT_SETUP_NODE_RANK")]

    def begin(self) -> list[subprocess.Popen[bytes]]:
        return self.start(nemo_sky.RUN, "SKYPILOT_NODE_RANK")

    def said(self, rank: int) -> str:
        return (self.folder / f"machine-{rank}.log").read_text(errors="replace")

    def lose(self) -> None:
        """Kill all machines while they work."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(60)

    def until(self, condition: Callable[[], bool], machines: list[subprocess.Popen[bytes]], timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert all(p.poll() is None for p in machines), "\n".join(map(self.said, range(3)))
            assert time.monotonic() < deadline, "\n".join(map(self.said, range(3)))
            time.sleep(0.1)


@pytest.fixture
def job(random_model: Path, tmp_path: Path) -> Iterator[Job]:
    python = tmp_path / "python"
    python.write_text(PYTHON.replace("BROKEN", str(tmp_path / "broken")))
    python.chmod(0o755)
    sky = {"infra": "k8s/none", "workdir": str(tmp_path / "volume"), "volumes": {str(tmp_path / "volume"): "none"}}
    check = {"timeout_seconds": 120}
    cluster = validate_as(
        Cluster, {"python": str(python), "ranks_per_node": 1, "node_check": check, "skypilot": sky}, "cluster.yaml"
    )
    (tmp_path / "volume").mkdir()
    words = settings(random_model, **RUN, sync__transport__folder="weights")
    cfg = load_config(ROOT / "examples" / "demo.yaml", words)
    layout = lay_out(cfg, cluster)
    assert layout == Layout(2, 1, 1, 1)
    job = Job(tmp_path, cfg, cluster, layout, "sky-managed-2026-01-01-00-00-00-000000_run_7-0")
    job.hand_over()
    try:
        yield job
    finally:
        job.lose()


def test_a_job_that_lost_its_machines_resumes_and_its_servers_end_with_it(job: Job) -> None:
    assert job.set_up() == [0, 0, 0], job.said(0)
    machines = job.begin()
    job.until(lambda: "checkpoint of step 2" in job.said(0) + job.said(1), machines)
    assert "serving: -m tepo_megatron serve" in job.said(2) and "--address 127.0.0.1" in job.said(2)
    job.lose()

    assert job.set_up() == [0, 0, 0], job.said(0)
    assert "start 2 of this job" in job.said(0)
    machines = job.begin()
    assert [p.wait(300) for p in machines] == [0, 0, 0], "\n".join(map(job.said, range(3)))
    assert job.said(0).count("node check: good: machine-0, machine-1, machine-2") == 2
    assert "node check: all-reduce over 3 machines x 1: " in job.said(0)
    assert [r["step"] for r in w.records(job.run)] == [1, 2, 3, 4, 5, 6]
    assert "resume: from the checkpoint of step" in (job.run / "log.txt").read_text()
    assert json.loads((job.run / "summary.json").read_text())["steps"] == 6
    assert all(torch.isfinite(tensor).all() for tensor in w.weights(job.run).values())
    assert [line.split("servers/")[1] for line in job.said(2).splitlines() if "serving" in line] == [
        f"{job.task}-1",
        f"{job.task}-2",
    ]


def test_a_run_that_fails_ends_its_servers_with_its_status(job: Job) -> None:
    assert job.set_up() == [0, 0, 0]
    machines = job.begin()
    job.until(lambda: "checkpoint of step 2" in job.said(0) + job.said(1), machines)
    os.killpg(machines[1].pid, signal.SIGKILL)
    # rank 0 is restarted, and waits for the other one for 10 s and two minutes
    assert machines[0].wait(240) == machines[2].wait(60) == 1, "\n".join(map(job.said, range(3)))


def test_a_start_with_a_bad_machine_ends_on_all_of_them_with_its_name(job: Job) -> None:
    (job.folder / "broken").touch()
    assert job.set_up() == [0, 0, 0], job.said(0)
    assert [p.wait(200) for p in job.begin()] == [1, 1, 1]
    for rank in range(3):
        said = job.said(rank)
        assert "launch: the node check failed and nothing was started:\nmachine-2: has no interface bond7" in said, said
    assert "serving" not in job.said(2) and w.records(job.run) == []
    (job.folder / "broken").unlink()  # SkyPilot starts such a job again
    assert job.set_up() == [0, 0, 0]
    machines = job.begin()
    job.until(lambda: "checkpoint of step 2" in job.said(0) + job.said(1), machines)


def test_another_job_is_refused_the_folder_of_a_run(job: Job) -> None:
    (job.run / "checkpoints").mkdir(parents=True)
    assert job.set_up() == [1, 0, 0]
    assert "runs/run holds a run already; go on with it with --resume true" in job.said(0)
    assert not [path for path in paths_below(job.run) if path.suffix == ".starts"]
