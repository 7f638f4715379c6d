"""The `tepo` command."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron import __version__
from tepo_megatron.errors import ConfigError, RunStopped, TepoError
from tepo_megatron.observability import run_dir
from tepo_megatron.utils.escaping import escaped

COMMANDS_WITH_KEYS = ("train", "replay", "ablate", "serve", "doctor", "evaluate", "plan")  # they take --section.key VALUE
Commands = argparse._SubParsersAction


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    Returns:
        0, 1 after an error (reported in one message), 75 if the run was asked to end and is saved, 130 after an interrupt.
    """
    parser = argparse.ArgumentParser(prog="tepo", description="Token-level policy optimization on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (
        _add_train, _add_replay, _add_report, _add_audit, _add_ablate, _add_serve, _add_doctor, _add_evaluate, _add_plan,
        _add_compare,
    ):  # fmt: skip
        add(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) > 1 and words[0] in COMMANDS_WITH_KEYS and words[1].startswith("--") and words[1] != "--help":
        file, what = ("CHECKPOINT", "the checkpoint") if words[0] == "evaluate" else ("FILE", "the config file")
        parser.error(f"tepo {words[0]} {file} [--section.key VALUE ...]: {what} comes first")
    args, overrides = parser.parse_known_args(words)
    try:
        if overrides and args.command not in COMMANDS_WITH_KEYS:
            raise ConfigError(f"tepo {args.command} takes no {overrides[0]}")
        return args.run(args, overrides)
    except RunStopped as e:
        print(f"tepo: {escaped(str(e))}", file=sys.stderr)
        return os.EX_TEMPFAIL
    except TepoError as e:
        print(f"tepo: error: {escaped(str(e))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        if args.command not in ("plan", "audit"):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough, such as `head`
        return 0
    except KeyboardInterrupt as e:
        print(f"tepo: interrupted {e}".rstrip(), file=sys.stderr)
        return 130


def _add_train(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train as a config says",
        usage="tepo train CONFIG [--section.key VALUE ...]",
        epilog="Every key can be given, as --section.key VALUE; they are listed in docs/configuration.md.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; start from examples/template.yaml")
    parser.set_defaults(run=lambda args, overrides: train(args.config, overrides))


def _add_replay(commands: Commands) -> None:
    text = "repeat the training of a run, and say where it comes out differently; 1: it does (docs/rollouts.md)"
    usage = "tepo replay RUN_DIR [--until STEP] [--engine] [--name NAME] [--section.key VALUE ...]"
    parser = commands.add_parser("replay", help=text, usage=usage, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--until", type=int, metavar="STEP", help="the last step to repeat (default: the last that was taken)")
    parser.add_argument("--engine", action="store_true", help="sample again, instead of using the run's recordings")
    parser.add_argument("--name", help="name of the new run, next to the run (default: NAME-replay)")
    parser.set_defaults(run=_replay)


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="show a run, finished or not, as a page and a picture; compare several runs",
        epilog="One run: writes report.html and report.png into its folder. Several runs: writes comparison.html next to the "
        "first run, the baseline.",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the comparison instead")
    parser.set_defaults(run=_report)


def _add_ablate(commands: Commands) -> None:
    parser = commands.add_parser(
        "ablate",
        help="compare objectives: several runs and seeds from one base model",
        usage="tepo ablate FILE [--section.key VALUE ...]",
        epilog="Keys of FILE (--seeds '[0, 1]') change it; every other --section.key VALUE reaches every run.",
    )
    parser.add_argument("file", metavar="FILE", help="a YAML file; start from examples/ablation.yaml")
    parser.set_defaults(run=_ablate)


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="keep the inference servers of a config for trainers on other machines",
        usage="tepo serve CONFIG [--host ADDRESS] [--address NAME] [--section.key VALUE ...]",
        epilog="The trainer finds them in the folder rollout.server.rendezvous.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="the trainer's YAML file")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on, 0.0.0.0 for all (default: %(default)s)")
    parser.add_argument("--address", help="name by which other machines reach it (default: the host, or this machine's name)")
    parser.set_defaults(run=lambda args, overrides: serve(args.config, args.host, args.address, overrides))


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out whether a config can run here, with one small step of it",
        usage="tepo doctor CONFIG [--quick] [--section.key VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("--quick", action="store_true", help="start nothing: no ranks, no server, no step")
    parser.set_defaults(run=_doctor)


def _add_evaluate(commands: Commands) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="run a model on the paper's benchmarks",
        usage="tepo evaluate CHECKPOINT [--config FILE] [--out DIR] [--against DIR] [--published ROWS] [--key VALUE ...]",
        epilog="Which benchmarks, and where their files are: --evaluation.benchmarks '[aime24, amc]' "
        "--evaluation.benchmark_folder DIR. Files, settings and figures: docs/evaluation.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a Hugging Face directory, a run, or a Megatron checkpoint"
    )
    parser.add_argument("--config", metavar="FILE", help="settings of engine, grading and evaluation, as for tepo train")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for samples and results (default: in evaluations/)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another evaluation, to be compared problem by problem")
    parser.add_argument(
        "--published",
        default="auto",
        metavar="ROWS",
        help="rows of the paper to print next to the results: the name of a model in the paper, all, none, or auto: the model "
        "that CHECKPOINT names (default: %(default)s)",
    )
    parser.set_defaults(run=evaluate)


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory and time of a config before any GPU is requested, and list the best layouts",
        usage="tepo plan CONFIG [--gpus N] [--gpu H100|H200|B200] [--section.key VALUE ...]",
        epilog="Exit status 1: the given layout does not fit. The model, its sources and its errors: docs/plan.md.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file; of the model only config.json is read")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of trainer and engine together (default: as many as CONFIG needs)"
    )
    parser.add_argument("--gpu", default="H100", help="type of the GPUs, SXM form (default: %(default)s)")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="mean tokens of a prompt")
    parser.add_argument("--response", type=int, metavar="TOKENS", help="mean tokens of a response")
    parser.add_argument("--dropped", type=float, metavar="SHARE", help="share of the groups that are all right or all wrong")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.set_defaults(run=plan)


def _add_compare(commands: Commands) -> None:
    parser = commands.add_parser("compare", help="compare two evaluations, problem by problem")
    parser.add_argument("first", type=Path, metavar="DIR", help="folder that tepo evaluate wrote")
    parser.add_argument("second", type=Path, metavar="DIR", help="folder of the evaluation that is subtracted")
    parser.set_defaults(run=_compare)


def _add_audit(commands: Commands) -> None:
    text = "compute each token's loss again in fp64, and compare it with what training used; 1: it differs (docs/audit.md)"
    parser = commands.add_parser("audit", help=text)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="a recorded step")
    parser.add_argument(
        "--token", metavar="SEQUENCE:POSITION", help="show one token: index of the sequence in the step, and of the token in it"
    )
    parser.set_defaults(run=_audit)


def _doctor(args: argparse.Namespace, overrides: list[str]) -> int:
    from tepo_megatron.config.io import load_config
    from tepo_megatron.doctor import examine, print_findings
    from tepo_megatron.launcher.launcher import launch
    from tepo_megatron.launcher.start import preflight, start

    return print_findings(examine(load_config(args.config, overrides), preflight, start, launch, args.quick))


def _ablate(args: argparse.Namespace, overrides: list[str]) -> int:
    from tepo_megatron.ablation import ablate
    from tepo_megatron.launcher.launcher import inside_torchrun
    from tepo_megatron.launcher.start import preflight, start

    if inside_torchrun():
        raise ConfigError("tepo ablate starts the ranks of its runs itself; call it outside of torchrun")
    return ablate(args.file, overrides, preflight, start)


def _compare(args: argparse.Namespace, overrides: list[str]) -> int:
    from tepo_megatron.evaluation.comparing import compare_folders

    compare_folders(args.first, args.second).print()
    return 0


def _audit(args: argparse.Namespace, overrides: list[str]) -> int:
    from tepo_megatron.audit.command import print_audit

    return print_audit(args.run_dir, args.step, args.token)


def _replay(args: argparse.Namespace, overrides: list[str]) -> int:
    from tepo_megatron.launcher.replay import ReplayRequest, replay

    request = ReplayRequest(args.run_dir, args.until, args.engine, args.name, tuple(overrides))
    return replay(request, lambda text: print(escaped(text), flush=True))


def _report(args: argparse.Namespace, overrides: list[str]) -> int:
    print(escaped(str(report_on(args.run_dirs, args.out))))
    return 0


def train(config_path: str, overrides: list[str]) -> int:
    """Run `tepo train CONFIG [--key value ...]`.

    Args:
        config_path: Path of the YAML file.
        overrides: The remaining arguments.
    """
    from tepo_megatron.config.io import load_with_sources
    from tepo_megatron.launcher.launcher import inside_torchrun, run_rank
    from tepo_megatron.launcher.start import preflight, service_holds_folder, start
    from tepo_megatron.utils.supervisor import is_restart

    again = ["--resume", "true", "--overwrite", "false"] if is_restart() else []
    cfg, layers = load_with_sources(config_path, [*overrides, *again])
    is_main = not inside_torchrun() or os.environ["RANK"] == "0"
    if run_dir.finished(cfg):
        if is_main:
            from tepo_megatron.report.finished import print_results

            print_results(cfg.run_dir, cfg.training.steps)
        return 0
    if is_main and not is_restart():
        try:
            preflight(cfg)
        except ConfigError as e:
            where = layers.sources((), str(e))
            raise ConfigError(f"{', '.join(where)}: {e}") if where else e from None
    if inside_torchrun():
        with run_dir.claim(cfg) if is_main and not service_holds_folder() else contextlib.nullcontext():
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
    from tepo_megatron.inference.engines import launch_of
    from tepo_megatron.inference.servers.serve import serve
    from tepo_megatron.rollout.experts import check_experts
    from tepo_megatron.weights.hf_io import HfReader

    cfg = load_config(config_path, overrides)
    HfReader(cfg.model.path)
    check_experts(cfg.rollout, cfg.model.path)
    sections = (cfg.model, cfg.rollout, cfg.sync)
    launch = launch_of(*sections, platform=cfg.platform, max_model_len=cfg.served_tokens, seed=cfg.seed, host=host)
    serve(cfg.name, cfg.rollout, launch, address, lambda text: print(escaped(text), flush=True))
    return 0


def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo evaluate CHECKPOINT [--config FILE] [--out DIR] [--against DIR] [--published ROWS] [--key value ...]`.

    Args:
        args: The parsed options.
        overrides: The remaining arguments.
    """
    from tepo_megatron.evaluation.command import EvaluationRequest, run
    from tepo_megatron.evaluation.published import MODELS

    known = ("auto", "all", "none", *MODELS)
    if args.published not in known:
        raise ConfigError(f"--published {args.published}: the paper has no such rows; use one of {', '.join(known)}")
    request = EvaluationRequest(args.checkpoint, args.config, overrides, args.out, args.against, args.published)
    print("written:", run(request, lambda text: print(escaped(text), flush=True)))
    return 0


def plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `tepo plan CONFIG [--gpus N] [--gpu NAME] [--prompt N] [--response N] [--dropped X] [--json FILE] [--key value ...]`.

    Args:
        args: The parsed options.
        overrides: The remaining arguments.
    """
    from tepo_megatron.config.io import load_config
    from tepo_megatron.plan.command import PlanRequest, plan, predictor_of

    for name in ("gpus", "prompt", "response"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: a positive number")
    if args.dropped is not None and not 0 <= args.dropped < 1:
        raise ConfigError(f"--dropped {args.dropped:g}: a share of at least 0 and below 1")
    request = PlanRequest(args.gpus, args.gpu, args.prompt, args.response, args.json, args.dropped)
    predictor = predictor_of(load_config(args.config, overrides), request)
    return plan(predictor, request, lambda text: print(escaped(text), flush=True))


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


if __name__ == "__main__":
    sys.exit(main())
