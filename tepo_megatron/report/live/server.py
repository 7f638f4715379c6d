"""The HTTP server of the live page: on the loopback interface, GET only, behind a secret in the path.

    GET /SECRET/                                     the page; with style.css, plots.js and watch.js
    GET /SECRET/runs?seen=V,V,...                    what has changed: the charts of each run, and the comparison
    GET /SECRET/runs/R/samples?step=K&order=O&page=P some samples of a step
    GET /SECRET/runs/R/tokens?step=K&place=S&first=T the numbers of one sample's tokens
    GET /SECRET/runs/R/audit?step=K&token=S:P        what `tepo audit` says of a token

One thread reads the runs, so requests cost at most one core; another one audits tokens. Each answer says how long the page
should wait before it asks again: a hundred times what the answer took.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from tepo_megatron.base.errors import ConfigError, TepoError, excerpt
from tepo_megatron.report.audit.tables import audit_lines
from tepo_megatron.report.live.run import ORDERS, LiveRun, SampleReader, compared

HOST = "127.0.0.1"
LEAST_WAIT, MOST_WAIT = 2.0, 60.0  # seconds between two questions of the page
_SHUTDOWN_SECONDS = 1.0  # limit since the page ends: an answer takes milliseconds; then the connections are closed
MOST_WAITING = 16  # requests at once; more are refused
PAUSE = 150  # times as long as making an answer took, the page waits
_TEMPLATES = Path(__file__).parents[1] / "templates"
_FILES = {  # the style of the report comes first
    "": (("watch.html",), "text/html"),
    "style.css": (("style.css", "watch.css"), "text/css"),
    "plots.js": (("plots.js",), "text/javascript"),
    "watch.js": (("watch.js",), "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LivePage:
    """Serves the live page of some runs. `port`: 0: a free one. `url`: its address with the secret, once it is served."""

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self._runs = [LiveRun(folder, place) for place, folder in enumerate(folders)]
        self._samples = [SampleReader(folder) for folder in folders]
        self._secret, self._port = secrets.token_urlsafe(24), port
        self._thread, self._audits = ThreadPoolExecutor(1, "watch"), ThreadPoolExecutor(1, "audit")
        self._waiting = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve the page inside of the block, and yield its URL. Raises ConfigError if the port is taken."""
        app = web.Application(middlewares=[self._guarded], client_max_size=1024)
        app.router.add_get("/{secret}/runs", self._changes, allow_head=False)
        for name, handler in (("samples", self._page), ("tokens", self._tokens), ("audit", self._audited)):
            app.router.add_get(f"/{{secret}}/runs/{{run:[0-9]{{1,3}}}}/{name}", handler, allow_head=False)
        app.router.add_get("/{secret}/{file:[a-z.]*}", self._file, allow_head=False)
        runner = web.AppRunner(app, access_log=None, logger=_quiet(), shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, HOST, self._port).start()
            except OSError as e:
                raise ConfigError(f"--port {self._port}: cannot listen on {HOST} ({e.strerror}); name another port") from None
            self._port = int(runner.addresses[0][1])
            self.url = f"http://{HOST}:{self._port}/{self._secret}/"
            self._thread.submit(self._refresh)  # the first view then finds long runs already read
            yield self.url
        finally:
            await runner.cleanup()
            for thread in (self._thread, self._audits):
                thread.shutdown(cancel_futures=True)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what this page would not ask: another method, host or secret, or too much at once."""
        response = await self._checked(request, handler)
        response.headers.update(_HEADERS)
        return response

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "GET":
            return web.Response(status=405, text="only GET")
        if request.host not in (f"{HOST}:{self._port}", f"localhost:{self._port}"):  # a name that an attacker's DNS sends here
            return web.Response(status=403, text="another host")
        secret = request.path.split("/", 2)[1].encode(errors="replace")
        if not hmac.compare_digest(secret, self._secret.encode()):
            return web.Response(status=403, text="the URL has no valid secret; use the one that tepo watch printed")
        if self._waiting >= MOST_WAITING:
            return web.Response(status=503, text="too many requests at once")
        self._waiting += 1
        try:
            return await handler(request)
        except web.HTTPException as e:
            return web.Response(status=e.status, text=e.reason)
        except TepoError as e:
            return web.json_response({"error": excerpt(str(e), 1000)})
        except Exception as e:  # a file that is replaced while it is read, or a bug: the page shows it and goes on
            return web.json_response({"error": excerpt(f"{type(e).__name__}: {e}", 1000)})
        finally:
            self._waiting -= 1

    async def _file(self, request: web.Request) -> web.StreamResponse:
        served = _FILES.get(request.match_info["file"])
        if served is None:
            return web.Response(status=404, text="there is no such page")
        text = "\n".join((_TEMPLATES / name).read_text() for name in served[0])
        return web.Response(text=text, content_type=served[1], charset="utf-8")

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        seen = [int(word) for word in request.query.get("seen", "").split(",") if word.isascii() and word.isdigit()]
        return await self._answer(lambda: self._what_changed(seen))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        run, step = self._run_of(request), _number(request, "step", None)
        order, page = request.query.get("order", ORDERS[0]), _number(request, "page", 0)
        return await self._answer(lambda: self._of_run(run, lambda r, s: s.page(r, step, order, page or 0)))

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        run = self._run_of(request)
        step, place, first = (_number(request, name, 0) or 0 for name in ("step", "place", "first"))
        return await self._answer(lambda: self._of_run(run, lambda r, s: s.tokens(r, step, place, first)))

    async def _audited(self, request: web.Request) -> web.StreamResponse:
        run, step, token = self._run_of(request), _number(request, "step", 0) or 0, request.query.get("token", "")
        audit = partial(audit_lines, self._runs[run].folder, step, token)
        lines, agrees = await asyncio.get_running_loop().run_in_executor(self._audits, audit)
        return web.json_response({"text": "\n".join(lines), "agrees": agrees})

    def _run_of(self, request: web.Request) -> int:
        run = int(request.match_info["run"])
        if run >= len(self._runs):
            raise web.HTTPNotFound(reason="there is no such run")
        return run

    async def _answer(self, make: Callable[[], dict[str, Any]]) -> web.StreamResponse:
        """Answer with what `make` returns. It is called in the one thread that reads the runs."""
        text = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: _timed(make))
        return web.Response(text=text, content_type="application/json", charset="utf-8")

    # The rest runs in that thread.

    def _refresh(self) -> None:
        for run in self._runs:
            run.refresh()

    def _what_changed(self, seen: Sequence[int]) -> dict[str, Any]:
        self._refresh()
        versions = [run.version for run in self._runs]
        known = seen if len(seen) == len(versions) else [0] * len(versions)
        changed = {
            str(place): run.plain() for place, (run, v) in enumerate(zip(self._runs, known, strict=True)) if run.version != v
        }
        several = len(self._runs) > 1 and changed
        return {"versions": versions, "runs": changed, "comparison": compared(self._runs) if several else None}

    def _of_run(self, place: int, make: Callable[[Any, SampleReader], dict[str, Any]]) -> dict[str, Any]:
        run = self._runs[place]
        run.refresh()
        if run.thinned is None:
            return {"notes": ["No step has been recorded yet."], "samples": [], "steps": 0}
        return make(run.thinned, self._samples[place])


def _quiet() -> logging.Logger:
    """Return a logger that drops messages about malformed requests, which anybody on this machine can send."""
    logger = logging.getLogger(f"{__name__}.requests")
    logger.setLevel(logging.CRITICAL)
    return logger


def _timed(make: Callable[[], dict[str, Any]]) -> str:
    """Return JSON of what `make` returns, with `wait`: the seconds after which its cost is below 1 % of one core's time.

    Sending the answer takes half as long again as making it.
    """
    began = time.thread_time()
    text = json.dumps(make(), allow_nan=False)
    wait = min(MOST_WAIT, max(LEAST_WAIT, PAUSE * (time.thread_time() - began)))
    return f'{text[:-1]}, "wait": {wait:.3f}}}'


def _number(request: web.Request, name: str, default: int | None) -> int | None:
    """Return a whole number of the query. Raise HTTPBadRequest for anything else."""
    text = request.query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise web.HTTPBadRequest(reason=f"{name}: a whole number")
    return int(text)


async def serve(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the page until this is cancelled."""
    async with LivePage(folders, port).served() as url:
        say(url)
        await asyncio.Event().wait()
