"""The commands of `tepo`, whose words `parsers.py` parses. Each returns its exit status and prints for the user.

Heavy modules are imported inside of the functions, so that a command starts quickly and an interrupt is reported in one line.
"""

import argparse
import json
from typing import TYPE_CHECKING

from tepo_megatron.base.errors import ConfigError, escaped
from tepo_megatron.monitor import run_dir

if TYPE_CHECKING:
    from tepo_megatron.command.launcher import Nodes


def doctor(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo doctor CONFIG [--quick] [--key value ...]`."""
    from tepo_megatron.command.launcher import launch
    from tepo_megatron.command.start import preflight, start
    from tepo_megatron.config.io import load_config
    from tepo_megatron.doctor.examine import examine, print_findings

    return print_findings(examine(load_config(args.config, overrides), preflight, start, launch, args.quick))


def ablate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo ablate FILE [--key value ...]`."""
    from tepo_megatron.command.start import preflight, start
    from tepo_megatron.report.ablation.ablate import ablate

    return ablate(args.file, overrides, preflight, start)


def compare(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo compare DIR DIR`."""
    from tepo_megatron.evaluation.folder import compare_folders

    compare_folders(args.first, args.second).print()
    return 0


def audit(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo audit RUN_DIR --step K [--token SEQUENCE:POSITION]`."""
    from tepo_megatron.report.audit.tables import print_audit

    return print_audit(args.run_dir, args.step, args.token)


def replay(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo replay RUN_DIR [--until STEP] [--engine] [--name NAME] [--key value ...]`."""
    from tepo_megatron.command.replay import ReplayRequest, replay

    request = ReplayRequest(args.run_dir, args.until, args.engine, args.name, tuple(overrides))
    return replay(request, lambda text: print(escaped(text), flush=True))


def trace(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo trace RUN_DIR [--steps N] [--profile RANK] [--wait SECONDS]`, or `tepo trace RUN_DIR --step K`."""
    from tepo_megatron.base.save_requests import TraceRequest
    from tepo_megatron.command.trace_request import describe_step, trace

    if args.step is not None:
        if (args.steps, args.profile) != (1, None):
            raise ConfigError("--step describes a step that was traced; --steps and --profile ask for the next ones")
        for line in describe_step(args.run_dir, args.step):
            print(escaped(line))
        return 0
    if args.wait <= 0:
        raise ConfigError(f"--wait {args.wait:g}: a positive number of seconds")
    print(escaped(trace(args.run_dir, TraceRequest(args.steps, args.profile), args.wait)))
    return 0


def report(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo report RUN_DIR [RUN_DIR ...] [--out FILE]`. The page of several runs is written next to the first one."""
    from tepo_megatron.report.write import write_comparison, write_report

    first, several = args.run_dirs[0], len(args.run_dirs) > 1
    if args.out is not None and not several:
        raise ConfigError(
            f"--out {args.out}: the page of one run is written into its folder; name several runs, or leave it out"
        )
    comparison = args.out or first.absolute().parent / "comparison.html"
    print(escaped(str(write_comparison(args.run_dirs, comparison) if several else write_report(first))))
    return 0


def alerts(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo alerts RUN_DIR [RUN_DIR ...]`. Return 1 if there is an alert."""
    from tepo_megatron.monitor.alerts import judge
    from tepo_megatron.monitor.sinks import read_metrics

    any_raised = False
    for folder in args.run_dirs:
        records = [(int(record["step"] or 0), record) for record in read_metrics(folder)]
        raised = judge(records)
        any_raised |= bool(raised)
        print(escaped(f"{folder}: {len(raised)} alert{'s' * (len(raised) != 1)} in {len(records)} steps"))
        for alert in raised:
            print(escaped(f"  {alert.message}"))
    return int(any_raised)


def watch(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo watch RUN_DIR [RUN_DIR ...] [--port N]`."""
    from tepo_megatron.report.live import watch

    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port {args.port}: a number from 0 to 65535")
    watch(args.run_dirs, args.port, lambda text: print(escaped(text), flush=True))
    return 0


def train(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo train CONFIG [--watch] [--nnodes N ...] [--key value ...]`."""
    from tepo_megatron.command.start import preflight, start
    from tepo_megatron.config.io import load_with_sources

    cfg, layers = load_with_sources(args.config, overrides)
    nodes = _nodes(args)
    if run_dir.finished(cfg):
        if nodes.is_first:
            from tepo_megatron.report.write import print_results

            print_results(cfg.run_dir, cfg.training.steps)
        return 0
    if nodes.is_first:
        try:
            preflight(cfg)
        except ConfigError as e:
            where = layers.sources((), str(e))
            raise ConfigError(f"{', '.join(where)}: {e}") if where else e from None
    start(cfg, watched=args.watch, nodes=nodes)
    return 0


def resume(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo resume RUN_DIR [--watch] [--nnodes N ...] [--key value ...]`."""
    from tepo_megatron.command.start import announcement, config_of, words_of
    from tepo_megatron.config.io import load_config
    from tepo_megatron.trainer.sft.settings import is_supervised

    args.config = config_of(args.run_dir)
    words = words_of(args.run_dir, overrides)
    cfg = load_config(args.config, words)
    if _nodes(args).is_first and not run_dir.finished(cfg):
        for line in announcement(args.run_dir, words):
            print(escaped(line), flush=True)
    return sft(args, words) if is_supervised(cfg.sft, cfg.data) else train(args, words)


def sft(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo sft CONFIG [--nnodes N ...] [--key value ...]`."""
    from tepo_megatron.command.start import preflight, start
    from tepo_megatron.config.io import with_overrides
    from tepo_megatron.data.sources import check_readable
    from tepo_megatron.trainer.sft.settings import read_tree

    nodes = _nodes(args)
    cfg = with_overrides(read_tree(args.config, overrides), [], args.config)
    if nodes.is_first:
        for source in filter(None, (cfg.sft.data, cfg.sft.eval)):
            check_readable(source)
        preflight(cfg, {"sft.max_tokens": cfg.sft.max_tokens})
    start(cfg, worker="tepo_megatron.trainer.sft.worker", nodes=nodes)
    print(escaped(f"fine-tuned model: {cfg.run_dir / 'hf'}" if cfg.export_hf else f"finished: {cfg.run_dir}"), flush=True)
    return 0


def _nodes(args: argparse.Namespace) -> "Nodes":
    from tepo_megatron.command.launcher import Nodes

    return Nodes(args.nnodes, args.node_rank, args.rdzv_endpoint, args.rdzv_id)


def serve(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo serve CONFIG [--host ADDRESS] [--address NAME] [--key value ...]`."""
    from tepo_megatron.config.io import load_config
    from tepo_megatron.engines.engines import check_experts, launch_of
    from tepo_megatron.engines.servers.serve import serve
    from tepo_megatron.models.hf_io import HfReader

    cfg = load_config(args.config, overrides)
    HfReader(cfg.model.path)
    check_experts(cfg.rollout, cfg.model.path)
    launch = launch_of(
        cfg.model,
        cfg.rollout,
        cfg.sync,
        platform=cfg.platform,
        max_model_len=cfg.served_tokens,
        seed=cfg.seed,
        host=args.host,
        counts=cfg.logging.metrics_port is not None,
    )
    serve(cfg.rollout, launch, args.address, lambda text: print(escaped(text), flush=True))
    return 0


def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo evaluate CHECKPOINT [--data FILE ...] [--reward FILE.py:NAME] [--config FILE] [--out DIR] [...]`."""
    from tepo_megatron.evaluation.benchmarks import MODELS
    from tepo_megatron.evaluation.command import EvaluationRequest, run

    known = ("auto", "all", "none", *MODELS)
    if args.published not in known:
        raise ConfigError(f"--published {args.published}: the paper has no such rows; use one of {', '.join(known)}")
    if args.reward is not None:
        overrides = ["--reward.terms", json.dumps([{"type": "custom", "function": args.reward}]), *overrides]
    request = EvaluationRequest(args.checkpoint, args.config, overrides, args.out, args.against, args.published, args.data)
    print("written:", run(request, lambda text: print(escaped(text), flush=True)))
    return 0


def plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo plan CONFIG [--from RUN] [--gpus N] [--gpu NAME] [--json FILE] [--key value ...]`."""
    from tepo_megatron.config.io import load_config
    from tepo_megatron.doctor.plan.command import PlanRequest, plan, predictor_of

    for name in ("gpus", "prompt", "response"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: a positive number")
    if args.dropped is not None and not 0 <= args.dropped < 1:
        raise ConfigError(f"--dropped {args.dropped:g}: a share of at least 0 and below 1")
    request = PlanRequest(args.gpus, args.gpu, args.prompt, args.response, args.json, args.dropped, args.run_dir)
    predictor = predictor_of(load_config(args.config, overrides), request)
    return plan(predictor, request, lambda text: print(escaped(text), flush=True))
