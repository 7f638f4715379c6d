"""`tepo train --resume true` after kills from outside; the places of a kill are in tests/parallel/test_resume.py."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import whole_lines
from tests.e2e.test_faults import SHORT, refused
from tests.parallel.resume_worlds import records, weights

pytestmark = pytest.mark.e2e
RUN: dict[str, Any] = SHORT | {
    "training__steps": 10, "checkpoint__every": 2, "optimizer__lr": "1e-4", "parallel__tp": 2,
}  # fmt: skip
STEPS = RUN["training__steps"]


def complete(run: Path) -> list[str]:
    return sorted(p.name for p in run.glob("checkpoints/step-????????"))


def finished(command: Any) -> str:
    assert command.wait(300) == 0, command.output
    command.assert_nothing_left()
    return command.output


def summary(run: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads((run / "summary.json").read_text()).items() if k != "seconds"}


@pytest.mark.full
def test_a_run_survives_the_kill_of_its_launcher_and_of_a_rank(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "runs" / "straight", tmp_path / "runs" / "killed"
    finished(tepo(*arguments(random_model, **RUN | {"checkpoint__every": 0}, name="straight"), engine="good"))

    command = tepo(*arguments(random_model, **RUN, name="killed"), engine="slow")
    command.until(lambda: bool(complete(run)) and len(whole_lines(run)) >= 3, timeout=240)
    os.kill(command.process.pid, signal.SIGKILL)
    command.assert_nothing_left()
    assert tepo("report", run).wait(240) == 0 and (run / "report.png").exists()
    refused(tepo(*arguments(random_model, **RUN, name="killed")), "holds a run already; go on with it with --resume true")

    again = arguments(random_model, **RUN, name="killed", resume="true")
    command = tepo(*again, "--checkpoint.max_restarts", "0", engine="slow")
    command.until(lambda: "resume: from the checkpoint of step " in command.output, timeout=240)
    command.until(lambda: len(whole_lines(run)) >= 6, timeout=240)
    assert len(command.ranks()) == RUN["parallel__tp"]
    os.kill(command.ranks()[-1], signal.SIGKILL)
    refused(command, "was ended by SIGKILL")

    assert "resume: from the checkpoint of step " in finished(tepo(*again, engine="good"))
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))
    assert records(run) == records(straight) and summary(run) == summary(straight)
    first, last = weights(straight), weights(run)
    assert first.keys() == last.keys() and all(torch.equal(last[name], first[name]) for name in first)

    log = (run / "log.txt").read_text()
    command = tepo(*again, engine="good")
    results = "summary.json, report.html, report.png, hf"
    assert f"this run is finished, with {STEPS} steps; its results: {results}" in finished(command)
    assert (run / "log.txt").read_text() == log, "something was started"


@pytest.mark.full
def test_resume_accepts_other_settings_and_refuses_other_data(tepo, arguments, random_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "again"
    finished(tepo(*arguments(random_model, **RUN, name="again"), engine="good"))
    before = records(run)

    again = RUN | {"name": "again", "resume": "true"}
    refused(tepo(*arguments(random_model, **again, overwrite="true")), "resume=true and overwrite=true contradict each other")
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join((random_model / "train.jsonl").read_text().splitlines(keepends=True)[1:]))
    refused(
        tepo(*arguments(random_model, **again | {"training__steps": STEPS + 1}, data__train=fewer), engine="good"),
        "the checkpoint's place in the dataset is not one of this dataset: count was 40 and is 39",
    )
    assert records(run) == before

    newest = run / "checkpoints" / complete(run)[-1]
    (newest / "run.json").write_text("{}")
    more = again | {"parallel__tp": 1, "training__steps": STEPS + 1}
    output = finished(tepo(*arguments(random_model, **more), engine="good"))
    for message in (
        str(newest / "run.json"),
        f"resume: from the checkpoint of step {STEPS - 2}",
        "resume: parallel.tp was 2 and is 1",
        f"resume: training.steps was {STEPS} and is {STEPS + 1}",
        "resume: 2 recorded steps are taken again",
    ):
        assert message in output
    assert output.count(str(newest / "run.json")) == output.count("random generators start from the seed") == 1
    assert (run / "log.txt").read_text().count("random generators start from the seed") == 1
    assert f"resume: from the checkpoint of step {STEPS - 2}" in (run / "log.txt").read_text()
    assert [r["step"] for r in records(run)] == list(range(1, STEPS + 2))
    for here, there in zip(records(run), before, strict=False):
        assert here["loss/total"] == pytest.approx(there["loss/total"], rel=1e-3, abs=1e-5), here["step"]
