"""Measure the live page on a run of 10,000 steps with 10 million recorded tokens.

    python -m benchmarks.watch [--steps 10000] [--tokens 10000000] [--seconds 60]

First view: `tepo watch` is started, and a browser opens its page once the command has printed the URL. Seconds to the URL, and
from the navigation to the frame in which all charts within the window are drawn. Memory: the JavaScript heap, and the private
memory (USS) of the browser's process for the page less that of an empty page, after samples and a sample's tokens were opened.

Cost on a run: for some seconds, a step of the same size is appended every second while the page is open. CPU seconds of
`tepo watch` over the seconds that pass. The run itself does nothing for the page.

Needs Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tepo_megatron.controller.step_log import KEYS
from tests.browser import CHROMIUM, BrowserTab, browser
from tests.report_runs import measured, record_step, rollout, write_run
from tests.unit.report.test_report_page import tokenizer_of_characters

ROLLOUTS = 8  # of a step
ROUNDS = 5  # first views


def steps(count: int) -> list[dict[str, float | None]]:
    """Return records with every key that a run may have."""
    noise = np.random.default_rng(0).normal(size=(count, len(KEYS)))
    return [dict(zip(KEYS, map(float, row), strict=True)) | plain for row, plain in zip(noise, measured(count), strict=True)]


def make_run(folder: Path, count: int, tokens: int) -> Path:
    """Write the run and return its folder."""
    ids, run = tokenizer_of_characters(folder / "model")[:-1], folder / "run"
    run.mkdir()
    write_run(run, steps(count), model={"path": str(folder / "model")})
    length = tokens // (count * ROLLOUTS)
    response = (ids * (length // len(ids) + 1))[:length]
    for step in range(1, count + 1):
        record_step(run, step, [rollout(step, ids[:20], response, float(i % 2)) for i in range(ROLLOUTS)])
    return run


def renderer_bytes(process: psutil.Process) -> int:
    """Return the private memory of the browser's largest process of a page."""
    pages = [child for child in process.children(recursive=True) if "--type=renderer" in child.cmdline()]
    return max(page.memory_full_info().uss for page in pages)


async def first_view(tab: BrowserTab, url: str) -> float:
    """Return the seconds from the navigation to the frame in which the charts within the window are drawn."""
    await tab.open("about:blank")
    await tab.open(url)
    await tab.until("document.body?.dataset.drawn")
    assert await tab.run("document.querySelectorAll('.live path').length") > 10
    return float(await tab.run("document.body.dataset.drawn")) / 1000


async def click(tab: BrowserTab, text: str, then: str) -> None:
    """Click a button and wait."""
    await tab.run(f"[...document.querySelectorAll('button')].find((b) => b.textContent.startsWith({json.dumps(text)})).click()")
    await tab.until(then)


async def measure(run: Path, folder: Path, rows: list[dict[str, float | None]], seconds: float) -> None:
    """Print the figures.

    Args:
        seconds: Duration of the measurement of the cost on a run.
    """
    began = time.monotonic()
    words = [sys.executable, "-m", "tepo_megatron", "watch", str(run)]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        print(f"seconds to the URL: {time.monotonic() - began:.1f}")
        async with browser(folder) as tab:
            chromium = next(p for p in psutil.Process().children() if "--headless" in " ".join(p.cmdline()))
            empty = renderer_bytes(chromium)
            views = [await first_view(tab, url) for _ in range(ROUNDS)]
            print(f"seconds to the first view: {views[0]:.2f}; of {ROUNDS} views: median {statistics.median(views):.2f}")
            await click(tab, "show samples", "document.querySelectorAll('.sample').length === 4")
            await click(tab, "tokens with", "document.querySelectorAll('.token').length > 50")
            await tab.run("window.scrollTo(0, document.body.scrollHeight)")
            heap = float(await tab.run("performance.memory.usedJSHeapSize")) / 1e6
            private = (renderer_bytes(chromium) - empty) / 1e6
            print(f"browser: JavaScript heap {heap:.0f} MB, private memory {private:.0f} MB")
            watching = psutil.Process(process.pid)
            print(f"tepo watch: private memory {watching.memory_full_info().uss / 1e6:.0f} MB")
            before, start = sum(watching.cpu_times()[:2]), time.monotonic()
            with (run / "metrics.jsonl").open("a") as file:
                for extra in range(1, int(seconds) + 1):
                    file.write(json.dumps(rows[-1] | {"step": len(rows) + extra}) + "\n")
                    file.flush()
                    await asyncio.sleep(max(0.0, start + extra - time.monotonic()))
            passed, used = time.monotonic() - start, sum(watching.cpu_times()[:2]) - before
            print(f"cost: {used:.2f} CPU seconds in {passed:.0f} s with a step each second: {used / passed:.2%} of one core")
    finally:
        process.terminate()  # a shell in the background ignores SIGINT, and so would the command
        await asyncio.wait_for(process.wait(), 60)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    assert CHROMIUM is not None, "no chromium is installed (Debian: apt-get install chromium)"
    with tempfile.TemporaryDirectory(prefix="tepo-watch-") as name:
        run = make_run(Path(name), args.steps, args.tokens)
        size = (run / "metrics.jsonl").stat().st_size / 1e6
        load = os.getloadavg()[0]
        print(f"{args.steps} steps, metrics.jsonl of {size:.0f} MB, {args.tokens} recorded tokens; load {load:.1f}")
        asyncio.run(measure(run, Path(name), steps(args.steps), args.seconds))


if __name__ == "__main__":
    main()
