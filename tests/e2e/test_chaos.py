"""A sample of `make chaos`, whose other trials take hours: with the scripted engine, and as its own process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def test_a_sample_of_random_kills_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "chaos.jsonl"
    words = [sys.executable, "-m", "tests.harness.chaos", "--engines", "scripted", "--trials", "2", "--seed", "7", "--out", out]
    for _ in range(2):  # the second call finds both trials done
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
        assert "2 of 2 trials held" in ended.stdout
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["mode"] for line in lines] == ["sync", "ahead"] and all(line["killed"] for line in lines)
