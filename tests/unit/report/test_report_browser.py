"""The page in a real browser, where there is one."""

import re
import subprocess
from pathlib import Path

import pytest

from tepo_megatron.report import write_report
from tests.browser import CHROMIUM
from tests.report_runs import measured, record_step, rollout, write_run
from tests.unit.report.test_report_page import HOSTILE, tokenizer_of_characters

PROBE = """<script>addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const plot = document.querySelectorAll(".plot")[2], box = plot.getBoundingClientRect();
  const place = {clientX: box.left + 0.97 * box.width, clientY: box.top + 0.25 * box.height};
  plot.dispatchEvent(new PointerEvent("pointermove", place));
  document.body.dataset.wide = wide;
  document.body.dataset.tip = plot.querySelector(".tip").textContent;
});</script>"""


def dom(page: Path, width: int) -> str:
    """Return the document in the browser once the page is loaded and its scripts have run."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},900",
        f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    ids = tokenizer_of_characters(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    write_run(run, measured(6), model={"path": str(tmp_path / "model")})
    record_step(run, 1, [rollout(0, ids, ids * 3, 1.0, answer=HOSTILE)])
    page = write_report(run)
    text = page.read_text()
    assert "<title>run</title>" in dom(page, 1400), "no text of the run became a script that renamed the page"
    # the probe is no part of the page, so its policy has to go: what it would have kept from running runs now
    free = tmp_path / "free.html"
    free.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", PROBE + "</body>"))
    for width in (1400, 500):
        found = dom(free, width)
        assert "<title>run</title>" in found, "escaping alone is enough"
        assert 'data-wide="0"' in found, f"the page is wider than a window of {width}"
        tip = re.findall(r'data-tip="([^"]*)"', found)[0]
        assert tip.startswith("step 6") and "gradient norm before clipping0.5" in tip
