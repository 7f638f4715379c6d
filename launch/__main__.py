"""`python -m launch`: a run, or a command, on this machine or on a cluster. See docs/launch.md."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch import jobs, scripts, skypilot
from launch.checks import check_claims, check_paths, check_run, check_secrets
from launch.layout import Layout, lay_out
from launch.profile import Cluster, load_cluster
from launch.ray_plan import STARTS, RayJob
from tepo_megatron import run_dir
from tepo_megatron.config_io import load_config, to_yaml
from tepo_megatron.errors import ConfigError, TepoError

if TYPE_CHECKING:
    from launch.nemo import Submission
    from tepo_megatron.config import Config

USAGE = """
  python -m launch CONFIG --executor slurm --cluster PROFILE [--dry-run] [--after FOLDER] [--section.key VALUE ...]
  python -m launch CONFIG --executor kuberay|skypilot --cluster PROFILE [--dry-run] [--section.key VALUE ...]
  python -m launch convert FOLDER --executor slurm --cluster PROFILE [--dry-run] [--after FOLDER] -- WORDS...
  python -m launch evaluate FOLDER ... -- WORDS...
  python -m launch status|logs|cancel FOLDER"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 for an error (told in one message) or a local run that failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in ("status", "logs", "cancel"):
            print(_about(words))
            return 0
        return _launch(words)
    except TepoError as e:
        print(f"launch: error: {e}", file=sys.stderr)
        return 1


def _about(words: list[str]) -> str:
    parser = argparse.ArgumentParser(prog=f"launch {words[0]}", allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, output/name of its config, or what was given")
    if words[0] == "logs":
        parser.add_argument("--lines", type=int, default=40, help="of each file (default: %(default)s)")
    args = parser.parse_args(words[1:])
    if words[0] == "logs":
        return jobs.logs(args.folder, args.lines)
    return jobs.status(args.folder) if words[0] == "status" else jobs.cancel(args.folder)


def _launch(words: list[str]) -> int:
    kind = words.pop(0) if words and words[0] in ("convert", "evaluate") else "train"
    words, rest = _cut(words) if kind != "train" else (words, [])
    parser = argparse.ArgumentParser(prog="launch", usage=USAGE, allow_abbrev=False)
    parser.add_argument("target", metavar="CONFIG" if kind == "train" else "FOLDER")
    parser.add_argument(
        "--executor", choices=["local", "slurm", "kuberay", "skypilot"], default="local", help="(default: %(default)s)"
    )
    parser.add_argument("--cluster", metavar="PROFILE", help="a YAML file; start from launch/profiles/")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts that would run, and leave nothing behind")
    parser.add_argument("--after", type=Path, metavar="FOLDER", help="start when the newest job of that folder has succeeded")
    args, overrides = parser.parse_known_args(words)
    cluster = load_cluster(args.cluster) if args.cluster else Cluster()
    after = _after(args.after, args.executor)
    if kind == "train":
        return _train(args.target, overrides, args.executor, cluster, after, args.dry_run)
    if overrides:
        raise ConfigError(f"{overrides[0]}: words of `{kind}` come after --")
    if args.executor == "skypilot":
        raise ConfigError(f"--executor skypilot runs a CONFIG, and no `{kind}`; use slurm, kuberay or local")
    _check_executor(args.executor, cluster)
    folder = Path(args.target)
    if args.executor == "kuberay":
        check_claims(cluster)
    check_paths([Path.cwd(), folder])
    task = scripts.command(kind, rest, cluster, Path.cwd(), args.executor == "local")
    if args.executor == "kuberay":
        return _start_on_ray(_ray_job(folder, [task], cluster), folder, args.dry_run)
    return _start(_submission(folder, [task], cluster, after), folder, args.executor, args.dry_run)


def _train(config: str, overrides: list[str], executor: str, cluster: Cluster, after: str | None, dry_run: bool) -> int:
    cfg = load_config(config, overrides)
    _check_executor(executor, cluster)
    if executor == "kuberay":
        check_claims(cluster, cfg)
    layout = lay_out(cfg, cluster)
    if executor == "skypilot":
        return _train_with_skypilot(cfg, cluster, layout, dry_run)
    if executor != "kuberay":
        check_run(cfg, cluster)
    if run_dir.finished(cfg):
        print(f"{cfg.run_dir}: this run is finished; only a higher training.steps makes it go on")
        return 0
    folder, setup = Path.cwd(), ""
    goes_on = not cfg.rollout.only  # which keeps no checkpoints
    if executor == "kuberay":
        job = _ray_job(cfg.run_dir, scripts.training(cfg, cluster, layout, folder, STARTS), cluster, goes_on)
        if not dry_run:
            run_dir.prepare(cfg)
        return _start_on_ray(job, cfg.run_dir, dry_run)
    if executor == "local":
        if layout.train_nodes > 1 or layout.serve_nodes > 1:
            raise ConfigError(f"this run takes {layout.nodes} machines of {cluster.slots} ranks; use --executor slurm")
        tasks = [scripts.local_training(cfg, cluster, layout, folder)]
    else:
        assert cluster.slurm is not None, "checked above"
        tasks = scripts.training(cfg, cluster, layout, folder)
        setup = scripts.batch_setup(cfg, cluster.slurm, jobs.home_of(cfg.run_dir)) if goes_on and cluster.slurm.restarts else ""
    submission = _submission(cfg.run_dir, tasks, cluster, after, setup, requeued=goes_on)
    if not dry_run:
        run_dir.prepare(cfg)
    return _start(submission, cfg.run_dir, executor, dry_run)


def _train_with_skypilot(cfg: Config, cluster: Cluster, layout: Layout, dry_run: bool) -> int:
    check_paths([Path.cwd(), cfg.run_dir])
    skypilot.check_run(cfg, cluster, layout)
    from launch import nemo_sky

    home, name = jobs.home_of(cfg.run_dir), cfg.run_dir.name
    scripts_of = skypilot.setup(cluster), skypilot.run(cfg, cluster, layout)
    job = nemo_sky.ManagedJob(name, home, jobs.next_number(home, name), layout.nodes, cluster, *scripts_of, to_yaml(cfg))
    stays = skypilot.check_code(Path.cwd())
    if dry_run:
        print(*(f"launch: warning: {what}" for what in stays), sep="\n", end="\n" if stays else "", file=sys.stderr)
        print(nemo_sky.render(job), end="")
        return 0
    if stays:
        raise ConfigError(stays[0])
    number = nemo_sky.submit(job)
    jobs.write(cfg.run_dir, "skypilot", number)
    print(f"managed job {number}; python -m launch status|logs|cancel {cfg.run_dir}")
    return 0


def _check_executor(executor: str, cluster: Cluster) -> None:
    if executor in ("slurm", "skypilot") and getattr(cluster, executor) is None:
        raise ConfigError(
            f"--executor {executor}: the cluster's profile has no {executor} section; give one with --cluster PROFILE"
        )
    if executor == "local" and cluster.container is not None:
        raise ConfigError("--executor local starts no container; remove `container` from the cluster's profile")
    if executor != "kuberay":
        check_secrets(cluster)


def _submission(
    folder: Path, tasks: list[scripts.Task], cluster: Cluster, after: str | None, setup: str = "", requeued: bool = False
) -> Submission:
    home, name = jobs.home_of(folder), folder.absolute().name
    os.environ["NEMORUN_HOME"] = str(home)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NeMo-Run's dependencies warn of each other
            from launch.nemo import Submission
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} is not installed here; `make launch` makes .venv-launch, whose python has it") from None
    number = jobs.next_number(home, name)
    return Submission(name, home, number, tasks, cluster, Path.cwd(), setup, requeued, after)


def _start(submission: Submission, folder: Path, executor: str, dry_run: bool) -> int:
    from launch import nemo

    if dry_run:
        print(nemo.render(submission) if executor == "slurm" else submission.tasks[0].script, end="")
        return 0
    if executor == "local":
        jobs.write(folder, "local", str(os.getpid()))
        return 0 if nemo.run_here(submission) else 1
    job = nemo.submit(submission)
    jobs.write(folder, "slurm", job)
    print(f"job {job}; python -m launch status|logs|cancel {folder}")
    return 0


def _ray_job(folder: Path, tasks: list[scripts.Task], cluster: Cluster, goes_on: bool = False) -> RayJob:
    home, name = jobs.home_of(folder), folder.absolute().name
    return RayJob(name, home, jobs.next_number(home, name), tasks, cluster, goes_on)


def _start_on_ray(job: RayJob, folder: Path, dry_run: bool) -> int:
    os.environ["NEMORUN_HOME"] = str(job.home)
    if dry_run:
        print(jobs.kuberay().render(job), end="")
        return 0
    id = jobs.kuberay().submit(job)
    jobs.write(folder, "kuberay", id)
    print(f"job {id}; python -m launch status|logs|cancel {folder}")
    return 0


def _after(folder: Path | None, executor: str) -> str | None:
    """The number of the Slurm job to wait for."""
    if folder is None:
        return None
    if executor == "kuberay":
        raise ConfigError(f"--after {folder}: Kubernetes lets no job wait for another; start this one when that one has ended")
    if executor == "local":
        raise ConfigError("--after: a local run is waited for anyway; start the next one when it has ended")
    if executor == "skypilot":
        raise ConfigError("--after: SkyPilot's managed jobs do not wait for each other; start the next one when it has ended")
    job = jobs.read(folder)
    if job.executor != "slurm":
        raise ConfigError(f"--after {folder}: that ran with --executor {job.executor}, and Slurm waits for its own jobs alone")
    return job.id


def _cut(words: list[str]) -> tuple[list[str], list[str]]:
    """Before and after `--`."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
