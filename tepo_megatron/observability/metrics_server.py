"""The HTTP endpoint that Prometheus reads: `GET /metrics` with the run's key.

It writes two files into the run's folder: the key (`metrics.key`, readable by its owner only), for `credentials_file` of a
scrape config, and the address (`metrics_targets.json`), in the form that `file_sd_configs` reads. The text has format 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/), and names by a rule:

    key of a step's record    name
    reward/mean               tepo_step_reward_mean
    tepo/dH_up_p05            tepo_step_tepo_dH_up_p05
"""

import contextlib
import hmac
import json
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from tepo_megatron.errors import ConfigError
from tepo_megatron.utils.atomic import replace_file
from tepo_megatron.utils.storage import writing

KEY_FILE, TARGETS_FILE = "metrics.key", "metrics_targets.json"
ROUTE = "/metrics"
MOST_CONNECTIONS = 8  # at once; further ones are closed
SILENT_SECONDS = 10.0  # limit since the connection of a client: a request is one line; then the connection is closed
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "tepo_"  # of all names of ours; servers may not use it
STEP_PREFIX = "tepo_step_"
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL})(?:,{_LABEL})*)?,?\}})? +([0-9eE.+-]+|NaN|[+-]?Inf)(?: +-?[0-9]+)?")
_HEADER = re.compile(rf"# (HELP|TYPE) ({_NAME})(?: (.*))?")
_SERVER_LABEL = re.compile(r'(^|,)server=(?="(?:[^"\\\n]|\\.)*"(?:,|$))')


@dataclass(frozen=True)
class MetricFamily:
    """A metric with all of its samples."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def step_name(key: str) -> str:
    """Return the name of a value of a step's record: every character but letters, digits and _ becomes _."""
    return STEP_PREFIX + _NOT_A_NAME.sub("_", key)


def of_step(record: Mapping[str, float | None]) -> list[MetricFamily]:
    """Return one gauge for each value of a step's record that was measured."""
    return [
        MetricFamily(step_name(key), "gauge", f"{key} of the last step", [({}, value)])
        for key, value in record.items()
        if value is not None
    ]


def as_text(found: Iterable[MetricFamily]) -> str:
    """Return metrics as text, those without samples left out."""
    lines = []
    for family in found:
        if family.samples:
            lines += [f"# HELP {family.name} {_escaped_help(family.text)}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_braces(labels)} {_number(value)}" for labels, value in family.samples]
    return "".join(line + "\n" for line in lines)


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")


@dataclass
class _ServerFamily:
    headers: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge_servers(texts: Mapping[str, str]) -> str:
    """Return the metrics of several servers as one text, in which each sample has a label `server`.

    A server's own label of that name becomes `exported_server`. Lines that are not of the format, and names that begin with
    `tepo_`, are left out, so a faulty server can neither break the text nor report for the run.
    """
    found: dict[str, _ServerFamily] = {}
    for server, text in texts.items():
        current = ""
        for line in text.split("\n"):
            if (header := _HEADER.fullmatch(line)) is not None:
                current = header[2]
                if not current.startswith(PREFIX):
                    found.setdefault(current, _ServerFamily()).headers.setdefault(header[1], line)
            elif (sample := _SAMPLE.fullmatch(line)) is not None and not sample[1].startswith(PREFIX):
                family = current if current and sample[1].startswith(current) else sample[1]
                labels = _SERVER_LABEL.sub(r"\1exported_server=", sample[2]) if sample[2] else ""
                named = f'{{server="{_escaped(server)}"{"," if labels else ""}{labels}}}'
                found.setdefault(family, _ServerFamily()).samples.append(f"{sample[1]}{named} {sample[3]}")
    lines = [line for one in found.values() if one.samples for line in (*one.headers.values(), *one.samples)]
    return "".join(line + "\n" for line in lines)


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
