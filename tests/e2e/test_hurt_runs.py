"""Runs on machines that fail them: out of memory, full, read-only and slow disks, a clock that jumps. All go on bit-equal.

The engine is scripted; `python -m tests.harness.hurt` does the same to runs with real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import commands, settings
from tests.e2e.test_faults import SHORT
from tests.hurts import OF_ALL, Hurt, Runs
from tests.tiny import tiny_qwen3

pytestmark = [pytest.mark.e2e, pytest.mark.full]
BOUND = 120.0  # seconds of a run, and of each wait in it
STEPS = 8
RUN: dict[str, Any] = SHORT | {
    "training__steps": STEPS, "checkpoint__every": 2, "optimizer__lr": "1e-4", "parallel__tp": 2, "reward__workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with answers that only a grader can tell from wrong ones."""
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3(path, layers=2)
    rows = [{"prompt": f"1/{i}?\n", "answer": f"\\frac{{1}}{{{i}}}"} for i in range(2, 82)]
    for name in ("train.jsonl", "eval.jsonl"):
        (path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def words(model: Path, output: Path, name: str, **more: Any) -> list[str]:
    return ["train", "examples/demo.yaml", *settings(model, **RUN | {"output": output, "name": name} | more)]


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    with commands(folder) as start:
        command = start(*words(model, folder, "run"), engine="good")
        assert command.wait(BOUND) == 0, command.output
    yield folder / "run"


@pytest.mark.parametrize("hurt", OF_ALL.values(), ids=OF_ALL)
def test_a_run_outlives_what_its_machine_does_to_it(tepo, model: Path, straight: Path, tmp_path: Path, hurt: Hurt) -> None:
    def of_this_model(output: Path, name: str, **more: Any) -> list[str]:
        return words(model, output, name, **more)

    hurt(Runs(tepo, of_this_model, straight, STEPS, "slow", "good", BOUND), tmp_path)
