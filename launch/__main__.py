"""The command `python -m launch`: start a run or a command on this machine or on a cluster. See docs/launch.md."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launch import command_line, jobs, login, preflight, snapshot
from launch.doctor import doctor
from launch.executors import EXECUTORS, Executor
from launch.jobs import JobFolder, LogSelection, SubmittedJob
from launch.layout import Layout, lay_out
from launch.profile import Cluster, load_cluster, this_machine
from launch.snapshot import CodeVersion
from tepo_megatron.base.errors import ConfigError, TepoError, escaped
from tepo_megatron.base.save_requests import SAVE, ask
from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, to_yaml
from tepo_megatron.monitor import run_dir


@dataclass(frozen=True)
class Start:
    """The start of a job."""

    executor: Executor
    code: CodeVersion
    after: str | None  # id of a job to wait for. None: no waiting.
    dry_run: bool
    allow_dirty: bool  # take files that differ from the commit into the snapshot instead of refusing them

    def train(self, cfg: Config, cluster: Cluster, layout: Layout) -> int:
        """Start a run and return the exit status."""
        if run_dir.finished(cfg):
            print(f"{cfg.run_dir}: this run is finished; only a higher training.steps makes it go on")
            return 0
        with self.submitting(cfg.run_dir):
            slot = jobs.next_job(cfg.run_dir, self.code)
            job = self.executor.training(cfg, cluster, layout, self.after, slot)
            if not self.dry_run:
                jobs.refuse_unfinished(cfg.run_dir, lambda job: _executor(cfg.run_dir, job).ended(job))
                run_dir.claim(cfg, check_only=True).release()  # the run itself prepares its folder
            return self.submit(job, slot, cluster, cfg)

    def submitting(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        """Return the lock of a folder's submissions. A dry run needs none, nor a run on this machine, which has its own."""
        if self.dry_run or not self.executor.QUEUES:
            return contextlib.nullcontext()
        return jobs.submitting(folder, self.executor.NAME, self.executor.find)

    def submit(self, job: Any, slot: JobFolder, cluster: Cluster, cfg: Config | None = None) -> int:
        """Submit a job, or print it in a dry run, and return the exit status."""
        if self.dry_run:
            print(self.executor.render(job), end="")
            return 0
        if not self.allow_dirty:
            self.code.refuse_changes()
        self.code.take(slot.home)
        about = snapshot.describe(self.code, cluster, cfg, slot.home)
        slot.create(None if cfg is None else to_yaml(snapshot.with_frozen_functions(cfg, self.code, slot.home)), about)
        try:
            return self.executor.start(job, slot)
        except ConfigError:
            slot.remove()
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, or 1 for an error (reported in one message) or a failed local run."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in ("status", "logs", "cancel", "attach", "save"):
            print(escaped(_about(words)))
            return 0
        if len(words) > 1 and words[0] == "--login":
            return login.call(words[1], words[2:])
        if words and words[0] == "doctor":
            return doctor(words[1:])
        return _launch(words)
    except TepoError as e:
        print(f"launch: error: {escaped(str(e))}", file=sys.stderr)
        return 1


def _about(words: list[str]) -> str:
    """Do what `status`, `logs`, `cancel` or `attach` asks for and return what it says. `attach` replaces this process."""
    parser = argparse.ArgumentParser(prog=f"launch {words[0]}", allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, output/name of its config, or what was given")
    parser.add_argument("--job", type=int, metavar="N", help="number of the job in that folder (default: the newest)")
    if words[0] == "logs":
        parser.add_argument("--lines", type=int, default=40, help="of each file (default: %(default)s)")
        parser.add_argument("--rank", type=int, help="only the log of this rank, from 1 (rank 0: the log of its machine)")
    if words[0] in ("logs", "attach"):
        parser.add_argument("--node", help="a machine of the job: its index from 0, or under Slurm its name")
    args = parser.parse_args(words[1:])
    if words[0] == "save":
        return _save(args.folder)
    job = jobs.read(args.folder, args.job)
    executor = _executor(args.folder, job)
    if words[0] == "logs":
        selection = LogSelection(args.lines, args.node, args.rank)
        return executor.logs(job, args.folder, selection) or f"job {job.id} has no such logs yet"
    if words[0] == "cancel":
        return executor.cancel(job)
    if words[0] == "attach":
        return _become(executor.attach(job, args.node))
    state = f"job {job.number}: {job.executor} job {job.id}, submitted {job.submitted}: {executor.state(job)}"
    others = [other for other in jobs.submitted_jobs(args.folder) if other.number != job.number]
    lines = [f"job {other.number}: {other.executor} job {other.id}, submitted {other.submitted}" for other in others]
    return "\n".join([state, *jobs.progress(args.folder), *lines])


def _executor(folder: Path, job: SubmittedJob) -> Executor:
    """Return the executor of a job of a folder. Raise ConfigError if it is unknown."""
    executor = EXECUTORS.get(job.executor)
    if executor is None:
        raise ConfigError(f"{folder}: started with --executor {job.executor}, which is not among {', '.join(EXECUTORS)}")
    return executor


def _become(words: list[str]) -> NoReturn:
    """Replace this process by a command. Raise ConfigError if it is not installed."""
    try:
        os.execvp(words[0], words)
    except OSError as e:
        raise ConfigError(f"{words[0]}: {e.strerror}; call this where {words[0]} is installed") from None


def _save(folder: Path) -> str:
    """Ask a run for a checkpoint after its running step, however the run was started."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder}: no run is there; give the folder output/name of its config")
    ask(folder, SAVE)
    return f"{folder}: asked for a checkpoint after the running step"


def _launch(words: list[str]) -> int:
    call = command_line.parse(words)
    kind, args = call.kind, call.args
    executor = EXECUTORS[args.executor]
    after = None if args.after is None else executor.after(args.after)
    start = functools.partial(Start, executor, after=after, dry_run=args.dry_run, allow_dirty=args.allow_dirty)
    if kind == "train":
        read = _read if args.dry_run or args.no_preflight or not executor.QUEUES else preflight.read
        found = read(args.target, call.overrides, args.cluster, executor)
        return start(code=snapshot.read()).train(*found)
    cluster = load_cluster(args.cluster) if args.cluster else this_machine()
    if call.overrides:
        raise ConfigError(f"{call.overrides[0]}: words of `{kind}` come after --")
    if executor.QUEUES and not (args.dry_run or args.no_preflight):
        preflight.check_command(cluster, executor)
    started, folder = start(code=snapshot.read()), Path(args.target)
    with started.submitting(folder):
        slot = jobs.next_job(folder, started.code)
        return started.submit(executor.command(kind, call.rest, slot, cluster, after), slot, cluster)


def _read(config: str, overrides: list[str], profile: str | None, executor: Executor) -> tuple[Config, Cluster, Layout]:
    """Read a config and a profile without a preflight, and raise ConfigError for the first fault."""
    cluster = load_cluster(profile) if profile else this_machine()
    cfg = load_config(config, overrides)
    executor.check(cluster, cfg)
    layout = lay_out(cfg, cluster)
    executor.check_run(cfg, cluster, layout)
    return cfg, cluster, layout


if __name__ == "__main__":
    sys.exit(main())
