"""A run over two hosts without Slurm: `tepo train` on each, a store in which they meet, and a link that is cut in mid-run."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import hosts
from tests.e2e.conftest import Command, commands, settings
from tests.e2e.test_faults import SHORT
from tests.hosts import DEVICE, Host
from tests.parallel import resume_worlds as w

pytestmark = [pytest.mark.full, pytest.mark.e2e]
PORT, SILENT = 29400, 6
# every step waits for half a second in its engine, so that the cut comes during a step
RUN = SHORT | {
    "training__steps": 8, "parallel__tp": 1, "parallel__dp": 2, "parallel__heartbeat_timeout": SILENT,
    "parallel__start_seconds": 360, "checkpoint__every": 2,
    "rollout__max_response_tokens": 16, "training__max_tokens_per_microbatch": 512,
}  # fmt: skip
Start = Callable[..., Command]
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def two() -> Iterator[tuple[Host, Host]]:
    if why := hosts.missing():
        pytest.skip(why)
    with hosts.two_hosts() as two:
        yield two


@pytest.fixture(scope="module")
def straight(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one host."""
    folder = tmp_path_factory.mktemp("straight")
    with commands(folder) as tepo:
        command = tepo(*words(random_model, folder), engine="slow")
        assert command.wait(300) == 0, command.output
    return folder / "run"


def words(model: Path, output: Path, **more: object) -> list[str | Path]:
    return [
        "train",
        "examples/demo.yaml",
        *settings(model, **RUN, name="run", output=output, sync__transport__folder=output, **more),
    ]


def started(tepo: Start, two: tuple[Host, Host], *of_run: str | Path, restarts: int = 0) -> tuple[Command, Command]:
    """Return, for each host, the command that docs/rollouts.md names for it."""
    of_run = (*of_run, "--checkpoint.max_restarts", str(restarts))
    first, second = (
        tepo(*of_run, *nodes(host, two), engine="slow", by=[*host.enter, sys.executable], env=ENVIRONMENT) for host in two
    )
    return first, second


def nodes(host: Host, two: tuple[Host, Host]) -> list[str]:
    """Return the words that start one of two ranks. The first host keeps the store, and has rank 0."""
    return ["--nnodes=2", f"--node-rank={int(host is not two[0])}", f"--rdzv-endpoint={two[0].address}:{PORT}"]


def assert_same(run: Path, other: Path) -> None:
    assert w.records(run) == w.records(other)
    weights, others = w.weights(run), w.weights(other)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_two_hosts_train_like_one(
    tepo: Start, two: tuple[Host, Host], random_model: Path, straight: Path, tmp_path: Path
) -> None:
    both = started(tepo, two, *words(random_model, tmp_path))
    for command in both:
        assert command.wait(300) == 0, command.output
        command.assert_nothing_left()
    assert_same(tmp_path / "run", straight)


def test_a_cut_link_ends_both_and_the_run_goes_on_from_there(
    tepo: Start, two: tuple[Host, Host], random_model: Path, straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    both = started(tepo, two, *words(random_model, tmp_path))
    both[0].until(lambda: "checkpoint of step 2" in both[0].output, timeout=240)
    two[1].link("down")
    cut = time.monotonic()
    for command in both:
        assert command.wait(90) != 0, command.output
        command.assert_nothing_left()
    assert time.monotonic() - cut < 60
    report = (run / "hang.txt").read_text()
    assert report.startswith(f"rank 1 has not been heard of for {SILENT} s (parallel.heartbeat_timeout)"), report
    assert {path.name for path in (run / "stacks").iterdir()} == {"rank-0.txt", "rank-1.txt"}
    assert not (run / "hf").exists()

    two[1].link("up")
    both = started(tepo, two, *words(random_model, tmp_path, resume="true"))
    for command in both:
        assert command.wait(300) == 0, command.output
    assert_same(run, straight)
    assert (run / "hang.former.txt").read_text() == report and not (run / "hang.txt").exists()


def test_ranks_are_restarted_on_both_hosts_next_to_the_service(
    tepo: Start, two: tuple[Host, Host], random_model: Path, straight: Path, tmp_path: Path
) -> None:
    """First a rank is killed whose host has no service, then rank 0. What was sampled is used, and nothing changes."""
    run = tmp_path / "run"
    both = started(tepo, two, *words(random_model, tmp_path), restarts=3)
    for victim, step in ((both[1], 2), (both[0], 4)):
        both[0].until(lambda: f"checkpoint of step {step}" in both[0].output, timeout=240)  # noqa: B023
        service = both[0].service()
        before = [pid for command in both for pid in command.ranks()]
        assert len(before) == 2
        os.kill(victim.ranks()[0], signal.SIGKILL)
        both[0].until(lambda: all(c.ranks() and not set(c.ranks()) & set(before) for c in both), timeout=120)  # noqa: B023
        assert service == both[0].service()
    for command in both:
        assert command.wait(300) == 0, command.output
        command.assert_nothing_left()
    assert len(re.findall("ranks restarted from the checkpoint of step", (run / "log.txt").read_text())) == 2
    assert_same(run, straight)


@pytest.mark.parametrize("end", ["request", "lost host"])
def test_ranks_that_would_only_fail_again_end_on_both_hosts(
    tepo: Start, two: tuple[Host, Host], random_model: Path, straight: Path, tmp_path: Path, end: str
) -> None:
    run = tmp_path / "run"
    both = started(tepo, two, *words(random_model, tmp_path), restarts=3)
    both[0].until(lambda: "checkpoint of step 2" in both[0].output, timeout=240)
    began = time.monotonic()
    if end == "request":
        (run / "stop.request").touch()
    else:
        both[1].process.kill()
    for command in both:
        command.wait(240)
        command.assert_nothing_left()
    assert both[0].process.returncode, both[0].output  # after a request the other ranks have no error
    print(f"{end}: ended after {time.monotonic() - began:.0f} s")
    if end == "request":
        assert (run / "stop.done").exists() and time.monotonic() - began < 60, both[0].output
        assert "ranks restarted" not in (run / "log.txt").read_text()
    else:
        assert "ranks 1 did not come back within 126 s (parallel.start_seconds)" in both[0].output, both[0].output
    both = started(tepo, two, *words(random_model, tmp_path, resume="true"), restarts=3)
    for command in both:
        assert command.wait(300) == 0, command.output
    assert_same(run, straight)
