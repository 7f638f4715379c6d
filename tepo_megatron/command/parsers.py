"""Parse the words of the `tepo` command and run it. Errors become one message and an exit status."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron import __version__
from tepo_megatron.base.errors import ConfigError, RunStopped, TepoError, escaped
from tepo_megatron.base.scratch import home
from tepo_megatron.command import commands
from tepo_megatron.monitor import run_dir

# They take --section.key VALUE.
COMMANDS_WITH_KEYS = ("train", "resume", "sft", "replay", "ablate", "serve", "doctor", "evaluate", "plan")
_RUN = ("RUN_DIR", "the run's directory")
_FIRST_WORDS = {"resume": _RUN, "replay": _RUN, "evaluate": ("CHECKPOINT", "the checkpoint")}
Subparsers = argparse._SubParsersAction


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    Returns:
        0, 1 after an error (reported in one message), 75 if the run was asked to end and is saved, 130 after an interrupt.
    """
    parser = argparse.ArgumentParser(prog="tepo", description="Token-level policy optimization on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for add in (
        _add_train, _add_resume, _add_sft, _add_replay, _add_report, _add_watch, _add_alerts, _add_trace, _add_audit,
        _add_ablate, _add_serve, _add_doctor, _add_evaluate, _add_plan, _add_compare,
    ):  # fmt: skip
        add(subparsers)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:2] == ["plan", "--from"] and len(words) > 2:  # the run's own config is planned
        words.insert(1, str(Path(words[2]) / run_dir.CONFIG_FILE))
    if len(words) > 1 and words[0] in COMMANDS_WITH_KEYS and words[1].startswith("--") and words[1] != "--help":
        file, what = _FIRST_WORDS.get(words[0], ("FILE", "the config file"))
        parser.error(f"tepo {words[0]} {file} [--section.key VALUE ...]: {what} comes first")
    args, overrides = parser.parse_known_args(words)
    try:
        _refuse_unknown_options(subparsers.choices[args.command], overrides, args.command in COMMANDS_WITH_KEYS)
        with home():
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


def _refuse_unknown_options(parser: argparse.ArgumentParser, words: Sequence[str], takes_keys: bool) -> None:
    """Raise ConfigError for a word that is no option of the command, unless it may be a key of the config."""
    options = [option for action in parser._actions for option in action.option_strings]
    for word in (word.partition("=")[0] for word in words):
        if takes_keys and ("." in word or not word.startswith("--")):
            continue
        close = difflib.get_close_matches(word, options, n=1, cutoff=0.8 if takes_keys else 0.6)
        if close or not takes_keys:
            raise ConfigError(f"{parser.prog} takes no {word}" + (f"; did you mean {close[0]}?" if close else ""))


def _add_train(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train as a config says",
        usage="tepo train CONFIG [--watch] [--nnodes N --node-rank I --rdzv-endpoint HOST:PORT] [--section.key VALUE ...]",
        epilog="Every key can be given, as --section.key VALUE; they are listed in docs/configuration.md.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; start from examples/template.yaml")
    _add_watch_and_nodes(parser)
    parser.set_defaults(run=commands.train)


def _add_resume(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "resume",
        help="go on with a run under its own config, with the given keys changed",
        usage="tepo resume RUN_DIR [--watch] [--nnodes N --node-rank I --rdzv-endpoint HOST:PORT] [--section.key VALUE ...]",
        epilog="From the newest checkpoint whose every byte is as it was (docs/faults.md).",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    _add_watch_and_nodes(parser)
    parser.set_defaults(run=commands.resume)


def _add_watch_and_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="serve the live page, and print its URL (docs/watch.md)")
    _add_nodes(parser)


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("several machines: start this command on each (docs/rollouts.md)")
    options.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of machines with ranks")
    options.add_argument("--node-rank", type=int, default=0, metavar="I", help="index of this machine, from 0")
    options.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where the first machine listens")
    options.add_argument("--rdzv-id", default="none", metavar="ID", help="a name that no earlier start of this run has used")


def _add_sft(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "sft",
        help="fine-tune on conversations, before RL, with the model and layout of a training config",
        usage="tepo sft CONFIG --sft.data FILE [--nnodes N --node-rank I --rdzv-endpoint HOST:PORT] [--section.key VALUE ...]",
        epilog="Rows with a chat, or with a prompt and a response; all keys: section sft of docs/configuration.md.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, as for tepo train; data.train may be missing")
    _add_nodes(parser)
    parser.set_defaults(run=commands.sft)


def _add_replay(subparsers: Subparsers) -> None:
    text = "repeat the training of a run, and say where it comes out differently; 1: it does (docs/rollouts.md)"
    usage = "tepo replay RUN_DIR [--until STEP] [--engine] [--name NAME] [--section.key VALUE ...]"
    parser = subparsers.add_parser("replay", help=text, usage=usage, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--until", type=int, metavar="STEP", help="the last step to repeat (default: the last that was taken)")
    parser.add_argument("--engine", action="store_true", help="sample again, instead of using the run's recordings")
    parser.add_argument("--name", help="name of the new run, next to the run (default: NAME-replay)")
    parser.set_defaults(run=commands.replay)


def _add_trace(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="write the timeline of the next step of a run for ui.perfetto.dev (docs/traces.md)",
        usage="tepo trace RUN_DIR [--steps N] [--profile RANK] [--wait SECONDS] | tepo trace RUN_DIR --step K",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="consecutive steps to trace (default: %(default)s)")
    parser.add_argument("--profile", type=int, metavar="RANK", help="also have torch's profiler record this rank")
    parser.add_argument("--step", type=int, metavar="K", help="describe the trace of this step, and merge it if it is in parts")
    parser.add_argument(
        "--wait", type=float, default=3600.0, metavar="SECONDS", help="limit of the wait for the trace (default: %(default)g)"
    )
    parser.set_defaults(run=commands.trace)


def _add_report(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="show a run, finished or not, as a page and a picture; compare several runs",
        epilog="One run: writes report.html and report.png into its folder. Several runs: writes comparison.html next to the "
        "first run, the baseline.",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the comparison instead")
    parser.set_defaults(run=commands.report)


def _add_alerts(subparsers: Subparsers) -> None:
    text = "say what goes wrong in a run, finished or not, and what to do; 1: something does (docs/alerts.md)"
    parser = subparsers.add_parser("alerts", help=text)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.set_defaults(run=commands.alerts)


def _add_ablate(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "ablate",
        help="compare objectives: several runs and seeds from one base model",
        usage="tepo ablate FILE [--section.key VALUE ...]",
        epilog="Keys of FILE (--seeds '[0, 1]') change it; every other --section.key VALUE reaches every run.",
    )
    parser.add_argument("file", metavar="FILE", help="a YAML file; start from examples/ablation.yaml")
    parser.set_defaults(run=commands.ablate)


def _add_serve(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="keep the inference servers of a config for trainers on other machines",
        usage="tepo serve CONFIG [--host ADDRESS] [--address NAME] [--section.key VALUE ...]",
        epilog="The trainer finds them in the folder rollout.server.rendezvous.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="the trainer's YAML file")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on, 0.0.0.0 for all (default: %(default)s)")
    parser.add_argument("--address", help="name by which other machines reach it (default: the host, or this machine's name)")
    parser.set_defaults(run=commands.serve)


def _add_doctor(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="find out whether a config can run here, with one small step of it",
        usage="tepo doctor CONFIG [--quick] [--section.key VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("--quick", action="store_true", help="start nothing: no ranks, no server, no step")
    parser.set_defaults(run=commands.doctor)


def _add_evaluate(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="run a model on the paper's benchmarks, or on files of yours",
        usage="tepo evaluate CHECKPOINT [--data FILE ...] [--reward FILE.py:NAME] [--config FILE] [--out DIR] [--against DIR] "
        "[--published ROWS] [--key VALUE ...]",
        epilog="Which benchmarks, and where their files are: --evaluation.benchmarks '[aime24, amc]' "
        "--evaluation.benchmark_folder DIR. Files, settings and figures: docs/evaluation.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a Hugging Face directory, a run, or a Megatron checkpoint"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="a file or dataset, written as data.eval, in place of the benchmarks; reward.terms grade it. May be repeated",
    )
    parser.add_argument("--reward", metavar="FILE.py:NAME", help="a function of yours that grades instead of reward.terms")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings of engine, grading and evaluation, as for tepo train (with --data default: those of CHECKPOINT's run)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for samples and results (default: in evaluations/)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another evaluation, to be compared problem by problem")
    parser.add_argument(
        "--published",
        default="auto",
        metavar="ROWS",
        help="rows of the paper to print next to the results: the name of a model in the paper, all, none, or auto: the model "
        "that CHECKPOINT names (default: %(default)s)",
    )
    parser.set_defaults(run=commands.evaluate)


def _add_plan(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="predict memory and time of a config before any GPU is requested, and list the best layouts",
        usage="tepo plan CONFIG [--from RUN] [--gpus N] [--gpu H100|H200|B200] [--section.key VALUE ...]",
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
    parser.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN",
        help="run whose recorded steps replace assumptions; without CONFIG, its own config is planned",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.set_defaults(run=commands.plan)


def _add_compare(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("compare", help="compare two evaluations, problem by problem")
    parser.add_argument("first", type=Path, metavar="DIR", help="folder that tepo evaluate wrote")
    parser.add_argument("second", type=Path, metavar="DIR", help="folder of the evaluation that is subtracted")
    parser.set_defaults(run=commands.compare)


def _add_watch(subparsers: Subparsers) -> None:
    text = "show runs that are under way on a page that only this machine can open (docs/watch.md)"
    parser = subparsers.add_parser("watch", help=text)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="directories of runs, runs/NAME")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of 127.0.0.1 (default: a free one)")
    parser.set_defaults(run=commands.watch)


def _add_audit(subparsers: Subparsers) -> None:
    text = "compute each token's loss again in fp64, and compare it with what training used; 1: it differs (docs/audit.md)"
    parser = subparsers.add_parser("audit", help=text)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory, runs/NAME")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="a recorded step")
    parser.add_argument(
        "--token", metavar="SEQUENCE:POSITION", help="show one token: index of the sequence in the step, and of the token in it"
    )
    parser.set_defaults(run=commands.audit)
