"""The real command saves and ends at SIGUSR1 and SIGTERM, and goes on afterwards; the engine is scripted."""

import os
import re
import signal
from pathlib import Path

import pytest

from launch.__main__ import main
from tests.e2e.test_faults import BOUND, SHORT
from tests.parallel.resume_worlds import records
from tests.recorded import steps_taken

pytestmark = pytest.mark.e2e
STEPS = 8


def saved_step(run: Path) -> int:
    """Return the step after which the run ended; its checkpoint is the newest one and complete."""
    (step,) = re.findall(r"ended on request after step (\d+);", (run / "log.txt").read_text())
    assert f"step-{int(step):08d}" in {path.name for path in (run / "checkpoints").iterdir()}
    assert steps_taken(run) == int(step), "a recorded step is not saved"
    return int(step)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_saves_and_ends_the_run_and_it_goes_on(
    tepo, arguments, random_model: Path, tmp_path: Path, number: int
) -> None:
    words = arguments(random_model, **SHORT | {"training__steps": STEPS, "checkpoint__every": 0}, name="warned")
    run, command = tmp_path / "runs" / "warned", tepo(*words, engine="slow")
    command.until(lambda: steps_taken(run) >= 2, timeout=BOUND)
    os.kill(command.process.pid, number)
    assert command.wait(BOUND) == os.EX_TEMPFAIL == 75, command.output
    name = signal.Signals(number).name
    assert f"tepo: {name}: the run saves a checkpoint and ends" in command.output and "Traceback" not in command.output
    step = saved_step(run)
    assert f"ended on request; the checkpoint of step {step} is complete; go on with tepo resume" in command.output
    assert (run / "stop.done").exists() and not (run / "summary.json").exists()
    command.assert_nothing_left()
    again = tepo("resume", run, engine="good")
    assert again.wait(2 * BOUND) == 0, again.output
    assert f"resume: from the checkpoint of step {step}\n" in (run / "log.txt").read_text()
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1)) and not (run / "metrics.lost.jsonl").exists()


@pytest.mark.full
def test_a_second_sigterm_ends_the_run_at_once(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    words = arguments(random_model, **SHORT | {"training__steps": 500}, name="twice")
    run, command = tmp_path / "runs" / "twice", tepo(*words, engine="slow")
    command.until(lambda: steps_taken(run) >= 1, timeout=BOUND)
    with command.stopped_when(lambda: True, BOUND):  # so that the run cannot answer the first one
        os.kill(command.process.pid, signal.SIGTERM)
        os.kill(command.process.pid, signal.SIGCONT)
        command.until(lambda: "another one ends it at once" in command.output, timeout=BOUND)
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.wait(BOUND) == 130, command.output
    assert "tepo: interrupted signal SIGTERM" in command.output and not (run / "stop.done").exists()
    command.assert_nothing_left()


def test_launch_save_asks_a_run_for_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["save", str(tmp_path)]) == 1 and "no run is there" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main(["save", str(tmp_path)]) == 0 and (tmp_path / "save.request").exists()
