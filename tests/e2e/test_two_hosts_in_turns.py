"""Turns on two hosts with a /dev/shm of their own each: `tepo serve` with a vLLM on both, a rank on both, no shared folder for
the weights.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import settings
from tests.e2e.test_colocation import RUN
from tests.e2e.test_two_hosts import ENVIRONMENT, Start, nodes, two  # noqa: F401
from tests.hosts import Host
from tests.recorded import step_records

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.server]
STEPS = 3
TURNS = RUN | {
    "training__steps": STEPS, "rollout__colocate": "true", "parallel__tp": 1, "parallel__pp": 2, "sync__bucket_mib": 1,
    "evaluation__every": 0, "rollout__oversample": 1, "sync__verify_every": 2,
    "rollout__server__extra_args": '["--no-disable-uvicorn-access-log"]',
}  # fmt: skip


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "a rank is killed"])
def test_servers_of_both_hosts_get_the_weights_of_both(
    tepo: Start,
    two: tuple[Host, Host],  # noqa: F811
    random_model: Path,
    tmp_path: Path,
    killed: bool,
) -> None:
    """Each host has half of the layers; in every step the log-probs of both servers are those of the current weights.

    When a rank is killed, both are restarted, and the servers go on.
    """
    rendezvous, run = tmp_path / "rendezvous", tmp_path / "runs" / "turns"
    words = settings(random_model, **TURNS, output=tmp_path / "runs", name="turns", rollout__server__rendezvous=rendezvous)
    serves = [
        tepo("serve", "examples/demo.yaml", "--host", host.address, *words, by=[*host.enter, sys.executable], env=ENVIRONMENT)
        for host in two
    ]
    words = ["train", "examples/demo.yaml", *words, "--rollout.servers", "2", "--rollout.min_servers", "2"]
    words += ["--checkpoint.every", "1"] if killed else []
    ranks = [tepo(*words, *nodes(host, two), by=[*host.enter, sys.executable], env=ENVIRONMENT) for host in two]
    if killed:
        ranks[0].until(lambda: "checkpoint of step 1" in ranks[0].output, timeout=240)
        os.kill(ranks[1].ranks()[0], signal.SIGKILL)
    for command in ranks:
        assert command.wait(240) == 0, "\n".join(c.output for c in (*ranks, *serves))
        command.assert_nothing_left()
    assert ("ranks restarted from the checkpoint of step" in ranks[0].output) == killed
    steps = step_records(run)
    assert len(steps) == STEPS
    for step in steps:
        assert step["rollout/logprob_diff_mean"] <= 1e-5 and step["actor/grad_norm"] > 0 and step["rollout/staleness"] == 0
    logs = list(rendezvous.glob("*.log"))
    assert len(logs) == 2
    for log in logs:
        asked = re.findall(r'"POST (/[\w/]+)[^"]*" 200', log.read_text())
        assert asked.count("/v1/completions") >= STEPS and asked.count("/finish_weight_update") >= STEPS + 1, asked
        assert killed or asked.count("/finish_weight_update") == STEPS + 1, asked
        assert asked.count("/update_weights") >= 2 * (STEPS + 1)
    for host, command in zip(two, serves, strict=True):
        assert host.call("find", "/dev/shm", "-name", "*tepo-*") == ""
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.wait(120) == 0, command.output
        command.assert_nothing_left()
