"""The real command restarts ranks that die, from the newest checkpoint, while its rollout service lives on; scripted engine."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tepo_megatron.rollout.decisions import read_history
from tests.e2e.conftest import Command
from tests.e2e.test_faults import BOUND, SHORT
from tests.parallel.resume_worlds import records, weights
from tests.recorded import steps_taken

pytestmark = pytest.mark.e2e
STEPS = 8
CONFIG = SHORT | {"training__steps": STEPS, "checkpoint__every": 2, "parallel__tp": 1, "parallel__dp": 2}


def kill(command: Command, run: Path, step: int, victims: list[int]) -> None:
    """Kill ranks during the step after `step`, and wait until others have come in their place."""
    command.until(lambda: steps_taken(run) >= step, timeout=BOUND)
    before = command.ranks()
    for victim in victims:
        os.kill(before[victim], signal.SIGKILL)
    command.until(lambda: bool(command.ranks()) and not set(command.ranks()) & set(before), timeout=BOUND)


def same(run: Path, straight: Path) -> None:
    """Assert that two runs have the same records and weights, bit for bit, and that no group was sampled twice."""
    assert records(run) == records(straight)
    of_run, of_straight = weights(run), weights(straight)
    assert of_run.keys() == of_straight.keys() and all(torch.equal(of_run[name], t) for name, t in of_straight.items())
    mine, its = read_history(run), read_history(straight)
    assert not mine.faults and list(mine.steps) == list(its.steps)
    assert [line["asked"] for line in mine.steps.values()] == [line["asked"] for line in its.steps.values()]


@pytest.fixture(scope="module")
def straight(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    from tests.e2e.conftest import commands, settings

    folder = tmp_path_factory.mktemp("straight")
    with commands(folder) as start:
        words = settings(random_model, output=folder / "runs", name="straight", **CONFIG)
        command = start("train", "examples/demo.yaml", *words, engine="good")
        assert command.wait(3 * BOUND) == 0, command.output
    return folder / "runs" / "straight"


@pytest.mark.full
def test_killed_ranks_are_restarted_and_nothing_changes(
    tepo, arguments, random_model: Path, straight: Path, tmp_path: Path
) -> None:
    run, command = tmp_path / "runs" / "killed", tepo(*arguments(random_model, **CONFIG, name="killed"), engine="slow")
    kill(command, run, 1, [1])
    service = command.service()
    kill(command, run, 3, [0])
    kill(command, run, 5, [0, 1])
    assert command.service() == service
    assert command.wait(4 * BOUND) == 0, command.output
    log = (run / "log.txt").read_text()
    assert log.count("was ended by SIGKILL") == 3 and log.count("the ranks are restarted from the") == 3
    assert "ranks restarted from the checkpoint of step" in log and "Traceback" not in command.output
    command.assert_nothing_left()
    same(run, straight)


@pytest.mark.full
def test_a_damaged_checkpoint_costs_the_service_but_not_the_run(
    tepo, arguments, random_model: Path, straight: Path, tmp_path: Path
) -> None:
    """The older checkpoint needs batches that were released with the damaged one, so a new service samples them again."""
    run, command = tmp_path / "runs" / "damaged", tepo(*arguments(random_model, **CONFIG, name="damaged"), engine="slow")
    newest = run / "checkpoints" / "step-00000004"
    command.until(lambda: "checkpoint of step 4: " in command.output, timeout=BOUND)
    with command.stopped_when(newest.exists, BOUND):
        before, file = (
            command.ranks(),
            max((path for path in newest.iterdir() if path.is_file()), key=lambda p: p.stat().st_size),
        )
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        os.kill(before[0], signal.SIGKILL)
    assert command.wait(4 * BOUND) == 0, command.output
    log = (run / "log.txt").read_text()
    assert "the rollouts of step 3 were released with a later checkpoint" in log and "step-00000004" in log
    assert "resume: from the checkpoint of step 2" in log
    command.assert_nothing_left()
    assert records(run) == records(straight)
    of_run, of_straight = weights(run), weights(straight)
    assert all(torch.equal(of_run[name], t) for name, t in of_straight.items())


@pytest.mark.full
def test_ranks_are_restarted_only_so_often_without_progress(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    words = arguments(random_model, **CONFIG | {"checkpoint__every": STEPS}, checkpoint__max_restarts=1, name="often")
    run, command = tmp_path / "runs" / "often", tepo(*words, engine="slow")
    kill(command, run, 1, [0])
    command.until(lambda: "ranks restarted from the start, because" in (run / "log.txt").read_text(), timeout=BOUND)
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait(BOUND) == 1, command.output
    assert command.output.count("tepo: error: rank 1 (pid") == 1 and "restart 1 of 1 without" in command.output
    command.assert_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize("victim", ["service", "launcher"])
def test_the_run_ends_with_its_service_and_its_launcher(
    tepo, arguments, random_model: Path, tmp_path: Path, victim: str
) -> None:
    run, command = tmp_path / "runs" / "ends", tepo(*arguments(random_model, **CONFIG, name="ends"), engine="slow")
    command.until(lambda: steps_taken(run) >= 1, timeout=BOUND)
    service = command.service()
    os.kill({"service": service, "launcher": command.process.pid}[victim], signal.SIGKILL)
    status = command.wait(BOUND)
    command.assert_nothing_left(within=5.0)
    assert status == (-signal.SIGKILL if victim == "launcher" else 1), command.output
    if victim != "launcher":
        assert f"the rollout service (pid {service}) was ended by SIGKILL" in command.output


@pytest.mark.full
def test_an_error_that_would_come_again_ends_the_run(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    command = tepo(*arguments(random_model, **CONFIG, name="stale"), engine="stale")
    assert command.wait(2 * BOUND) == 1, command.output
    assert "does not serve the weights" in command.output and "restarted" not in command.output
    command.assert_nothing_left()


@pytest.mark.full
def test_a_frozen_rank_is_restarted_with_the_others(
    tepo, arguments, random_model: Path, straight: Path, tmp_path: Path
) -> None:
    words = arguments(random_model, **CONFIG, parallel__heartbeat_timeout=15, name="frozen")
    run, command = tmp_path / "runs" / "frozen", tepo(*words, engine="slow")
    command.until(lambda: steps_taken(run) >= 3, timeout=BOUND)
    os.kill(command.ranks()[1], signal.SIGSTOP)
    assert command.wait(4 * BOUND) == 0, command.output
    assert "its process is frozen" in command.output and (run / "hang.former.txt").exists()
    command.assert_nothing_left()
    same(run, straight)
