"""`python -m launch doctor`: check a cluster's machines without a run (launch/node_check.py), as a job of its own or here."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from launch import check_step, checks, command_line, jobs, scripts
from launch.executors import slurm
from launch.profile import Cluster, load_cluster
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.scratch import PrivateFolder

_LOOK_SECONDS = 2.0
_WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")


def doctor(words: Sequence[str]) -> int:
    """Check the machines of a cluster and print what each says. Return 0 if they can take a run, else 1."""
    args = command_line.doctor_args(words)
    cluster = load_cluster(args.cluster)
    gpus = 0 if args.cpu else cluster.gpus
    if args.nodes < 1:
        raise ConfigError(f"--nodes {args.nodes}: give at least 1")
    if cluster.slurm is None:
        return _here(cluster, gpus, args.dry_run)
    checks.check_paths([Path.cwd(), args.folder], slurm=True)
    slot = jobs.next_job(args.folder)
    setup = slurm.check_setup(cluster, slot, args.nodes, gpus)
    task = scripts.Task("check", scripts.text(["echo the machines are good"]))
    job = scripts.submission(slot, [task], cluster, None, setup, False, args.nodes - 1 + cluster.node_check.spare_nodes)
    if args.dry_run:
        print(slurm.render(job), end="")
        return 0
    slot.create()
    slurm.start(job, slot)
    return _wait(args.folder, slot.home / f"{slot.name}-check-{jobs.read(args.folder).id}.log")


def _wait(folder: Path, log: Path) -> int:
    """Wait for the end of a job, print its check's log, and return the exit status."""
    job, before = jobs.read(folder), ""
    while (state := slurm.state(job)).startswith(_WAITING):
        if state.split(",")[0] != before:
            before = state.split(",")[0]
            print(before, flush=True)
        time.sleep(_LOOK_SECONDS)
    print(log.read_text().rstrip() if log.exists() else slurm.logs(job, folder, jobs.LogSelection()))
    print(state)
    return 0 if state.startswith("COMPLETED") else 1


def _here(cluster: Cluster, gpus: int, dry_run: bool) -> int:
    """Check this machine alone."""
    with PrivateFolder.create("launch") as private:
        program = Path(__file__).with_name(check_step.CHECK)
        name = os.uname().nodename
        words = [cluster.python, str(program), "--folder", str(private.path), "--names", name, "--name", name]
        words += check_step.check_words(cluster, 1, gpus)
        if dry_run:
            print(scripts.joined(words))
            return 0
        try:
            env, seconds = os.environ | cluster.environment | cluster.network.variables, cluster.node_check.timeout_seconds
            done = subprocess.run(words, env=env, timeout=2 * seconds, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the check did not end within {2 * seconds} s; raise node_check.timeout_seconds") from None
        except OSError as e:
            raise ConfigError(f"python={cluster.python}: {e.strerror}; name the training environment's interpreter") from None
        return done.returncode
