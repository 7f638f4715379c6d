"""Run files of tests/gpu, each in a process of its own, because a CUDA fault ends the process in which it happens."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.check.lines import Check, Skip
from benchmarks.results import ROOT

NOTHING_COLLECTED = 5  # exit status of pytest


def run_files(check: Check, files: Sequence[str], selection: Mapping[str, str] | None = None) -> None:
    """Run the test files and report each.

    Args:
        check: Receives the lines.
        files: Names in tests/gpu, which are also the lines' names.
        selection: pytest's `-k` of a file, by name.
    """
    for name in files:
        with check.line(name):
            if importlib.util.find_spec("pytest") is None:
                raise Skip("pytest is not installed")
            _run_file(check, name, (selection or {}).get(name, ""))


def _run_file(check: Check, name: str, selection: str) -> None:
    report = check.folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    words = ["-m", "pytest", f"tests/gpu/{name}", "--confcutdir=tests/gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if importlib.util.find_spec("pytest_timeout") is None:
        words += ["-o", "addopts=--strict-markers"]  # without the plugins that pyproject.toml names
    done = subprocess.run([sys.executable, *words, *(["-k", selection] if selection else [])], cwd=ROOT, check=False)
    counts, reasons = outcomes(report) if report.exists() else (Counter(), Counter())
    if not counts and done.returncode not in (0, NOTHING_COLLECTED):
        raise RuntimeError(f"pytest ended with exit status {done.returncode} and ran no test")
    if not counts:
        raise Skip("no test was collected: torch finds no GPU, or the file skips this machine")
    summary = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    why = "; ".join(f"{n} x {reason}" if n > 1 else reason for reason, n in reasons.items())
    bad = done.returncode not in (0, NOTHING_COLLECTED) or counts["failed"]
    status = "failed" if bad else "passed" if counts["passed"] else "skipped"
    check.report(name, status, summary, why=why[:1500])  # type: ignore[arg-type]


def outcomes(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the number of tests by outcome, and of each reason for a failure or a skip, from a JUnit file."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        found = [(what, case.find(tag)) for tag, what in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped"))]
        outcome = next(((what, element) for what, element in found if element is not None), None)
        counts[outcome[0] if outcome else "passed"] += 1
        if outcome is not None:
            message = (outcome[1].get("message") or "no reason").strip().splitlines()[0]
            reasons[message if outcome[0] == "skipped" else f"{case.get('name')}: {message}"] += 1
    return counts, reasons
