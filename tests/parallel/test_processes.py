"""Worlds of fresh processes, which the tests on GPUs use, compute what forked ones do."""

from pathlib import Path

import pytest
import torch

from tests.parallel import cases
from tests.processes import run_processes
from tests.worlds import run_world


@pytest.mark.full
def test_processes_compute_what_forks_do(case: cases.Case, tmp_path: Path) -> None:
    cfg = cases.run_config(case.model, cases.LAYOUTS["TP2"])
    forked = run_world(2, cases.train_steps, cfg, case.batches)
    fresh = run_processes(2, cases.train_steps, cfg, case.batches, folder=tmp_path)
    cases.compare(fresh, case.steps)
    for a, b in zip(forked, fresh, strict=True):
        assert all(torch.equal(x, b[1]["weights"][name]) for name, x in a[1]["weights"].items())


@pytest.mark.full
def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_processes(1, divide, folder=tmp_path)


def divide(rank: int) -> float:
    return 1 / rank
