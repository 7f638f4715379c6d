"""Inputs that many worlds only read: made once."""

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
