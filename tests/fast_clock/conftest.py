"""The `tepo` command under the fast clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import Command, commands, random_model  # noqa: F401
from tests.fast_clock.clock import SPEED, sweep, variables


@pytest.fixture(scope="session")
def speed() -> float:
    assert SPEED in os.environ, "run these tests with `make slow`, which tests the clock first"
    return float(os.environ[SPEED])


@pytest.fixture
def tepo(tmp_path: Path, speed: float) -> Iterator[Callable[..., Command]]:
    """See `tests.e2e.conftest.commands`: this starts the same commands, with the fast clock in all their processes."""
    with commands(tmp_path) as start:
        yield partial(start, env=variables(speed))
    sweep()
