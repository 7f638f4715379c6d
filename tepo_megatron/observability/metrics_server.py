"""The HTTP endpoint that Prometheus reads: `GET /metrics` with the run's key.

It writes two files into the run's folder: the key (`metrics.key`, readable by its owner only), for `credentials_file` of a
scrape config, and the address (`metrics_targets.json`), in the form that `file_sd_configs` reads.
"""

import contextlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tepo_megatron.errors import ConfigError
from tepo_megatron.observability.prometheus import CONTENT_TYPE
from tepo_megatron.utils.atomic import replace_file
from tepo_megatron.utils.storage import writing

KEY_FILE, TARGETS_FILE = "metrics.key", "metrics_targets.json"
ROUTE = "/metrics"
MOST_CONNECTIONS = 8  # at once; further ones are closed
SILENT_SECONDS = 10.0  # after which a connection without a complete request is closed


@contextlib.contextmanager
def serve_metrics(run_dir: Path, host: str, port: int, collect: Callable[[], str]) -> Iterator[str]:
    """Serve the metrics of a run within the block, and yield the URL.

    `port`: port to listen on; 0: a free one. Raises ConfigError if the address cannot be used.
    """
    key = _key_of(run_dir)
    try:
        server = _Server((host, port), key, collect)
    except OSError as e:
        raise ConfigError(
            f"logging.metrics_port={port}: cannot listen on {host} ({e.strerror}); set it to 0 for a free port, or correct "
            "logging.metrics_host"
        ) from None
    address = f"{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        targets = [{"targets": [address], "labels": {"run": run_dir.name}}]
        with writing(run_dir / TARGETS_FILE):
            replace_file(run_dir / TARGETS_FILE, json.dumps(targets).encode() + b"\n")
        yield f"http://{address}{ROUTE}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        (run_dir / TARGETS_FILE).unlink(missing_ok=True)


def _key_of(run_dir: Path) -> str:
    """Return the key of the run's endpoint. A resumed run keeps its key, unless others could read or change it."""
    path = run_dir / KEY_FILE
    with contextlib.suppress(OSError):
        known = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(known, encoding="ascii", errors="replace") as file:
            found, text = os.fstat(known), file.read(200).strip()
        if found.st_uid == os.geteuid() and not found.st_mode & 0o077 and len(text) >= 32:
            return text
    made = secrets.token_urlsafe(32)
    with writing(path):
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(made + "\n")
    return made


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], key: str, collect: Callable[[], str]) -> None:
        self.expected, self.collect = f"Bearer {key}".encode(), collect
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: object, client_address: object) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that breaks off: it is not the run's fault."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENT_SECONDS
    server_version, sys_version = "tepo", ""

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self.server.expected):
            self._answer(HTTPStatus.UNAUTHORIZED, "a key is needed: Authorization: Bearer, from metrics.key\n")
        elif self.path.partition("?")[0] != ROUTE:
            self._answer(HTTPStatus.NOT_FOUND, f"only {ROUTE} is here\n")
        else:
            self._answer(HTTPStatus.OK, self.server.collect())

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
