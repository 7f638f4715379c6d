"""The first step of a job, which checks its machines (launch/node_check.py): its words, and the shell code for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from launch.jobs import JobFolder
from launch.profile import Cluster
from launch.scripts import head, joined
from launch.sections import SlurmConfig
from launch.snapshot import shell_lines

_SHOWN = 5  # last lines of a check's log, where the check gave no result
CHECK = "node_check.py"  # the program, in the folder of a job
# Variables that the check sets for the tasks.
VARIABLES = ("LAUNCH_CHECK", "MASTER_ADDR", "MASTER_PORT")
# A task's line that sets the interfaces of its own machine, which may have another name than on the others.
OWN_INTERFACES = '. "$LAUNCH_CHECK/$SLURMD_NODENAME.sh"'


def setup_lines(slurm: SlurmConfig) -> tuple[str, ...]:
    """Return the lines of `slurm.setup` for a script. Environment modules read variables that are not set."""
    return ("set +u", *slurm.setup, "set -u") if slurm.setup else ()


def check_words(cluster: Cluster, need: int, gpus: int) -> list[str]:
    """Return the options of node_check.py that follow from the profile."""
    check = cluster.node_check
    words = ["--need", str(need), "--gpus", str(gpus), "--port", str(cluster.network.port or 0)]
    words += ["--infiniband", cluster.network.infiniband] if cluster.network.infiniband else []
    words += ["--interfaces", ",".join(cluster.network.interfaces), "--skip", ",".join(check.skip)]
    words += ["--least", f"{check.min_gb_per_second:g}", "--clock", f"{check.max_clock_seconds:g}"]
    return [*words, "--timeout", str(check.timeout_seconds)]


def container_words(cluster: Cluster, folder: Path, variables: Sequence[str]) -> list[str]:
    """Return the options of `srun` for a step in the container of the tasks; none without a container."""
    image = cluster.container
    if image is None:
        return []
    mounts = ",".join([f"{folder}:{folder}", *image.all_mounts])
    words = [f"--container-image={image.image}", f"--container-mounts={mounts}", f"--container-workdir={folder}"]
    return [*words, f"--container-env={','.join(variables)}"] if variables else words


def _no_result(cluster: Cluster, home: Path, name: str) -> str:
    """Return the shell code of a batch script that says why the check on all machines gave no result."""
    lines = [f'tail -n {_SHOWN} {shlex.quote(f"{home / name}-check-")}"$SLURM_JOB_ID.log" 2>/dev/null']
    lines.append(f"echo {shlex.quote(f'{name}: the check gave no result; the end of its log is above')}")
    image = cluster.container.image if cluster.container is not None else ""
    if image.startswith(("/", ".")):  # Pyxis takes it for a file, and names it in the middle of its own messages
        said = shlex.quote(f"container.image={image} is no file on ")
        fix = shlex.quote("; import it where all machines see it, or correct it")
        lines.append(f'[ -f {shlex.quote(image)} ] || echo {said}"$SLURMD_NODENAME"{fix}')
    return "\n".join(f"    {line}" for line in lines)


def check_lines(cluster: Cluster, folder: Path, slot: JobFolder, need: int, gpus: int, exports: Sequence[str]) -> str:
    """Return the shell code of the check for a batch script of NeMo-Run, after which `nodes` holds the good machines."""
    slurm = cluster.slurm
    assert slurm is not None, "checked before"
    home, name = slot.home, slot.name
    # it imports nothing of the snapshot; the lines remove the checkout from PYTHONPATH
    code = [*shell_lines(slot.code), "unset PYTHONSAFEPATH"] if slot.code is not None else []
    program = [*head(folder), *setup_lines(slurm), *code]
    program.append(f'exec {joined([cluster.python, str(slot.path / CHECK)])} "$@"')
    step = ["srun", '--nodes="${#nodes[@]}"', '--ntasks="${#nodes[@]}"', "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    step += slurm.cpu_args
    step += [f"--wait={cluster.node_check.timeout_seconds + 60}"]  # a bad machine ends its part first
    step += [joined(["--open-mode=append", f"--output={home / name}-check-%j.log"])]
    step += [joined([*container_words(cluster, folder, exports), *slurm.srun_args])]
    step += ["bash", "-c", shlex.quote("\n".join(program)), "node_check", '--folder "$LAUNCH_CHECK" --names "${nodes[@]}"']
    step += [joined(check_words(cluster, need, gpus))]
    return f"""
# first of all: check the machines, and choose an address and a free port of the first good one
set +vx
trap early=1 USR1  # the warning of the time limit, if it comes during the check
export LAUNCH_CHECK={shlex.quote(str(home / "check"))}-"$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
mkdir -m 700 -p "$LAUNCH_CHECK"
{" ".join(word for word in step if word)} || true
if [ ! -s "$LAUNCH_CHECK/good" ]; then
  echo "launch: the node check failed and nothing was started; {home / name}-check-$SLURM_JOB_ID.log has all of it:"
  if ! cat "$LAUNCH_CHECK/fault" 2>/dev/null; then
{_no_result(cluster, home, name)}
  fi
  exit 1
fi
mapfile -t nodes < "$LAUNCH_CHECK/good"
head_node=${{nodes[0]}}
read -r MASTER_ADDR MASTER_PORT < "$LAUNCH_CHECK/endpoint"
export MASTER_ADDR MASTER_PORT
"""
