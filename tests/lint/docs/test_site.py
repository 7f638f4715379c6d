"""The documentation as a site, in a real browser."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, browser

ROOT = Path(__file__).parents[3]
WIDTHS = (1250, 390)
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN = "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"


async def faults(site: Path, folder: Path) -> list[str]:
    """Return what is wrong with the pages: they are wider than the window, or lack a picture."""
    found = []
    pages = [path for path in sorted(site.rglob("*.html")) if "_modules" not in path.parts and path.name != "index.html"]
    assert len(pages) > 60
    async with browser(folder) as tab:
        for path in pages:
            for width in WIDTHS:
                await tab.open(f"file://{path}", width)
                await tab.until(f"location.pathname === '{path}' && document.readyState === 'complete'")
                if wider := await tab.run(WIDER):
                    found.append(f"{path.relative_to(site)}: {wider} pixels wider than {width}")
                found += [f"{path.relative_to(site)}: no picture {source}" for source in await tab.run(BROKEN)]
    return found


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)")
def test_every_page_fits_its_window_and_has_its_pictures(tmp_path: Path) -> None:
    words = ["make", "docs", f"SITE={tmp_path / 'site'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert asyncio.run(faults(tmp_path / "site", tmp_path)) == []
