"""`python -m benchmarks.server_memory`, a step of it, with each engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_qwen3

pytestmark = [pytest.mark.server, pytest.mark.full]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_benchmark_delivers_weights_and_measures_memory(engine: str, tmp_path: Path) -> None:
    tiny_qwen3(tmp_path, layers=2)
    words = [sys.executable, "-m", "benchmarks.server_memory", tmp_path, "--engine", engine, "--steps", "2"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    sizes = re.findall(r"^step +(\d) +(\d+) MiB", ended.stdout, re.MULTILINE)
    assert [step for step, _ in sizes] == ["0", "1", "2"] and all(int(size) > 200 for _, size in sizes)
