"""The live page of a run ends with the run, and the terminal has its URL."""

import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tepo_megatron.launcher.live_page import live_page


@pytest.mark.slow
def test_the_page_is_served_until_the_block_ends(tmp_path: Path) -> None:
    said: list[str] = []
    with live_page(tmp_path, said.append):
        deadline = time.monotonic() + 120
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        (line,) = said
        url = line.rpartition(" ")[2]
        with urllib.request.urlopen(url, timeout=60) as page:
            assert b"<title>" in page.read()
        (served,) = [child for child in psutil.Process().children() if str(tmp_path) in child.cmdline()]
    assert not served.is_running()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)


@pytest.mark.slow
def test_a_page_that_cannot_be_served_costs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with live_page(tmp_path / "nowhere", said.append):
        deadline = time.monotonic() + 120
        while "no such folder" not in capfd.readouterr().err and time.monotonic() < deadline:
            time.sleep(0.05)
    assert time.monotonic() < deadline and said == []
