"""The executor for Slurm. A job is one allocation with an `srun` step per task, submitted by NeMo-Run (launch/nemo.py)."""

from __future__ import annotations

import dataclasses
import glob
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch import check_step, checks, jobs, scripts
from launch.check_step import setup_lines
from launch.jobs import JobFolder, LogSelection, SubmittedJob, log_tails
from launch.layout import Layout
from launch.profile import Cluster
from launch.sections import SlurmConfig
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.save_requests import STOP, STOPPED
from tepo_megatron.config import Config

if TYPE_CHECKING:
    from launch.nemo import Submission

_ANSWER_SECONDS = 120  # limit since a call of Slurm: a busy controller answers within a minute; then `did not answer within`
# Limit since a warning that came before the tasks: srun starts them in seconds; then the warning is sent again
_START_SECONDS = 15
_ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
    "REVOKED",
)  # fmt: skip
NAME, QUEUES = "slurm", True
_STARTS = scripts.StartVariables("${SLURM_RESTART_COUNT:-0}", '"${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}"')


def after(folder: Path) -> str:
    job = jobs.read(folder)
    if job.executor != NAME:
        raise ConfigError(f"--after {folder}: that ran with --executor {job.executor}, and Slurm waits for its own jobs alone")
    return job.id


def check(cluster: Cluster, cfg: Config | None) -> None:
    if cluster.slurm is None:
        raise ConfigError("--executor slurm: the cluster's profile has no slurm section; give one with --cluster PROFILE")
    checks.check_secrets(cluster)


def check_run(cfg: Config, cluster: Cluster, layout: Layout) -> None:
    checks.check_paths([Path.cwd(), cfg.run_dir], slurm=True)
    checks.check_run(cfg, cluster)


def training(cfg: Config, cluster: Cluster, layout: Layout, after: str | None, slot: JobFolder) -> Submission:
    assert cluster.slurm is not None, "checked before"
    resumes = not cfg.rollout.only  # rollout.only keeps no checkpoints
    own = (check_step.OWN_INTERFACES,) if layout.nodes > 1 and not cluster.network.interfaces else ()
    lines = (*setup_lines(cluster.slurm), *own, *slot.shell_lines())
    starts = dataclasses.replace(_STARTS, setup=lines, config=slot.config, packages=tuple(slot.packages))
    tasks = scripts.training(cfg, cluster, layout, Path.cwd(), starts)
    setup = check_setup(cluster, slot, layout.nodes, cluster.gpus if cfg.platform == "cuda" else 0)
    setup += batch_setup(cfg, cluster.slurm, slot.home) if resumes and cluster.slurm.restarts else ""
    spares = cluster.node_check.spare_nodes
    return scripts.submission(slot, tasks, cluster, after, setup, resumes, spares, check_step.VARIABLES)


def check_setup(cluster: Cluster, slot: JobFolder, nodes: int, gpus: int) -> str:
    """Return the shell code of the node check for a batch script."""
    exports = sorted({*scripts.variables(cluster, slot.home), "LAUNCH_CHECK"})
    return check_step.check_lines(cluster, Path.cwd(), slot, nodes, gpus, exports)


def command(kind: str, words: Sequence[str], slot: JobFolder, cluster: Cluster, after: str | None) -> Submission:
    check(cluster, None)
    checks.check_paths([Path.cwd(), slot.run], slurm=True)
    checks.check_words(words)
    checks.check_mounted(cluster, slot.run)
    slurm = cluster.slurm
    assert slurm is not None, "just checked"
    if (shared := slurm.for_command(kind)) is not None:
        if shared[1] and not cluster.gpus_per_node:
            raise ConfigError(
                f"slurm.{kind}.gpus_per_node={shared[1]}, and gpus_per_node={cluster.gpus_per_node} says that Slurm gives out "
                "no GPUs here; remove the first, or set the second"
            )
        cluster = dataclasses.replace(cluster, slurm=shared[0], gpus_per_node=cluster.gpus_per_node and shared[1])
    lines = [*setup_lines(slurm), *slot.shell_lines(), *scripts.package_lines(cluster, slot.packages)]
    return scripts.submission(slot, [scripts.command(kind, words, cluster, Path.cwd(), lines, slot.code)], cluster, after)


def render(job: Submission) -> str:
    return job.render()


def start(job: Submission, slot: JobFolder) -> int:
    slurm = job.cluster.slurm
    assert slurm is not None, "checked before"
    container = check_step.container_words(job.cluster, job.folder, ())
    shell = scripts.shell(job.cluster, job.folder, slot.home, [*setup_lines(slurm), *slot.shell_lines()])
    return slot.submitted(NAME, job.submit(), shell=[*container, *slurm.srun_args, *shell])


def find(slot: JobFolder) -> str | None:
    """Return the number of the job in the queue whose batch script is that of a submission."""
    listed = _call("squeue", "--noheader", "--me", "--format", "%i|%o")
    if listed.returncode:
        raise ConfigError(f"squeue: {' '.join(listed.stderr.split())}; try again once Slurm answers")
    scripts_of = f"{slot.home}/experiments/{slot.name}/{slot.name}_{slot.number}/"
    found = [
        number for number, _, command in (line.partition("|") for line in listed.stdout.splitlines()) if scripts_of in command
    ]
    return found[0].strip() if found else None


def state(job: SubmittedJob) -> str:
    words = _shown(job)
    if words is not None:
        reason = f" ({words['Reason']})" if words.get("Reason", "None") != "None" else ""
        return f"{words['JobState']}{reason}, {words['RunTime']} of {words['TimeLimit']}, restarts: {words['Restarts']}"
    counted = _call("sacct", "-nXP", "--jobs", job.id, "--format", "State,Elapsed,ExitCode")
    if counted.returncode == 0 and counted.stdout.strip():
        return ", ".join(counted.stdout.split("\n")[0].split("|"))
    return "unknown to scontrol and sacct"


def ended(job: SubmittedJob) -> bool:
    words = _shown(job)
    return words is None or words["JobState"] in _ENDED


def logs(job: SubmittedJob, folder: Path, selection: LogSelection) -> str:
    home, name = jobs.launch_folder(folder), glob.escape(folder.absolute().name)
    paths = [*home.glob(f"{name}-*-{job.id}.log"), *home.glob(f"{name}-*-{job.id}-*.log")]
    return log_tails(folder, job, sorted(paths), selection)


def attach(job: SubmittedJob, node: str | None) -> list[str]:
    """Return the words that open a shell on a machine, named or by its index, in a step next to its tasks."""
    words = _shown(job)
    if words is None or words["JobState"] != "RUNNING":
        raise ConfigError(f"attach: job {job.id} does not run: {state(job)}; try again while it runs")
    names = _call("scontrol", "show", "hostnames", words["NodeList"]).stdout.split()
    chosen = names[int(node)] if node is not None and node.isdigit() and int(node) < len(names) else node or names[0]
    if chosen not in names:
        raise ConfigError(f"--node {node}: job {job.id} runs on {', '.join(names)}; give one of these, or its index from 0")
    where = [f"--jobid={job.id}", "--overlap", "--pty", "--nodes=1", "--ntasks=1", f"--nodelist={chosen}"]
    return ["srun", *where, *job.shell]


def cancel(job: SubmittedJob) -> str:
    ended = _call("scancel", job.id)
    if ended.returncode:
        raise ConfigError(f"scancel {job.id}: {' '.join(ended.stderr.split())}")
    return f"job {job.id} is cancelled"


def _shown(job: SubmittedJob) -> dict[str, str] | None:
    """Return what scontrol says of a job; None if it does not know it, as some minutes after its end. Raise ConfigError."""
    shown = _call("scontrol", "show", "job", "--oneliner", job.id)
    if shown.returncode == 0:
        return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)
    if "Invalid job id" in shown.stderr:
        return None
    raise ConfigError(f"scontrol show job {job.id}: {' '.join(shown.stderr.split())}; try again once Slurm answers")


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS)
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed here; call this on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{words[0]} did not answer within {_ANSWER_SECONDS} s; try again") from None


def batch_setup(cfg: Config, slurm: SlurmConfig, home: Path) -> str:
    """Return shell code for a run's batch script: its reaction to the signal before the time limit, and to a failed task.

    At the signal it asks the run to save and end, and requeues the job when the run has done so, or shortly before the limit.
    After a failure it requeues the job at once, unless earlier starts failed at the same checkpoint. The batch script itself
    may be killed; a separate step detects that and does the same.
    """
    name = cfg.run_dir.absolute().name
    log, failures, idle = (shlex.quote(str(home / f"{name}-{what}")) for what in ("guard-%j.log", "failures-", "idle-"))
    return _before_the_limit(slurm, cfg.run_dir.absolute(), failures, idle) + _after_a_failure(slurm, log)


def _before_the_limit(slurm: SlurmConfig, run: Path, failures: str, idle: str) -> str:
    """Return the shell code that requeues the job before its time limit, with the variables that `_after_a_failure` also reads.

    The request is repeated, because a run that is just starting removes older ones.
    """
    patience = slurm.patience
    limit = slurm.idle_starts or "$((times + 1))"
    warning = f"slurm.warning_seconds={slurm.warning_seconds}"
    longer = f"raise slurm.time={slurm.time}, or lower {warning}, so that a step fits between the start and the warning"
    earlier = f"raise {warning}, into which an update and a checkpoint have to fit"
    return f"""
# before the time limit the run saves and ends, and the job is queued again; at the latest {patience} s after the warning
set +vx
checkpoints={shlex.quote(str(run / "checkpoints"))}
stop={shlex.quote(str(run / STOP))}
stopped={shlex.quote(str(run / STOPPED))}
failures={failures}"$SLURM_JOB_ID"
rm -f "$stop" "$stopped"
newest() {{ ls "$checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | sort -V | tail -n 1; }}
began=$(newest); began=${{began:-none}}
idle={idle}"$SLURM_JOB_ID"
under_way() {{ kill -0 "${{pids[0]}}" 2>/dev/null; }}
used_up() {{
  [ "${{SLURM_RESTART_COUNT:-0}}" -ge {slurm.restarts} ] &&
    echo "launch: $1, and slurm.restarts={slurm.restarts} were made: this is the end"
}}
without_progress() {{  # why, and the fix
  at=$(newest)
  if [ "${{at:-none}}" != "$began" ]; then rm -f "$idle"; return 1; fi
  echo "$began" >> "$idle"
  times=$(grep -cFx -- "$began" "$idle")
  [ "$times" -ge {limit} ] &&
    echo "launch: $1; newest checkpoint: $began, as at the beginning of $times starts in a row: this is the end; $2"
}}
queue_again() {{
  if used_up "$1" || without_progress "$1" "$2"; then return; fi
  at=$(newest); echo "launch: $1; queued again; newest checkpoint: ${{at:-none}}"
  scontrol requeue "$SLURM_JOB_ID"
}}
later() {{ sleep {_START_SECONDS}; kill -USR1 $$; }}
warned() {{
  if [ -z "${{pids[0]:-}}" ]; then later & return; fi
  trap '' USR1
  at=$(newest); end=$((SECONDS + {patience}))
  echo "launch: the time limit is near; newest checkpoint: ${{at:-none}}; the run is asked to save and end"
  while under_way && [ ! -e "$stopped" ] && [ "$SECONDS" -lt "$end" ]; do touch "$stop"; sleep 2; done
  while under_way && [ "$SECONDS" -lt "$end" ]; do sleep 1; done
  if under_way; then queue_again "the run has not ended {patience} s after the warning" "{earlier}"; fi
}}
saved() {{ queue_again "the run has saved and ended" "{longer}"; }}
trap warned USR1
if [ -n "${{early:-}}" ]; then later & fi
"""


def _after_a_failure(slurm: SlurmConfig, log: str) -> str:
    """Return the shell code that requeues the job after a failed task or the batch script's own death."""
    return f"""
# queued again after a failure, unless {slurm.error_restarts + 1} starts failed at one checkpoint
job_says() {{ scontrol show job --oneliner "$SLURM_JOB_ID" | grep -qE "$1"; }}
after_failure() {{
  if used_up "$1"; then return; fi
  at=$(newest); at=${{at:-none}}
  echo "$at" >> "$failures"
  if [ "$(grep -cFx "$at" "$failures")" -gt {slurm.error_restarts} ]; then
    echo "launch: $1; newest checkpoint: $at, where slurm.error_restarts={slurm.error_restarts} were made: this is the end"
    return
  fi
  echo "launch: $1; queued again; newest checkpoint: $at"
  scontrol requeue "$SLURM_JOB_ID"
}}
ended() {{  # a job that is not RUNNING any more was cancelled, or has reached its limit, or is queued again
  status=$?
  if [ "$status" -eq 0 ] || ! job_says ' JobState=RUNNING '; then return; fi
  if [ -e "$stopped" ]; then saved; return; fi
  after_failure "a task ended with status $status"
}}
trap ended EXIT

# the batch script's own death, which ends the job by signal 9 for a reason of Slurm's: `scancel` gives none
killed() {{
  if job_says ' ExitCode=0:9 ' && ! job_says ' Reason=None '; then after_failure "the batch script was killed"; fi
  exit 0
}}
guard="$(declare -p checkpoints failures); $(declare -f newest used_up job_says after_failure killed)"
srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=1 --nodelist="$head_node" --open-mode=append --output={log} \\
  bash -c "$guard; trap killed TERM; sleep infinity & wait" &
"""
