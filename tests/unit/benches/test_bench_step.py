"""The benchmark of the training step runs, and tells when the sides do not compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step

ROOT = Path(__file__).parents[3]


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.full
def test_both_sides_compute_the_same(tmp_path: Path) -> None:
    run("benchmarks.step", "--quick", "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["disagreement"].keys() == {"plain padded", "plain bucketed", "plain packed", "tp1"}
    assert 0 < max(found["disagreement"].values()) <= step.AGREE
    assert found["ratio"]["tp1 1 threads"] > 0


def test_updates_that_differ_are_reported() -> None:
    plain = [[(-0.5, 2.0), (-0.6, 3.0)]] * 2
    assert step.disagreement(plain, plain) == 0
    assert step.disagreement([[(-0.5, 2.0), (-0.6, 3.0003)], plain[1]], plain) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="longer"):
        step.disagreement([[(-0.5, 2.0)]] * 2, plain)  # an update is missing
