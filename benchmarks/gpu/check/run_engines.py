"""Part `engines`: the tests of tests/gpu that start servers."""

from __future__ import annotations

import importlib.util

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.parts import ENGINE_TESTS
from benchmarks.gpu.check.pytests import run_files


def run(check: Check) -> None:
    """Run the tests, or report them as skipped without psutil."""
    if importlib.util.find_spec("psutil") is None:
        for name in ENGINE_TESTS:
            check.report(name, "skipped", why="psutil, with which servers are started and ended, is not installed")
        return
    run_files(check, ENGINE_TESTS, {"test_colocation.py": "vllm"})
