"""The real command restarts ranks that die, from the newest checkpoint, while its rollout service lives on; scripted engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron.rollout.decisions import read_history
from tepo_megatron.utils import service_guard
from tests.e2e.conftest import Command
from tests.e2e.test_faults import BOUND, SHORT, model  # noqa: F401
from tests.parallel.resume_worlds import records

pytestmark = pytest.mark.e2e
STEPS = 8
CONFIG = SHORT | {"training__steps": STEPS, "checkpoint__every": 2, "parallel__tp": 1, "parallel__dp": 2}


def taken(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def ranks_of(command: Command) -> list[int]:
    """The ranks are the launcher's children, in the order of their starts."""
    return sorted(child.pid for child in psutil.Process(command.process.pid).children())


def service_of(command: Command) -> int:
    pids = service_guard.read_pids(service_guard.folder_of(command.process.pid))
    assert pids is not None, "there is no service"
    return pids[1]


def kill(command: Command, run: Path, step: int, victims: list[int]) -> None:
    """Kill ranks during the step after `step`, and wait until others have come in their place."""
    command.until(lambda: taken(run) >= step, timeout=BOUND)
    before = ranks_of(command)
    for victim in victims:
        os.kill(before[victim], signal.SIGKILL)
    command.until(lambda: bool(ranks_of(command)) and not set(ranks_of(command)) & set(before), timeout=BOUND)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted((run / "hf").glob("*.safetensors")) for name, t in load_file(file).items()}


def same(run: Path, straight: Path) -> None:
    """Assert that two runs have the same records and weights, bit for bit, and that no group was sampled twice."""
    assert records(run) == records(straight)
    of_run, of_straight = weights(run), weights(straight)
    assert of_run.keys() == of_straight.keys() and all(torch.equal(of_run[name], t) for name, t in of_straight.items())
    mine, its = read_history(run), read_history(straight)
    assert not mine.faults and list(mine.steps) == list(its.steps)
    assert [line["asked"] for line in mine.steps.values()] == [line["asked"] for line in its.steps.values()]


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The run that nobody disturbs."""
    from tests.e2e.conftest import commands, settings

    folder = tmp_path_factory.mktemp("straight")
    with commands(folder) as start:
        words = settings(model, output=folder / "runs", name="straight", **CONFIG)
        command = start("train", "examples/demo.yaml", *words, engine="good")
        assert command.wait(3 * BOUND) == 0, command.output
    return folder / "runs" / "straight"


@pytest.mark.full
def test_killed_ranks_are_restarted_and_nothing_changes(
    tepo,
    arguments,
    model: Path,  # noqa: F811
    straight: Path,
    tmp_path: Path,
) -> None:
    run, command = tmp_path / "runs" / "killed", tepo(*arguments(model, **CONFIG, name="killed"), engine="slow")
    kill(command, run, 1, [1])
    service = service_of(command)
    kill(command, run, 3, [0])
    kill(command, run, 5, [0, 1])
    assert service_of(command) == service
    assert command.wait(4 * BOUND) == 0, command.output
    log = (run / "log.txt").read_text()
    assert log.count("was ended by SIGKILL") == 3 and log.count("the ranks are restarted from the") == 3
    assert "ranks restarted from the checkpoint of step" in log and "Traceback" not in command.output
    command.assert_nothing_left()
    same(run, straight)


@pytest.mark.full
def test_the_command_restarts_the_ranks_with_another_layout(
    tepo,
    arguments,
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Two data-parallel ranks become one, and two tensor-parallel ones; the service goes on, and nothing is sampled twice."""
    steps, longer = 2 * STEPS, CONFIG | {"training__steps": 2 * STEPS}
    run, command = tmp_path / "runs" / "asked", tepo(*arguments(model, **longer, name="asked"), engine="slow")
    command.until(lambda: taken(run) >= 1, timeout=BOUND)
    service = service_of(command)
    for words, ranks in ((["--parallel.dp", "1"], 1), (["--parallel.dp", "1", "--parallel.tp", "2"], 2), ([], 2)):
        more = taken(run) + 1
        command.until(lambda: taken(run) >= more, timeout=BOUND)  # noqa: B023
        asking = tepo("restart", run, *words, "--wait", "600")
        assert asking.wait(BOUND) == 0, asking.output
        assert f"the ranks are restarted on request{' '.join([' with', *words] if words else [])}" in asking.output
        command.until(lambda: len(ranks_of(command)) == ranks, timeout=BOUND)  # noqa: B023
        assert service_of(command) == service
    refused = tepo("restart", run, "--rollout.temperature", "0.5")
    assert refused.wait(BOUND) == 1 and "only parallel.* and megatron.* can be changed" in refused.output
    assert command.wait(4 * BOUND) == 0, command.output
    assert (run / "log.txt").read_text().count("the ranks end after step") == 3
    command.assert_nothing_left()
    assert [record["step"] for record in records(run)] == list(range(1, steps + 1))
    history = read_history(run)
    assert not history.faults and list(history.steps) == list(range(1, steps + 1))
    layouts = [(config["parallel"]["dp"], config["parallel"]["tp"]) for _, config in history.starts]
    assert layouts == [(2, 1), (1, 1), (1, 2), (2, 1)], "keys change the config of the run's start"
    ended = tepo("restart", run)
    assert ended.wait(BOUND) == 1 and "no run is under way in this folder" in ended.output


@pytest.mark.full
def test_fewer_ranks_go_on_after_a_device_was_lost(tepo, arguments, model: Path, tmp_path: Path) -> None:  # noqa: F811
    """On a CPU the loss is a list of the devices that work; whether a GPU works is tried by a process on it."""
    words = arguments(model, **CONFIG, parallel__min_dp=1, name="lost")
    run, command = tmp_path / "runs" / "lost", tepo(*words, engine="slow", env={"TEPO_TEST_WORKING": "1,2"})
    kill(command, run, 3, [0])
    assert len(ranks_of(command)) == 1
    environment = Path(f"/proc/{ranks_of(command)[0]}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=1,2" in environment
    assert command.wait(4 * BOUND) == 0, command.output
    assert "no longer work: 0; the ranks go on with parallel.dp=1 instead of 2" in (run / "log.txt").read_text()
    assert [record["step"] for record in records(run)] == list(range(1, STEPS + 1))
    command.assert_nothing_left()
