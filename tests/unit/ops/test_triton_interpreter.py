"""The Triton kernels on a CPU: the tests of the token statistics again, in a process whose triton interprets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.token_statistics import HAS_TRITON, INTERPRETED

ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/unit/ops/test_vocab_parallel.py",
    "tests/unit/ops/test_vocab_parallel_in_place.py",
    "tests/parallel/test_statistics.py",
]


@pytest.mark.full
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreting one")
def test_triton_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", *TESTS, "-k", "triton", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 30 and "skipped" not in done.stdout, done.stdout[-2000:]
