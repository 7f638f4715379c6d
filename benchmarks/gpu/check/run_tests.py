"""Part `tests`: tests/gpu without the engines, which are the last part."""

from __future__ import annotations

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.pytests import run_file

SELECTION = {"test_colocation.py": "not vllm", "test_layouts.py": "1 and rank"}  # pytest's `-k` of a file


def run(check: Check) -> None:
    """Run a test file."""
    run_file(check, selection=SELECTION.get(check.task, ""))
