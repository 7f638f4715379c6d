"""A real headless browser, driven over the DevTools protocol: Chromium, where it is installed."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60.0  # limit of everything that a page is waited for


class BrowserTab:
    """The only tab of a browser.

    Attributes:
        requests: Addresses of everything that the page requested.
        errors: What the page's console and policy complained about.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def listen(self) -> None:
        """Receive answers and events until the connection ends."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            elif event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(event["params"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], SECONDS)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found)
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        while not await self.run(script):
            assert asyncio.get_running_loop().time() < deadline, (
                script,
                self.errors,
                (await self.run("document.body.innerText"))[:2000],
            )
            await asyncio.sleep(0.05)

    async def open(self, url: str, width: int = 1400, dark: bool = False) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.call("Page.navigate", url=url)

    async def picture(self, path: Path, whole: bool = True) -> None:
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[BrowserTab]:
    assert CHROMIUM is not None
    port_file = folder / "profile" / "DevToolsActivePort"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
        "--enable-precise-memory-info", "--no-first-run", f"--user-data-dir={folder / 'profile'}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = asyncio.get_running_loop().time() + SECONDS
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert process.poll() is None and asyncio.get_running_loop().time() < deadline, "the browser did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (tab, *_) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                made = BrowserTab(socket)
                listening = asyncio.create_task(made.listen())
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await made.call(f"{domain}.enable")
                yield made
                listening.cancel()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
