"""`tepo doctor` as a user runs it, with real ranks and a real server."""

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import settings

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]


def test_doctor_passes_a_working_run_and_fails_another(tepo, base: Path, tmp_path: Path) -> None:
    words = settings(base, output=tmp_path / "runs", name="new")
    command = tepo("doctor", "examples/demo.yaml", *words)
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    for check in ("packages", "config", "data", "grading", "all-reduce", "engine", "log-probs", "noise of dH", "seconds"):
        assert re.search(rf"^pass  {check} ", command.output, re.M), (check, command.output)
    assert list((tmp_path / "runs").iterdir()) == []  # nothing is left

    command = tepo("doctor", "examples/demo.yaml", *words, "--rollout.server.extra_args", "['--no-such-option']")
    assert command.wait(240) == 1
    command.assert_nothing_left()
    assert re.search(r"^fail  a step +rank 0: .*--no-such-option", command.output, re.M | re.S), command.output
