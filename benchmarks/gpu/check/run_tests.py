"""Part `tests`: tests/gpu without the engines, which are the last part."""

from __future__ import annotations

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.parts import gpu_tests
from benchmarks.gpu.check.pytests import run_files


def run(check: Check) -> None:
    """Run the test files."""
    run_files(check, gpu_tests(), {"test_colocation.py": "not vllm", "test_layouts.py": "1 and rank"})
