"""The page of a run in a real browser, where there is one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.report import write_comparison, write_report
from tests.audit_runs import write_audit
from tests.browser import CHROMIUM, browser
from tests.objective_cases import draw
from tests.report_runs import SUMMARY, measured, record_step, rollout, write_run
from tests.unit.report.test_live_browser import UNDRAWN, WIDE
from tests.unit.report.test_report_page import HOSTILE, tokenizer_of_characters, two_runs
from tests.unit.report.test_report_tokens import tokens_of

CHOSEN = "document.querySelectorAll('.tokens')[1]"


async def look(folder: Path, page: Path, comparison: Path) -> None:
    """Open the pages in windows of two widths: point at a curve, and choose a token by click and by key."""
    token = tokens_of(page.read_text())[1]["tokens"][3]
    async with browser(folder) as tab:
        for width, dark in ((1400, False), (500, True)):
            await tab.open(comparison.as_uri(), width, dark)
            await tab.until("document.querySelectorAll('#comparison .chart path').length > 6")
            assert await tab.run(WIDE) == 0, f"the comparison is wider than a window of {width}"
            await tab.open(page.as_uri(), width, dark)
            await tab.until("document.title === 'run' && document.querySelectorAll('.chart path').length > 2")
            assert await tab.run(WIDE) == 0, f"the page is wider than a window of {width}"
            await tab.call("Page.printToPDF")
            assert await tab.run(UNDRAWN) == 0, "all charts are printed"
            assert "81.0%" in await tab.run("document.querySelector('#run-0-evaluation svg').textContent")
            await tab.run("document.querySelectorAll('.plot')[1].scrollIntoView({block: 'center'})")
            plot = "document.querySelectorAll('.plot')[1].getBoundingClientRect()"
            x, y = await tab.run(f"[{plot}.left + 0.97 * {plot}.width, {plot}.top + 40]")
            await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            tip = "document.querySelectorAll('.tip')[1].textContent"
            await tab.until(f"{tip} === 'step 6mean over response tokens, nats0.06667'")
            await tab.run(f"{CHOSEN}.querySelectorAll('.token')[2].click()")
            pressed = "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})"
            await tab.run(f"{CHOSEN}.querySelectorAll('.token')[2].dispatchEvent({pressed})")
            numbers = await tab.run(f"{CHOSEN}.querySelector('.numbers').textContent")
            assert numbers.startswith(token["place"]) and "importance ratio" in numbers
            assert all(used in numbers for _, used, _ in token["updates"][0][1])
            assert await tab.run(f"{CHOSEN}.querySelectorAll('.token')[3].classList.contains('chosen')")
            assert await tab.run(WIDE) == 0, "nor do a token's numbers make it wider"
            assert await tab.run("document.title") == "run", "no text of the run became a script that renamed the page"
        assert await tab.run("document.querySelectorAll('img, iframe, object').length") == 0
        assert all(request.startswith("file:") for request in tab.requests) and tab.errors == []


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)")
def test_the_pages_in_a_browser(tmp_path: Path) -> None:
    ids, run = tokenizer_of_characters(tmp_path / "model"), tmp_path / "run"
    run.mkdir()
    write_run(run, measured(6), model={"path": str(tmp_path / "model")}, training={"steps": 6})
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    record_step(run, 1, [rollout(0, ids, ids * 3, 1.0, answer=HOSTILE)])
    write_audit(run, OBJECTIVES["tepo"], draw(3, (5, 17, 0, 3, 30, 2)), ids)
    comparison = write_comparison([run, *two_runs(tmp_path)], tmp_path / "comparison.html")
    asyncio.run(look(tmp_path, write_report(run), comparison))
