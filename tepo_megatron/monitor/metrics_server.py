"""The HTTP endpoint that Prometheus reads: `GET /metrics` with the run's key.

It writes two files into the run's folder: the key (`metrics.key`, readable by its owner only), for `credentials_file` of a
scrape config, and the address (`metrics_targets.json`), in the form that `file_sd_configs` reads. Names follow a rule:

    key of a step's record    name
    reward/mean               tepo_step_reward_mean
    tepo/dH_up_p05            tepo_step_tepo_dH_up_p05
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.storage import replace_file, writing

KEY_FILE, TARGETS_FILE = "metrics.key", "metrics_targets.json"
ROUTE = "/metrics"
MOST_CONNECTIONS = 8  # at once; further ones are closed
SILENT_SECONDS = 10.0  # limit since the connection of a client: a request is one line; then the connection is closed
PREFIX = "tepo_"  # of all names of ours; servers may not use it
STEP_PREFIX = "tepo_step_"
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def step_name(key: str) -> str:
    """Return the name of a value of a step's record: every character but letters, digits and _ becomes _."""
    return STEP_PREFIX + _NOT_A_NAME.sub("_", key)


def of_step(record: Mapping[str, float | None]) -> list[Metric]:
    """Return one gauge for each value of a step's record that was measured."""
    return [
        GaugeMetricFamily(step_name(key), f"{key} of the last step", value)
        for key, value in record.items()
        if value is not None
    ]


def as_text(metrics: Iterable[Metric]) -> str:
    """Return metrics as Prometheus reads them."""
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: metrics))).decode()


def parsed(text: str) -> list[Metric]:
    """Return a server's metrics; none if its text is not of the format, so that a faulty server cannot break the others'."""
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, IndexError):
        return []


def merged(servers: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Return the metrics of several servers as one, in which each sample has a label `server`.

    A server's own label of that name becomes `exported_server`. Names that begin with `tepo_` are left out: no server reports
    for the run.
    """
    metrics: dict[str, Metric] = {}
    for server, of_server in servers.items():
        for family in of_server:
            metric = metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if not sample.name.startswith(PREFIX):
                    own = {f"exported_{name}" if name == "server" else name: value for name, value in sample.labels.items()}
                    metric.add_sample(sample.name, own | {"server": server}, sample.value)
    return [metric for metric in metrics.values() if metric.samples]


@contextlib.contextmanager
def serve_metrics(run_dir: Path, host: str, port: int, collect: Callable[[], str]) -> Iterator[str]:
    """Serve the metrics of a run within the block, and yield the URL."""
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
        thread.join(SILENT_SECONDS)
        (run_dir / TARGETS_FILE).unlink(missing_ok=True)


def _key_of(run_dir: Path) -> str:
    """Return the key of the run's endpoint. A resumed run keeps its key, unless others could read or change it."""
    path = run_dir / KEY_FILE
    with contextlib.suppress(OSError):
        known = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(known, encoding="ascii", errors="replace") as file:
            status, text = os.fstat(known), file.read(200).strip()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077 and len(text) >= 32:
            return text
    new_key = secrets.token_urlsafe(32)
    with writing(path):
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_key + "\n")
    return new_key


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
        authorization = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(authorization, self.server.expected):
            self._answer(HTTPStatus.UNAUTHORIZED, "a key is needed: Authorization: Bearer, from metrics.key\n")
        elif self.path.partition("?")[0] != ROUTE:
            self._answer(HTTPStatus.NOT_FOUND, f"only {ROUTE} is here\n")
        else:
            self._answer(HTTPStatus.OK, self.server.collect())

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
