"""Open the rollout side of a run: load the prompts, start the engine and the graders, and log the setup of the run.

With it are opened the metrics of the run as Prometheus reads them: the last step's record, what happens now, and the servers'
own metrics.
"""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.records import is_evaluation
from tepo_megatron.config import Config, LoggingConfig, RolloutConfig, TrainingConfig
from tepo_megatron.config.megatron import untested_fields
from tepo_megatron.config.safety import checks_that_are_off, safety_checks
from tepo_megatron.data import (
    Data,
    PromptStream,
    decoder_file,
    load_data,
    load_tokenizer,
    stop_tokens,
    text_functions,
    tokenizer_digests,
)
from tepo_megatron.engines.engine import STATES, EngineReport, RolloutEngine, ServerReport
from tepo_megatron.engines.engines import beginning, build_engine, first_server_device, launch_of, replayed_routing
from tepo_megatron.evaluation.benchmarks import load_benchmarks
from tepo_megatron.evaluation.run_evaluations import BenchmarkRuns, Evaluations
from tepo_megatron.monitor.alerts import RULES, key_of
from tepo_megatron.monitor.metrics_server import KEY_FILE, as_text, merged, of_step, parsed, serve_metrics
from tepo_megatron.monitor.sinks import RunLog
from tepo_megatron.rewards.build import build_reward
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.collector import Collector, Progress
from tepo_megatron.rollout.containment import FAILURE_KINDS
from tepo_megatron.rollout.custom import open_sampler
from tepo_megatron.rollout.record import Replay
from tepo_megatron.service.main_driver import MainDriver
from tepo_megatron.service.method import Method, resolve

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


SERVER_LOG = "server.log"

EngineFactory = Callable[[Config], RolloutEngine]


@contextlib.contextmanager
def open_driver(cfg: Config, make_engine: EngineFactory | None = None) -> Iterator[MainDriver]:
    """Yield the driver. The engine starts loading at once, while the ranks build the actor."""
    rollout, run_dir, steps, ranks = cfg.rollout, cfg.run_dir, cfg.training.steps, cfg.parallel.world_size
    live_metrics = partial(LiveMetrics, cfg.name, rollout.engine, cfg.platform, cfg.objective.name, ranks, steps)
    served = partial(_served_metrics, cfg.logging, run_dir)
    method, tokenizer = resolve(cfg), load_tokenizer(cfg.model.path, run_dir)
    routing = replayed_routing(rollout, cfg.model.path, cfg.platform)
    evaluations = partial(Evaluations, cfg.evaluation, seed=cfg.seed, run_dir=run_dir, keep_best=cfg.checkpoint.keep_best)
    if rollout.replay is not None:
        with RunLog(run_dir, cfg.logging, steps) as log:
            log.message(f"objective {cfg.objective.name}; rollouts of {rollout.replay}, no engine")
            _log_lines(log, watch_line(run_dir), *untested_fields(cfg.megatron), *checks_that_are_off(safety_checks(cfg)))
            with served(log, live_metrics(None, None, dict)):
                yield MainDriver(cfg, Replay(Path(rollout.replay), routing), None, evaluations([], None), log)
        return
    encode, decode = text_functions(tokenizer)
    data = load_data(cfg.data, cfg.reward, tokenizer)
    stops = stop_tokens(cfg.model.path, tokenizer, rollout.stop_token_ids)
    suite = load_benchmarks(cfg.evaluation, tokenizer, cfg.data.max_prompt_tokens)
    benchmarks = BenchmarkRuns(suite, run_dir, cfg.model.path, cfg.seed, decode, stops) if suite else None
    _check_enough_prompts(data, cfg.data.name, rollout.prompts_per_step)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(RunLog(run_dir, cfg.logging, steps))
        log.message(f"objective {cfg.objective.name}, {ranks} {cfg.platform} ranks; {_sizes(data)}")
        _log_lines(log, watch_line(run_dir), *data.log_lines, *untested_fields(cfg.megatron))
        _log_lines(log, *method_lines(method, cfg.training, rollout))
        _log_lines(log, *checks_that_are_off(safety_checks(cfg)), *beginning(rollout, run_dir / SERVER_LOG))
        engine = stack.enter_context((make_engine or _build_engine)(cfg))
        if rollout.function is not None:
            log.message(f"each sample is made by {rollout.function}")
        sampler, sampler_events = stack.enter_context(
            open_sampler(
                engine,
                rollout.function,
                encode,
                decode,
                rollout.on_weight_update == "continue",
                limits=rollout.limits,
                chat=ChatFormat(tokenizer, encode, decode, cfg.data.template_kwargs),
            )
        )
        engine.start()
        texts = stack.enter_context(decoder_file(tokenizer))
        reward = stack.enter_context(build_reward(cfg.reward, decode, texts))
        stream = PromptStream.mixed(data.train, cfg.seed, cfg.data.shuffle)
        collector = Collector(
            rollout,
            sampler,
            reward,
            stream,
            cfg.seed,
            stops,
            max_generation_rounds=method.max_generation_rounds,
            overlong=method.overlong,
            routing=routing,
        )
        counts = partial(getattr, sampler, "total_counts", {})
        stack.enter_context(served(log, live_metrics(collector.progress, engine.report, counts)))
        evaluated = evaluations(data.eval[: cfg.evaluation.max_problems], benchmarks)
        yield MainDriver(cfg, collector, stream, evaluated, log, engine, sampler_events, tokenizer_digests(tokenizer))


@contextlib.contextmanager
def _served_metrics(cfg: LoggingConfig, run_dir: Path, log: RunLog, live: LiveMetrics) -> Iterator[None]:
    if cfg.metrics_port is None:
        yield
        return
    log.listener = live.record
    with serve_metrics(run_dir, cfg.metrics_host, cfg.metrics_port, live.text) as url:
        log.message(f"metrics for Prometheus: {url}, with the key in {run_dir / KEY_FILE}")
        yield


def _check_enough_prompts(data: Data, name: str, wanted: int) -> None:
    if data.count < wanted:
        raise DataError(
            f"{name} has {data.count} usable prompts, fewer than rollout.prompts_per_step={wanted}; lower that or add prompts"
        )


def _sizes(data: Data) -> str:
    return f"{data.count} prompts to train on, {len(data.eval)} to evaluate on"


def _log_lines(log: RunLog, *lines: str) -> None:
    for line in lines:
        log.message(line)


def watch_line(run_dir: Path) -> str:
    """Return the line that says how to see the run live."""
    return f"watch it: tepo watch {shlex.quote(str(run_dir))}"


def method_lines(method: Method, training: TrainingConfig, rollout: RolloutConfig) -> list[str]:
    """Return log lines about the method: stale responses without correction, and rounds of prompts."""
    lines = []
    if rollout.max_staleness and method.objective.correction.type == "none" and training.old_logprobs == "actor":
        lines.append(
            f"warning: rollout.max_staleness={rollout.max_staleness} trains on responses of older weights as if the newest had "
            "sampled them; set objective.correction (tis, sequence_mis, geometric_mask or icepop), or old_logprobs=rollout"
        )
    if method.max_generation_rounds > 1 or method.overlong:
        lines.append(f"rounds of prompts per step: up to {method.max_generation_rounds}; overlong shaping: {method.overlong}")
    return lines


def _build_engine(cfg: Config) -> RolloutEngine:
    launch = launch_of(
        cfg.model,
        cfg.rollout,
        cfg.sync,
        platform=cfg.platform,
        max_model_len=cfg.served_tokens,
        seed=cfg.seed,
        first_device=first_server_device(cfg.rollout, cfg.platform, cfg.parallel.world_size),
        counts=cfg.logging.metrics_port is not None,
    )
    return build_engine(cfg.rollout, launch, cfg.run_dir / SERVER_LOG)
