"""Jobs that `python -m launch --executor kuberay` submits, run on a real Ray whose machines are all this one.

Kubernetes is a server that keeps the manifest; in its operator's place the test starts the entrypoint on the head.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.utils.processes import die_with_parent
from tests import rays
from tests.e2e.test_faults import SHORT
from tests.e2e.test_slurm import no_secret_in, prompts_of, steps_of, words_of
from tests.launch.cases import PYTHON, ROOT, SECRET
from tests.parallel.resume_worlds import records
from tests.scripted_kubernetes import Kubernetes, serving

pytestmark = [pytest.mark.full, pytest.mark.e2e]
# in the place of the training environment's python: `tepo train`, by torchrun or not, with an engine that needs no server
SCRIPTED = f"""#!/bin/bash
words=()
for word in "$@"; do
  [ "$word" = tepo_megatron ] && word=tests.e2e.scripted_run
  words+=("$word")
done
exec {sys.executable} "${{words[@]}}"
"""
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TEPO_TEST_ENGINE": "slow", "TEPO_SERVER_KEY": SECRET}


@dataclass(frozen=True)
class Site:
    """A cluster, its API, and a project's folder."""

    ray: rays.Cluster
    api: Kubernetes
    environment: dict[str, str]
    folder: Path

    def launch(self, *words: str | Path) -> str:
        """Run the launcher and return its output."""
        done = subprocess.run(
            [PYTHON, "-m", "launch", *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def profile(self, python: str, **section: Any) -> Path:
        """Write a profile of machines with one rank each."""
        kuberay = {"namespace": "lab", "claims": {"data": "/tmp"}, "cpu": "1", "memory": "1Gi", "wait_seconds": 240} | section
        tree = {"python": python, "ranks_per_node": 1, "container": {"image": "none"}}
        path = self.folder / "profile.yaml"
        path.write_text(yaml.safe_dump({**tree, "environment": {"PYTHONPATH": str(ROOT)}, "kuberay": kuberay}))
        return path


@dataclass
class Job:
    """A submitted job under way on the head."""

    site: Site
    run: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def started(cls, site: Site, *words: str | Path) -> Job:
        """Start the entrypoint of the manifest in a shell of the head, as KubeRay does."""
        said = site.launch(*words, "--executor", "kuberay", "--allow-dirty")
        id = said.split(";")[0].removeprefix("job ")
        entrypoint = site.api.jobs[id.removeprefix("lab/")]["spec"]["entrypoint"]
        run = site.folder / "runs" / words[words.index("--name") + 1]
        with (site.folder / "driver.txt").open("a") as out:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {entrypoint}"],
                cwd="/", env=site.ray.marked("head"), stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        return cls(site, run, process)

    @property
    def output(self) -> str:
        """The output of the program on the head, and the ends of all logs."""
        return (self.site.folder / "driver.txt").read_text() + self.site.launch("logs", self.run) + self.site.ray.logs()

    def until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition holds while the job runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def ended(self, timeout: float) -> int:
        """Wait for the end and return the exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.output) from None


def of_the_run(site: Site, machine: str = "") -> dict[int, str]:
    """Return the processes that the scripts started."""
    return {pid: line for pid, line in site.ray.processes(machine).items() if "tepo_megatron" in line or "scripted" in line}


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Site]:
    """A site of two machines."""
    short = Path("/tmp") / f"tepo-{uuid.uuid4().hex[:8]}"  # Ray makes sockets in it, whose paths may have 107 letters
    with rays.running(short, 2, ENVIRONMENT) as ray, serving(tmp_path) as (api, kubeconfig):
        yield Site(ray, api, {**os.environ, **ENVIRONMENT, "KUBECONFIG": str(kubeconfig)}, tmp_path)


def scripted(site: Site, model: Path, section: dict[str, Any] | None = None, **more: object) -> Job:
    """Submit a run on two machines with one rank each, whose engine needs no server.

    Args:
        section: Further keys of the profile's `kuberay` section.
    """
    python = site.folder / "python"
    python.write_text(SCRIPTED)
    python.chmod(0o755)
    settings = SHORT | {
        "name": "run", "parallel__tp": 1, "parallel__dp": 2, "training__steps": 5, "checkpoint__every": 2, "model__path": model,
        "data__train": model / "train.jsonl", "data__eval": model / "eval.jsonl", "rollout__record": "true",
        "rollout__filter_uniform_groups": "false", "rollout__server__urls": "[http://127.0.0.1:9]",
        "sync__transport__folder": "weights",
        **more,
    }  # fmt: skip
    return Job.started(
        site, ROOT / "examples" / "demo.yaml", "--cluster", site.profile(str(python), **section or {}), *words_of(settings)
    )


def test_a_run_goes_on_when_a_machine_is_lost(site: Site, random_model: Path) -> None:
    """Kill Ray on one machine without notice: its processes end by themselves, and another machine takes its place."""
    job = scripted(site, random_model, training__steps=15)  # enough steps for the loss to be noticed before the last
    job.until(lambda: steps_of(job.run) >= 3, timeout=240)
    assert len(of_the_run(site, "m0")) >= 2 and len(of_the_run(site, "m1")) >= 2  # torchrun and a rank
    os.kill(site.ray.raylet("m1"), signal.SIGKILL)
    job.until(lambda: not of_the_run(site, "m1"), timeout=60)
    site.ray.boot("m2")
    assert job.ended(300) == 0, job.output
    assert [r["step"] for r in records(job.run)] == list(range(1, 16))
    seen = Counter(prompt for step in prompts_of(job.run).values() for prompt in step)
    assert seen.total() == 120 and max(seen.values()) - min(seen.values()) <= 1, "a prompt was lost or doubled"
    log = (job.run / "launch" / "run-head-1.log").read_text()
    newest = re.search(r"is lost; started again; newest checkpoint: step-(\d+)\n", log)
    assert newest is not None and int(newest[1]) in range(2, 15, 2), log
    assert f"resume: from the checkpoint of step {int(newest[1])}" in (job.run / "log.txt").read_text()
    assert of_the_run(site) == {} and no_secret_in(site.folder)


def test_a_run_that_is_asked_to_end_is_started_again_and_loses_no_step(site: Site, random_model: Path) -> None:
    """The request comes as from the hook of a pod. The end is no failure: no error restart is left for it."""
    job = scripted(site, random_model, {"error_restarts": 0}, training__steps=8, checkpoint__every=8)
    job.until(lambda: steps_of(job.run) >= 3, timeout=240)
    (job.run / "stop.request").touch()
    assert job.ended(300) == 0, job.output
    assert [r["step"] for r in records(job.run)] == list(range(1, 9)) and not (job.run / "metrics.lost.jsonl").exists()
    log = (job.run / "launch" / "run-head-1.log").read_text()
    saved = re.search(r"the run has saved and ended; started again; newest checkpoint: step-(\d+)\n", log)
    assert saved is not None and int(saved[1]) >= 3, log
    assert f"resume: from the checkpoint of step {int(saved[1])}" in (job.run / "log.txt").read_text()
    assert of_the_run(site) == {}


def test_a_run_whose_pods_are_always_taken_away_before_a_step_ends(site: Site, random_model: Path) -> None:
    job = scripted(site, random_model, {"idle_starts": 2}, training__steps=8, checkpoint__every=8, evaluation__every=0)
    log = job.run / "launch" / "run-head-1.log"
    deadline = time.monotonic() + 400
    while job.process.poll() is None:  # at all times, as the hooks of pods do
        assert time.monotonic() < deadline, job.output
        if log.exists() and not (job.run / "stop.done").exists():
            (job.run / "stop.request").touch()
        time.sleep(0.2)
    assert job.process.returncode == 1, job.output
    assert log.read_text().count("started again; newest checkpoint: none") == 1, log.read_text()
    assert log.read_text().endswith(
        "the run has saved and ended; newest checkpoint: none, as at the beginning of 2 starts in a row: this is the end; use "
        "machines that stay longer than a step, or raise kuberay.idle_starts\n"
    )
    assert records(job.run) == [] and of_the_run(site) == {}
