"""The command `python -m launch`: start a run or a command on this machine or on a cluster. See docs/launch.md."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import jobs, preflight
from launch.doctor import doctor
from launch.executors import EXECUTORS, Executor
from launch.layout import Layout, lay_out
from launch.profile import Cluster, load_cluster, this_machine
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config
from tepo_megatron.errors import ConfigError, TepoError
from tepo_megatron.observability import run_dir
from tepo_megatron.utils.escaping import escaped
from tepo_megatron.utils.save_requests import SAVE, ask

USAGE = """
  python -m launch CONFIG --executor slurm --cluster PROFILE [--dry-run] [--no-preflight] [--after FOLDER] [--section.key VALUE]
  python -m launch CONFIG --executor kuberay|skypilot --cluster PROFILE [--dry-run] [--no-preflight] [--section.key VALUE ...]
  python -m launch convert FOLDER --executor slurm --cluster PROFILE [--dry-run] [--after FOLDER] -- WORDS...
  python -m launch evaluate FOLDER ... -- WORDS...
  python -m launch doctor --cluster PROFILE [--nodes N] [--dry-run]
  python -m launch status|logs|cancel|save FOLDER"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, or 1 for an error (reported in one message) or a failed local run."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in ("status", "logs", "cancel", "save"):
            print(escaped(_about(words)))
            return 0
        if words and words[0] == "doctor":
            return doctor(words[1:])
        return _launch(words)
    except TepoError as e:
        print(f"launch: error: {escaped(str(e))}", file=sys.stderr)
        return 1


def _about(words: list[str]) -> str:
    parser = argparse.ArgumentParser(prog=f"launch {words[0]}", allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, output/name of its config, or what was given")
    if words[0] == "logs":
        parser.add_argument("--lines", type=int, default=40, help="of each file (default: %(default)s)")
    args = parser.parse_args(words[1:])
    if words[0] == "save":
        return _save(args.folder)
    job = jobs.read(args.folder)
    executor = EXECUTORS.get(job.executor)
    if executor is None:
        raise ConfigError(f"{args.folder}: started with --executor {job.executor}, which is not among {', '.join(EXECUTORS)}")
    if words[0] == "logs":
        return executor.logs(job, args.folder, args.lines) or f"job {job.id} has no logs yet"
    if words[0] == "cancel":
        return executor.cancel(job)
    state = f"{job.executor} job {job.id}, submitted {job.submitted}: {executor.state(job)}"
    return "\n".join([state, *jobs.progress(args.folder)])


def _save(folder: Path) -> str:
    """Ask a run for a checkpoint after its running step, however the run was started."""
    executor = None
    with contextlib.suppress(ConfigError):  # `tepo train` has no job
        executor = EXECUTORS.get(jobs.read(folder).executor)
    if executor is not None and not executor.RUN_IS_HERE:
        raise ConfigError(f"{folder}: the run's files are on its machines; there, `touch {folder / SAVE}`")
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder}: no run is there; give the folder output/name of its config")
    ask(folder, SAVE)
    return f"{folder}: asked for a checkpoint after the running step"


def _launch(words: list[str]) -> int:
    kind = words.pop(0) if words and words[0] in ("convert", "evaluate") else "train"
    words, rest = _split_words(words) if kind != "train" else (words, [])
    parser = argparse.ArgumentParser(prog="launch", usage=USAGE, allow_abbrev=False)
    parser.add_argument("target", metavar="CONFIG" if kind == "train" else "FOLDER")
    parser.add_argument("--executor", choices=list(EXECUTORS), default="local", help="(default: %(default)s)")
    parser.add_argument("--cluster", metavar="PROFILE", help="a YAML file; start from launch/profiles/")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts that would run, and leave nothing behind")
    parser.add_argument("--after", type=Path, metavar="FOLDER", help="start when the newest job of that folder has succeeded")
    parser.add_argument("--no-preflight", action="store_true", help="submit without checking model, data, image and space")
    args, overrides = parser.parse_known_args(words)
    executor = EXECUTORS[args.executor]
    after = None if args.after is None else executor.after(args.after)
    if kind == "train":
        read = _read if args.dry_run or args.no_preflight or not executor.QUEUES else preflight.read
        return _train(*read(args.target, overrides, args.cluster, executor), executor, after, args.dry_run)
    cluster = load_cluster(args.cluster) if args.cluster else this_machine()
    if overrides:
        raise ConfigError(f"{overrides[0]}: words of `{kind}` come after --")
    if executor.QUEUES and not (args.dry_run or args.no_preflight):
        preflight.check_command(cluster, executor)
    folder = Path(args.target)
    return _start(executor, executor.command(kind, rest, folder, cluster, after), folder, args.dry_run)


def _read(config: str, overrides: list[str], profile: str | None, executor: Executor) -> tuple[Config, Cluster, Layout]:
    """Read a config and a profile without a preflight, and raise ConfigError for the first fault.

    Args:
        config, overrides, profile, executor: As in `preflight.read`.
    """
    cluster = load_cluster(profile) if profile else this_machine()
    cfg = load_config(config, overrides)
    executor.check(cluster, cfg)
    layout = lay_out(cfg, cluster)
    executor.check_run(cfg, cluster, layout)
    return cfg, cluster, layout


def _train(cfg: Config, cluster: Cluster, layout: Layout, executor: Executor, after: str | None, dry_run: bool) -> int:
    if executor.RUN_IS_HERE and run_dir.finished(cfg):
        print(f"{cfg.run_dir}: this run is finished; only a higher training.steps makes it go on")
        return 0
    job = executor.training(cfg, cluster, layout, after)
    if executor.RUN_IS_HERE and not dry_run:
        run_dir.prepare(cfg)
    return _start(executor, job, cfg.run_dir, dry_run)


def _start(executor: Executor, job: Any, folder: Path, dry_run: bool) -> int:
    if dry_run:
        print(executor.render(job), end="")
        return 0
    return executor.start(job, folder)


def _split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after `--`."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
