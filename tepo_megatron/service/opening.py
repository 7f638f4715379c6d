"""Open the rollout side of a run: load the prompts, start the engine and the graders, and log the setup of the run."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tepo_megatron.base.errors import DataError
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
from tepo_megatron.engines.engine import RolloutEngine
from tepo_megatron.engines.engines import beginning, build_engine, first_server_device, launch_of, replayed_routing
from tepo_megatron.evaluation.problems import load_benchmarks
from tepo_megatron.evaluation.run_evaluations import BenchmarkRuns, Evaluations
from tepo_megatron.monitor.metrics_server import KEY_FILE, serve_metrics
from tepo_megatron.monitor.sinks import RunLog
from tepo_megatron.rewards.build import build_reward
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.collector import Collector
from tepo_megatron.rollout.custom import open_sampler
from tepo_megatron.rollout.record import Replay
from tepo_megatron.service.live_metrics import LiveMetrics
from tepo_megatron.service.main_driver import MainDriver
from tepo_megatron.service.method import Method, resolve

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
