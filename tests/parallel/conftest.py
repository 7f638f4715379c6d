"""Inputs that many worlds only read: made once."""

import pytest

from tests.parallel import cases


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> cases.Case:
    """The batch of `cases` on a model with tied embeddings. Tests that change a model's directory copy it first."""
    return cases.make_case(tmp_path_factory.mktemp("case"), tied=True)
