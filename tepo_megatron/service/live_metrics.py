"""The metrics of a run as Prometheus reads them: the last step's record, what happens now, and the servers' own metrics."""

import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from tepo_megatron.base.records import is_evaluation
from tepo_megatron.engines.engine import STATES, EngineReport, ServerReport
from tepo_megatron.monitor.alerts import RULES, key_of
from tepo_megatron.monitor.metrics_server import as_text, merged, of_step, parsed
from tepo_megatron.rollout.collector import Progress
from tepo_megatron.rollout.containment import FAILURE_KINDS

# Limit since a request of Prometheus, which waits 10 s: servers answer in milliseconds; then without their metrics
SERVER_SECONDS = 2.0
Counts = Callable[[], Mapping[str, int]]
_Kind = TypeVar("_Kind", GaugeMetricFamily, CounterMetricFamily)
# gauge of a server -> its meaning, and its value
_OF_A_SERVER: dict[str, tuple[str, Callable[[ServerReport], float]]] = {
    "tepo_server_requests_in_flight": ("requests in flight on a server", lambda one: one.in_flight),
    "tepo_server_weights_version": ("version of the weights that a server has; below 0: of no step", lambda one: one.version),
}


class LiveMetrics:
    """The metrics of a run at any moment. `record` and `text` may be called by different threads.

    `report`: see `Lifecycle.report`; None without an engine.
    """

    def __init__(
        self,
        run: str,
        engine_name: str,
        platform: str,
        objective: str,
        ranks: int,
        steps: int,
        progress: Progress | None,
        report: Callable[[float], EngineReport] | None,
        counts: Counts,
    ) -> None:
        self._progress, self._report, self._counts = progress, report, counts
        self._started, self._lock = time.time(), threading.Lock()
        self._record: Mapping[str, float | None] = {}
        self._evaluation: Mapping[str, float | None] = {}
        self._step, self._recorded = 0, 0.0
        self._lost = dict.fromkeys(FAILURE_KINDS, 0.0)
        facts = {"run": run, "engine": engine_name, "platform": platform, "objective": objective}
        self._fixed = [
            InfoMetricFamily("tepo_run", "always 1; the labels describe the run", facts),
            GaugeMetricFamily("tepo_ranks", "ranks that train", ranks),
            GaugeMetricFamily("tepo_steps", "steps of the whole run", steps),
        ]

    def record(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take over the record of a step or of an evaluation."""
        with self._lock:
            if is_evaluation(values):
                self._evaluation = dict(values)
                return
            self._step, self._record, self._recorded = step, dict(values), time.time()
            for kind in self._lost:
                self._lost[kind] += values.get(f"rollout/samples_{kind}") or 0.0

    def text(self) -> str:
        """Return all metrics as text. A server that does not answer is left out of it."""
        shown = [*self._fixed, *self._now()]
        if self._report is not None:
            report = self._report(SERVER_SECONDS)
            servers = {name: metrics for name, text in report.texts.items() if (metrics := parsed(text))}
            shown += [*_of_engine(report, servers), *merged(servers)]
        return as_text(shown)

    def _now(self) -> list[Metric]:
        with self._lock:
            step, record, recorded, lost = self._step, self._record, self._recorded, dict(self._lost)
            evaluation = self._evaluation
        metrics = [
            GaugeMetricFamily("tepo_step", "number of the last step", step),
            GaugeMetricFamily("tepo_start_time_seconds", "when the rollout service started, Unix time", self._started),
            _labelled(CounterMetricFamily, "tepo_samples_lost", "samples lost since the start, by reason", "reason", lost),
            _labelled(CounterMetricFamily, "tepo_gateway_events", "events of agents' samples", "event", self._counts()),
        ]
        if self._progress is not None:
            done, wanted = self._progress.useful, self._progress.wanted
            metrics.append(GaugeMetricFamily("tepo_groups_done", "groups of the present batch that are complete", done))
            metrics.append(GaugeMetricFamily("tepo_groups_wanted", "groups that the present batch needs", wanted))
        if recorded:
            active = {rule.name: float(record.get(key_of(rule.name)) or 0.0) for rule in RULES}
            metrics.append(GaugeMetricFamily("tepo_last_step_time_seconds", "when the last step ended", recorded))
            metrics.append(_labelled(GaugeMetricFamily, "tepo_alert_active", "1 while an alert is active", "alert", active))
        plain = {key: value for key, value in record.items() if not key.startswith(key_of(""))}
        return metrics + of_step({**plain, **evaluation})


def _labelled(kind: type[_Kind], name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = kind(name, text, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric


def _of_engine(report: EngineReport, answered: Container[str]) -> list[Metric]:
    states: dict[str, float] = {state: sum(server.state == state for server in report.servers) for state in STATES}
    restarts = {server.name: server.restarts for server in report.servers}
    answers = {server.name: float(server.name in answered) for server in report.servers}
    return [
        _labelled(GaugeMetricFamily, "tepo_servers", "inference servers, by state", "state", states),
        GaugeMetricFamily("tepo_requests_queued", "requests that wait for a server", report.queued),
        GaugeMetricFamily("tepo_weights_version", "version of the weights that are to be served", report.version),
        _labelled(CounterMetricFamily, "tepo_server_restarts", "restarts of a server", "server", restarts),
        _labelled(GaugeMetricFamily, "tepo_server_answered", "1 if this server's own metrics are below", "server", answers),
        *(
            _labelled(GaugeMetricFamily, name, text, "server", {server.name: value(server) for server in report.servers})
            for name, (text, value) in _OF_A_SERVER.items()
        ),
    ]
