"""The `tepo` command under the fast clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Command, commands, random_model  # noqa: F401
from tests.fast_clock.clock import SPEED, variables


@pytest.fixture(scope="session")
def speed() -> float:
    assert SPEED in os.environ, "run these tests with `make slow`, which tests the clock first"
    return float(os.environ[SPEED])


@pytest.fixture
def tepo(tmp_path: Path, speed: float) -> Iterator[Callable[..., Command]]:
    """See `tests.e2e.conftest.commands`: this starts the same commands, with the fast clock in all their processes."""
    started: list[Command] = []
    with commands(tmp_path) as start:

        def start_fast(*words: str | Path, **options: Any) -> Command:
            started.append(start(*words, **options, env=variables(speed)))
            return started[-1]

        yield start_fast
    for command in started:  # a killed process leaves its clock's files
        for kind in ("faketime_shm", "sem.faketime_sem"):
            Path(f"/dev/shm/{kind}_{command.process.pid}").unlink(missing_ok=True)
