"""The live page in a real browser, where there is one."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tepo_megatron.report.live.server import LivePage
from tests.browser import CHROMIUM, BrowserTab, browser
from tests.report_runs import measured, write_run
from tests.unit.report.test_live_server import write_hostile_run
from tests.unit.report.test_report_page import HOSTILE

WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNDRAWN = "document.querySelectorAll('.chart:not(:has(svg *))').length"
SERVER = {"server/0/up": 1.0, "server/0/queue": 12.0, "server/0/tokens_per_second": 1234.5, "server/0/restarts": 0.0}


async def click(tab: BrowserTab, text: str) -> None:
    found = f"[...document.querySelectorAll('button')].find((b) => b.textContent.startsWith({json.dumps(text)}) && !b.disabled)"
    await tab.until(f"!!{found}")
    await tab.run(f"{found}.click()")


async def look(folder: Path) -> None:
    """Read hostile samples, click a token, and see a step appear, in windows of two widths, light and dark."""
    run, other = write_hostile_run(folder, 1_000_000), folder / "other"
    other.mkdir()
    write_run(other, [row | SERVER for row in measured(3000)])
    async with LivePage([run, other]).served() as url, browser(folder) as tab:
        for width, dark in ((1400, False), (390, True)):
            await tab.open(url, width, dark)
            await tab.until("document.body?.dataset.drawn && document.querySelectorAll('.chart path').length > 6")
            assert await tab.run(WIDE) == 0, f"the page is wider than a window of {width}"
            assert await tab.run(UNDRAWN) > 0, "charts out of view are drawn when they come into view"
            await tab.call("Page.printToPDF")
            assert await tab.run(UNDRAWN) == 0, "all charts are printed"
            assert await tab.run("getComputedStyle(document.body).backgroundColor") == (
                "rgb(18, 22, 27)" if dark else "rgb(245, 246, 248)"
            )
            assert await tab.run("document.querySelector('#run-1-servers td').textContent") == "server 0"
            await click(tab, "show samples")
            await tab.until("document.querySelectorAll('.sample').length === 1")
            assert 12_000 < await tab.run("document.querySelector('.sample pre:not(.asked)').textContent.length") < 13_000
            assert HOSTILE in await tab.run("document.querySelector('.asked').textContent")
            await click(tab, "◀")
            await tab.until("document.querySelectorAll('.sample').length === 4")
            await click(tab, "tokens with their numbers")
            await tab.until("document.querySelectorAll('.token').length > 0")
            colours = await tab.run(
                "[...document.querySelector('.split').previousSibling.querySelectorAll('option')].map((o) => o.value)"
            )
            assert colours == ["advantage", "ratio", "entropy change", "mismatch", "log-prob of the engine"]
            assert await tab.run("document.querySelectorAll('.token.up4, .token.down4').length") > 0
            await tab.run("document.querySelector('.token').click()")
            await tab.until("document.querySelector('.audit')?.textContent.includes('everything agrees')")
            assert await tab.run(WIDE) == 0, "nor does a token's audit make it wider"
        ticks = "[-0, 9.99999999e-6, 2e-7, 1.5e7, 0.30000000000000004].map((tick) => tickText(tick, 'plain'))"
        assert await tab.run(ticks) == ["0", "1e-5", "2e-7", "1.5e7", "0.3"]
        assert await tab.run("niceTicks(-0.5, 20, 5).map((tick) => tick.toLocaleString('en'))") == ["0", "5", "10", "15", "20"]
        plot = "document.querySelector('.plot').getBoundingClientRect()"
        await tab.run("window.scrollTo(0, 0)")
        x, y = await tab.run(f"[{plot}.left + 0.9 * {plot}.width, {plot}.top + 40]")
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await tab.until(
            "[...document.querySelectorAll('.tip')].some((tip) => !tip.hidden && tip.textContent.startsWith('step '))"
        )
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "reward/mean": 0.5}) + "\n")
        await tab.until("document.querySelector('#run-0 .facts').textContent.includes('step 5 of')")
        assert await tab.run("document.title") == "run, other – tepo watch" and await tab.run("!window.owned")  # noqa: RUF001
        assert await tab.run("document.querySelectorAll('img, iframe, object, main script').length") == 0
        mine = urlsplit(url)
        for request in tab.requests:
            parts = urlsplit(request)
            assert parts.scheme == "data" or (parts.netloc == mine.netloc and parts.path.startswith(mine.path)), request
        assert tab.errors == []


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)")
def test_the_live_page_in_a_browser(tmp_path: Path) -> None:
    asyncio.run(look(tmp_path))
