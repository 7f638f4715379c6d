"""Limits that are counted from one event and looked at after another, and waits that nothing ends."""

from __future__ import annotations

from tests.mutants.exhibit import Exhibit

EXHIBITS = (
    Exhibit(
        name="ready_but_looked_at_too_late",
        source="own: every run whose engine took longer than two minutes to give the first response",
        kind="deadlines",
        bug="A wait whose deadline has passed does not look whether the thing it waits for is there.",
        cost="Every real run ended in its first step; where only this process was stopped, right answers counted as 0.",
        symbol="GradingWorker._transfer",
        old="            if self._read():\n                return\n            raise",
        new="            raise",
        tests=("tests/unit/rewards/test_grading_pool.py::test_what_a_worker_wrote_counts_however_late_it_is_read",),
    ),
)
