"""The metrics of a run as Prometheus reads them: the last step's record, what happens now, and the servers' own metrics."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from tepo_megatron.inference.report import STATES, EngineReport, ServerReport
from tepo_megatron.observability.alerts import RULES, key_of
from tepo_megatron.observability.metrics_server import MetricFamily, as_text, merge_servers, of_step
from tepo_megatron.rollout.collector import Progress
from tepo_megatron.rollout.containment import FAILURE_KINDS

# Limit since a request of Prometheus, which waits 10 s: servers answer in milliseconds; then without their metrics
SERVER_SECONDS = 2.0
Counts = Callable[[], Mapping[str, int]]
# gauge of a server -> its meaning, and its value
_OF_A_SERVER: dict[str, tuple[str, Callable[[ServerReport], float]]] = {
    "tepo_server_requests_in_flight": ("requests in flight on a server", lambda one: one.in_flight),
    "tepo_server_weights_version": ("version of the weights that a server has; below 0: of no step", lambda one: one.version),
}


class Reporting(Protocol):
    """The part of an engine that is used here."""

    def report(self, seconds: float) -> EngineReport:
        """See `Lifecycle.report`."""


class LiveMetrics:
    """The metrics of a run at any moment. `record` and `text` may be called by different threads."""

    def __init__(
        self,
        run: str,
        engine_name: str,
        platform: str,
        objective: str,
        ranks: int,
        steps: int,
        progress: Progress | None,
        engine: Reporting | None,
        counts: Counts,
    ) -> None:
        self._progress, self._engine, self._counts = progress, engine, counts
        self._started, self._lock = time.time(), threading.Lock()
        self._record: Mapping[str, float | None] = {}
        self._step, self._recorded = 0, 0.0
        self._lost = dict.fromkeys(FAILURE_KINDS, 0.0)
        facts = {"run": run, "engine": engine_name, "platform": platform, "objective": objective}
        self._fixed = [
            MetricFamily("tepo_run_info", "gauge", "always 1; the labels describe the run", [(facts, 1.0)]),
            MetricFamily("tepo_ranks", "gauge", "ranks that train", [({}, ranks)]),
            MetricFamily("tepo_steps", "gauge", "steps of the whole run", [({}, steps)]),
        ]

    def record(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take over the record of a step."""
        with self._lock:
            self._step, self._record, self._recorded = step, dict(values), time.time()
            for kind in self._lost:
                self._lost[kind] += values.get(f"rollout/samples_{kind}") or 0.0

    def text(self) -> str:
        """Return all metrics as text. A server that does not answer is left out of it."""
        texts: Mapping[str, str] = {}
        shown = [*self._fixed, *self._now()]
        if self._engine is not None:
            report = self._engine.report(SERVER_SECONDS)
            shown += _of_engine(report)
            texts = report.texts
        return as_text(shown) + merge_servers(texts)

    def _now(self) -> list[MetricFamily]:
        with self._lock:
            step, record, recorded, lost = self._step, self._record, self._recorded, dict(self._lost)
        found = [
            MetricFamily("tepo_step", "gauge", "number of the last step", [({}, step)]),
            MetricFamily(
                "tepo_start_time_seconds", "gauge", "when the rollout service started, Unix time", [({}, self._started)]
            ),
            MetricFamily(
                "tepo_samples_lost_total", "counter", "samples lost since the start, by reason", _labelled("reason", lost)
            ),
            MetricFamily(
                "tepo_gateway_events_total", "counter", "events of agents' samples", _labelled("event", self._counts())
            ),
        ]
        if self._progress is not None:
            done, wanted = self._progress.useful, self._progress.wanted
            found.append(
                MetricFamily("tepo_groups_done", "gauge", "groups of the present batch that are complete", [({}, done)])
            )
            found.append(MetricFamily("tepo_groups_wanted", "gauge", "groups that the present batch needs", [({}, wanted)]))
        if recorded:
            active = {rule.name: float(record.get(key_of(rule.name)) or 0.0) for rule in RULES}
            found.append(MetricFamily("tepo_last_step_time_seconds", "gauge", "when the last step ended", [({}, recorded)]))
            found.append(MetricFamily("tepo_alert_active", "gauge", "1 while an alert is active", _labelled("alert", active)))
        plain = {key: value for key, value in record.items() if not key.startswith(key_of(""))}
        return found + of_step(plain)


def _labelled(label: str, values: Mapping[str, float]) -> list[tuple[Mapping[str, str], float]]:
    return [({label: name}, value) for name, value in values.items()]


def _of_engine(report: EngineReport) -> list[MetricFamily]:
    states: dict[str, float] = {state: float(sum(server.state == state for server in report.servers)) for state in STATES}
    restarts = {server.name: float(server.restarts) for server in report.servers}
    return [
        MetricFamily("tepo_servers", "gauge", "inference servers, by state", _labelled("state", states)),
        MetricFamily("tepo_requests_queued", "gauge", "requests that wait for a server", [({}, report.queued)]),
        MetricFamily("tepo_weights_version", "gauge", "version of the weights that are to be served", [({}, report.version)]),
        MetricFamily("tepo_server_restarts_total", "counter", "restarts of a server", _labelled("server", restarts)),
        MetricFamily(
            "tepo_server_answered",
            "gauge",
            "1 if this server's own metrics are below",
            _labelled("server", {server.name: float(server.name in report.texts) for server in report.servers}),
        ),
        *(
            MetricFamily(name, "gauge", text, _labelled("server", {server.name: value(server) for server in report.servers}))
            for name, (text, value) in _OF_A_SERVER.items()
        ),
    ]
