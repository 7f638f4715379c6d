"""The benchmark of the training step and its profile run, and tell when the sides do not compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step
from benchmarks._optimizations import OPTIMIZATIONS
from benchmarks._timers import PartTimers

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


@pytest.mark.full
def test_the_parts_add_up_to_the_step(tmp_path: Path) -> None:
    printed = run("benchmarks.profile_step", "--steps", "2", "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(column, part): ms for column, part, ms, _ in found["rows"]}
    assert sum(rows.values()) == pytest.approx(found["milliseconds"], rel=0.01)
    for part in ("mlp: products", "attention: core", "norms", "output layer"):
        assert all(rows[column, part] > 0 for column in ("old pass", "update", "backward")), part
        assert part in printed
    # three layers of two products, in the old pass and in four updates
    assert sum(calls for _, part, _, calls in found["rows"] if part == "mlp: products") == 5 * 3 * 2


@pytest.mark.full
def test_a_step_without_one_of_the_optimizations_computes_the_same(tmp_path: Path) -> None:
    run("benchmarks.optimizations", "--quick", "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratio"].keys() == OPTIMIZATIONS.keys() and all(ratio > 0 for ratio in found["ratio"].values())
    assert max(found["disagreement"].values()) <= step.AGREE


def test_updates_that_differ_are_reported() -> None:
    plain = [[(-0.5, 2.0), (-0.6, 3.0)]] * 2
    assert step.disagreement(plain, plain) == 0
    assert step.disagreement([[(-0.5, 2.0), (-0.6, 3.0003)], plain[1]], plain) == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="longer"):
        step.disagreement([[(-0.5, 2.0)]] * 2, plain)  # an update is missing


def test_a_part_does_not_count_what_runs_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    timers = PartTimers("first")

    def wait(seconds: float) -> None:
        now[0] += seconds

    with timers.inside("outer"):
        wait(1)
        with timers.inside("inner", within="second"):
            wait(2)
            with timers.inside("outer"):
                wait(4)
        wait(8)
    wait(16)
    assert timers.seconds == {("first", "outer"): 9, ("second", "inner"): 2, ("second", "outer"): 4}
    assert timers.calls == {("first", "outer"): 1, ("second", "inner"): 1, ("second", "outer"): 1}
