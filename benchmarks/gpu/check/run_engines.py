"""Part `engines`: the tests of tests/gpu that start servers."""

import importlib.util

from benchmarks.gpu.check.lines import Check
from benchmarks.gpu.check.run_tests import run_file
from tepo_megatron.engines.sglang import default_python


def run(check: Check) -> None:
    """Run a test file, or report it as skipped where no server can be started."""
    if importlib.util.find_spec("psutil") is None:
        why = "psutil, with which servers are started and ended, is not installed"
    elif importlib.util.find_spec("vllm") is None and not default_python().is_file():
        why = "neither vLLM nor SGLang is installed"
    else:
        run_file(check, selection="vllm" if check.task == "test_colocation.py" else "")
        return
    check.report(check.task, "skipped", why=why)
