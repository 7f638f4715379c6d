"""A sample of `python -m tests.harness.two_starts`: two starts of one run, of which one runs and the other leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.two_starts import Trial, run, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.mark.parametrize("trial", [Trial(0.15, overwrite=True), Trial(2.0, overwrite=False)], ids=lambda trial: trial.key)
def test_one_of_two_starts_runs_and_the_other_changes_nothing(tmp_path: Path, trial: Trial) -> None:
    line = run(trial, write_inputs(tmp_path / "model"), tmp_path)
    assert line["ok"], line["wrong"]
