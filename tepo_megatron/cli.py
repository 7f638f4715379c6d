"""The `tepo` command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron import __version__
from tepo_megatron.errors import ConfigError, TepoError
from tepo_megatron.observability import run_dir
from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.run_lock import RunLock

if TYPE_CHECKING:  # heavy imports come later, where an interrupt is reported in one line
    from tepo_megatron.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, 1 after an error (reported in one message), 130 after an interrupt."""
    parser = argparse.ArgumentParser(prog="tepo", description="Token-level policy optimization on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "train",
        help="train as a config says",
        usage="tepo train CONFIG [--section.key VALUE ...]",
        epilog="Every key can be given, as --section.key VALUE; they are listed in docs/configuration.md.",
    )
    run.add_argument("config", metavar="CONFIG", help="a YAML file; start from examples/template.yaml")
    report = commands.add_parser(
        "report",
        help="a run as a page and a picture, finished or under way; several runs compared",
        epilog="Of one run: report.html and report.png in it. Of several: comparison.html beside the first, the baseline.",
    )
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the run's directory, runs/NAME")
    report.add_argument("--out", type=Path, metavar="FILE", help="where to write the comparison instead")
    ablation = commands.add_parser(
        "ablate",
        help="compare objectives: several runs and seeds from one base model",
        usage="tepo ablate FILE [--section.key VALUE ...]",
        epilog="Keys of FILE (--seeds '[0, 1]') change it; every other --section.key VALUE reaches every run.",
    )
    ablation.add_argument("file", metavar="FILE", help="a YAML file; start from examples/ablation.yaml")
    serving = commands.add_parser(
        "serve",
        help="keep the inference servers of a config for trainers on other machines",
        usage="tepo serve CONFIG [--host ADDRESS] [--address NAME] [--section.key VALUE ...]",
        epilog="The trainer finds them in the folder rollout.server.rendezvous.",
        allow_abbrev=False,
    )
    serving.add_argument("config", metavar="CONFIG", help="the trainer's YAML file")
    serving.add_argument("--host", default="127.0.0.1", help="the address to listen on, 0.0.0.0 for all (default: %(default)s)")
    serving.add_argument("--address", help="what other machines call it (default: the host, or this machine's name)")
    examination = commands.add_parser(
        "doctor",
        help="find out whether a config can run here, with one small step of it",
        usage="tepo doctor CONFIG [--quick] [--section.key VALUE ...]",
        allow_abbrev=False,
    )
    examination.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    examination.add_argument("--quick", action="store_true", help="start nothing: no ranks, no server, no step")
    evaluation = commands.add_parser(
        "evaluate",
        help="run a model on the paper's benchmarks",
        usage="tepo evaluate CHECKPOINT [--config FILE] [--out DIR] [--against DIR] [--published ROWS] [--key VALUE ...]",
        epilog="Which benchmarks, and where their files are: --evaluation.benchmarks '[aime24, amc]' "
        "--evaluation.benchmark_folder DIR. Files, settings and figures: docs/evaluation.md.",
        allow_abbrev=False,
    )
    evaluation.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a Hugging Face directory, a run, or a Megatron checkpoint"
    )
    evaluation.add_argument("--config", metavar="FILE", help="settings of engine, grading and evaluation, as of tepo train")
    evaluation.add_argument("--out", type=Path, metavar="DIR", help="for samples and results (default: in evaluations/)")
    evaluation.add_argument("--against", type=Path, metavar="DIR", help="another evaluation, to be compared problem by problem")
    evaluation.add_argument(
        "--published",
        default="auto",
        metavar="ROWS",
        help="rows of the paper to print beside it: the name of a model as it stands there, all, none, or auto: of the model "
        "that CHECKPOINT names (default: %(default)s)",
    )
    planning = commands.add_parser(
        "plan",
        help="memory and time of a config before any GPU is asked for, and the best layouts",
        usage="tepo plan CONFIG [--gpus N] [--gpu H100|H200|B200] [--section.key VALUE ...]",
        epilog="Exit status 1: the given layout does not fit. The model, its sources and its errors: docs/plan.md.",
        allow_abbrev=False,
    )
    planning.add_argument("config", metavar="CONFIG", help="the run's YAML file; of the model only config.json is read")
    planning.add_argument("--gpus", type=int, metavar="N", help="of trainer and engine together (default: what CONFIG takes)")
    planning.add_argument("--gpu", default="H100", help="which, in its SXM form (default: %(default)s)")
    planning.add_argument("--prompt", type=int, metavar="TOKENS", help="of a prompt on average")
    planning.add_argument("--response", type=int, metavar="TOKENS", help="of a response on average")
    planning.add_argument("--dropped", type=float, metavar="SHARE", help="of the groups that are all right or all wrong")
    planning.add_argument("--json", type=Path, metavar="FILE", help="write all of it there, too")
    comparison = commands.add_parser("compare", help="two evaluations, problem by problem")
    comparison.add_argument("first", type=Path, metavar="DIR", help="what tepo evaluate wrote")
    comparison.add_argument("second", type=Path, metavar="DIR", help="another, which is subtracted")
    words = list(sys.argv[1:] if argv is None else argv)
    takes_settings = bool(words) and words[0] in ("train", "ablate", "serve", "doctor", "evaluate", "plan")
    if takes_settings and len(words) > 1 and words[1].startswith("--") and words[1] != "--help":
        file, what = ("CHECKPOINT", "the checkpoint") if words[0] == "evaluate" else ("FILE", "the config file")
        parser.error(f"tepo {words[0]} {file} [--section.key VALUE ...]: {what} comes first")
    args, overrides = parser.parse_known_args(words)
    try:
        if args.command == "train":
            return train(args.config, overrides)
        if args.command == "serve":
            return serve(args.config, args.host, args.address, overrides)
        if args.command == "doctor":
            from tepo_megatron.config.io import load_config
            from tepo_megatron.doctor import doctor

            return doctor(load_config(args.config, overrides), preflight, start, args.quick)
        if args.command == "ablate":
            from tepo_megatron.ablation import ablate
            from tepo_megatron.launcher.launcher import inside_torchrun

            if inside_torchrun():
                raise ConfigError("tepo ablate starts the ranks of its runs itself; call it outside of torchrun")
            return ablate(args.file, overrides, preflight, start)
        if args.command == "evaluate":
            return evaluate(args, overrides)
        if args.command == "plan":
            return plan(args, overrides)
        if overrides:
            raise ConfigError(f"tepo {args.command} takes no {overrides[0]}")
        if args.command == "compare":
            from tepo_megatron.evaluation.comparing import compare_folders

            compare_folders(args.first, args.second).print()
            return 0
        print(escaped(str(report_on(args.run_dirs, args.out))))
        return 0
    except TepoError as e:
        print(f"tepo: error: {escaped(str(e))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        print(f"tepo: interrupted {e}".rstrip(), file=sys.stderr)
        return 130


def train(config_path: str, overrides: list[str]) -> int:
    """Run `tepo train CONFIG [--key value ...]`.

    Args:
        config_path: Path of the YAML file.
        overrides: The remaining arguments.
    """
    from tepo_megatron.config.io import load_with_sources
    from tepo_megatron.launcher.launcher import inside_torchrun, run_rank

    cfg, layers = load_with_sources(config_path, overrides)
    is_main = not inside_torchrun() or os.environ["RANK"] == "0"
    if run_dir.finished(cfg):
        if is_main:
            _tell_results(cfg)
        return 0
    if is_main:
        try:
            preflight(cfg)
        except ConfigError as e:
            where = layers.sources((), str(e))
            raise ConfigError(f"{', '.join(where)}: {e}") if where else e from None
    if inside_torchrun():
        with run_dir.claim(cfg) if is_main else contextlib.nullcontext():
            return run_rank(cfg)
    start(cfg)
    return 0


def serve(config_path: str, host: str, address: str | None, overrides: list[str]) -> int:
    """Run `tepo serve CONFIG [--host ADDRESS] [--address NAME] [--key value ...]`.

    Args:
        config_path: Path of the trainer's YAML file.
        host: Address to listen on.
        address: Name by which other machines reach this one; None: the host, or this machine's name.
        overrides: The remaining arguments.
    """
    from tepo_megatron.config.io import load_config
    from tepo_megatron.inference.servers.serve import serve
    from tepo_megatron.rollout.experts import check_experts
    from tepo_megatron.weights.hf_io import HfReader

    cfg = load_config(config_path, overrides)
    HfReader(cfg.model.path)
    check_experts(cfg)
    serve(cfg, host, address, lambda text: print(escaped(text), flush=True))
    return 0


def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo evaluate CHECKPOINT [--config FILE] [--out DIR] [--against DIR] [--published ROWS] [--key value ...]`.

    Args:
        args: The parsed options.
        overrides: The remaining arguments.
    """
    from tepo_megatron.evaluation.command import Request, run
    from tepo_megatron.evaluation.published import MODELS

    known = ("auto", "all", "none", *MODELS)
    if args.published not in known:
        raise ConfigError(f"--published {args.published}: the paper has no such rows; use one of {', '.join(known)}")
    request = Request(args.checkpoint, args.config, overrides, args.out, args.against, args.published)
    print("written:", run(request, lambda text: print(escaped(text), flush=True)))
    return 0


def plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo plan CONFIG [--gpus N] [--gpu NAME] [--prompt N] [--response N] [--dropped X] [--json FILE] [--key value ...]`.

    Args:
        args: The parsed options.
        overrides: The remaining arguments.
    """
    from tepo_megatron.config.io import load_config
    from tepo_megatron.plan.command import Request, plan

    for name in ("gpus", "prompt", "response"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: a positive number")
    if args.dropped is not None and not 0 <= args.dropped < 1:
        raise ConfigError(f"--dropped {args.dropped:g}: a share of at least 0 and below 1")
    request = Request(args.gpus, args.gpu, args.prompt, args.response, args.json, args.dropped)
    return plan(load_config(args.config, overrides), request, lambda text: print(escaped(text), flush=True))


def report_on(run_dirs: Sequence[Path], out: Path | None) -> Path:
    """Run `tepo report RUN_DIR [RUN_DIR ...] [--out FILE]`; return the page's path.

    Args:
        run_dirs: Folders of the runs; several are compared.
        out: File of the comparison; None: next to the first run. Only allowed with several runs.
    """
    from tepo_megatron.report import write_comparison, write_report

    if len(run_dirs) > 1:
        return write_comparison(run_dirs, out or run_dirs[0].absolute().parent / "comparison.html")
    if out is not None:
        raise ConfigError(f"--out {out}: the page of one run is written into its folder; name several runs, or leave it out")
    return write_report(run_dirs[0])


def _tell_results(cfg: Config) -> None:
    """Print the results of a finished run; write its page and picture if it was killed before it did."""
    folder, names = cfg.run_dir, ("summary.json", "report.html", "report.png", "hf")
    if not (folder / "report.png").exists():  # a run removes the picture before it writes its summary
        from tepo_megatron.report import write_report

        with RunLock(folder):
            write_report(folder)
    results = ", ".join(name for name in names if (folder / name).exists())
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    print(f"{escaped(str(folder))}: this run is finished, with {steps} steps; its results: {results}")
    early = steps < cfg.training.steps
    print(f"only {'--evaluation.patience null' if early else 'a higher training.steps'} makes it go on")


def start(cfg: Config) -> None:
    """Make one run, already checked by `preflight`, in processes of its own and wait for it.

    Raises a TepoError, which is also written to the run's log.txt.
    """
    from tepo_megatron.launcher.launcher import RanksFailed, launch

    with run_dir.claim(cfg) as lock:
        try:
            launch(cfg, inherit=[lock.file])
        except RanksFailed as e:
            if lock.holds():  # otherwise the folder belongs to another run, or is gone
                with contextlib.suppress(OSError), (cfg.run_dir / "log.txt").open("a") as log:  # the disk may be at fault
                    log.write(f"error: {escaped(str(e))}\n")
            raise


def preflight(cfg: Config) -> None:
    """Check everything that can be refused before a process is started. Raises a TepoError."""
    from tepo_megatron.actor.layout import check_layout
    from tepo_megatron.actor.precision import check_shapes
    from tepo_megatron.controller.method import resolve
    from tepo_megatron.evaluation.problems import check_sources
    from tepo_megatron.launcher.open_files import check_open_files
    from tepo_megatron.rewards import check_reward
    from tepo_megatron.rollout.custom import load_function
    from tepo_megatron.rollout.experts import check_experts, replayed_routing
    from tepo_megatron.weights.families import find_family, read_config
    from tepo_megatron.weights.families.tokens import check_tokenizer
    from tepo_megatron.weights.hf_io import HfReader

    check_open_files(cfg)
    resolve(cfg)
    check_sources(cfg.evaluation)
    if cfg.rollout.function is not None:
        load_function(cfg.rollout.function)
    check_reward(cfg.reward)
    hf_config = read_config(cfg.model.path)
    architecture = find_family(hf_config).architecture(hf_config)
    check_layout(architecture, cfg.parallel)
    check_shapes(architecture, cfg.model, cfg.parallel)
    check_experts(cfg)
    replayed_routing(cfg)
    check_tokenizer(cfg.model.path, architecture.vocab_size)
    HfReader(cfg.model.path)
    if cfg.model.reference is not None:
        hf_config = read_config(cfg.model.reference)
        if find_family(hf_config).architecture(hf_config) != architecture:
            raise ConfigError(
                f"model.reference={cfg.model.reference} has another architecture than model.path={cfg.model.path}"
            )
        HfReader(cfg.model.reference)


if __name__ == "__main__":
    sys.exit(main())
