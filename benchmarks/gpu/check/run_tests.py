"""Part `tests`: tests/gpu without the engines, which are the last part.

A file runs in this process, and its row is reported after every test, because a CUDA fault ends the process.
"""

import importlib.util
from collections import Counter
from typing import Any

from benchmarks.gpu.check.lines import Check, Skip

SELECTION = {"test_colocation.py": "not vllm", "test_layouts.py": "1 and rank"}  # pytest's `-k` of a file
NOTHING_COLLECTED = 5  # exit status of pytest
# without the plugins that pyproject.toml names: the machine lacks what they need, and each task has a limit already
WORDS = ("--confcutdir=tests/gpu", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers")
WORST_FIRST = ("failed", "skipped", "passed")


class Outcomes:
    """A plugin of pytest that counts the tests by outcome, and reports what it knows after each."""

    def __init__(self, check: Check) -> None:
        self._check, self._tests = check, dict[str, str]()
        self.reasons: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Number of tests by outcome."""
        return Counter(self._tests.values())

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the report of a test's setup, call or teardown."""
        self._take(report, f"{report.nodeid.rpartition('::')[2]}: ")
        if report.when == "teardown":
            self.tell("running")

    def pytest_collectreport(self, report: Any) -> None:
        """Take the report of a file that could not be imported, or that skips itself."""
        if report.outcome != "passed":
            self._take(report, "")

    def tell(self, status: Any) -> None:
        """Report the file's row."""
        summary = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        why = "; ".join(f"{n} x {reason}" if n > 1 else reason for reason, n in self.reasons.items())
        self._check.report(self._check.task, status, summary, why=why[:1500])

    def _take(self, report: Any, name: str) -> None:
        before = self._tests.get(report.nodeid, "passed")
        self._tests[report.nodeid] = min(before, report.outcome, key=WORST_FIRST.index)
        if report.outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[reason.removeprefix("Skipped: ")] += 1
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr).strip() if crash is None else crash.message
            self.reasons[name + (text.splitlines() or ["no reason"])[-1 if crash is None else 0]] += 1


def run_file(check: Check, folder: str = "tests/gpu", selection: str = "") -> None:
    """Run the test file that the task is named after, and report it."""
    with check.line(check.task):
        if importlib.util.find_spec("pytest") is None:
            raise Skip("pytest is not installed")
        import pytest

        outcomes = Outcomes(check)
        words = [f"{folder}/{check.task}", *WORDS, *(["-k", selection] if selection else [])]
        status = pytest.main(words, plugins=[outcomes])
        if not outcomes.counts and status not in (0, NOTHING_COLLECTED):
            raise RuntimeError(f"pytest ended with exit status {int(status)} and ran no test")
        if not outcomes.counts:
            raise Skip("no test was collected: torch finds no GPU, or the file skips this machine")
        bad = status not in (0, NOTHING_COLLECTED) or outcomes.counts["failed"]
        outcomes.tell("failed" if bad else "passed" if outcomes.counts["passed"] else "skipped")


def run(check: Check) -> None:
    """Run a test file."""
    run_file(check, selection=SELECTION.get(check.task, ""))
