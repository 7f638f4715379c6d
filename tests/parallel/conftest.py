"""Inputs that many worlds only read: made once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel import cases, resume_worlds


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    """The batch of `cases` on a model with tied embeddings. Tests that change a model's directory copy it first."""
    return cases.make_case(tmp_path_factory.mktemp("case"), tied=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and datasets of runs that are killed, restarted and streamed."""
    return resume_worlds.write_inputs(tmp_path_factory.mktemp("inputs") / "model")


@pytest.fixture(scope="session")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], resume_worlds.Outcome]:
    """The run of `resume_worlds` that nobody kills or asks for anything, and that writes no checkpoints, by tp."""

    @functools.cache
    def run(tp: int) -> resume_worlds.Outcome:
        folder = tmp_path_factory.mktemp("straight")
        cfg = resume_worlds.run_config(model, folder, parallel={"tp": tp})
        resume_worlds.attempt(cfg, folder / "journal")
        return resume_worlds.outcome(cfg, folder / "journal")

    return run
