"""The shell scripts of a job. Each is complete: what stands here is what runs. From a job's second start on a run resumes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.layout import Layout
from launch.profile import Cluster, SlurmConfig
from tepo_megatron.config import Config

_MARGIN_SECONDS = 60  # of the warning, for Slurm to end the job before its limit
_COMMANDS = {"convert": ["tools/convert.py"], "evaluate": ["-m", "tepo_megatron", "evaluate"]}


@dataclass(frozen=True)
class Starts:
    """What a scheduler says of a start of a job, in words of the shell.

    count: how often it was started before; id: unlike that of every other start of every other job; meet: where the machines of
    the ranks meet, as options of torchrun; address: options of `tepo serve`; config: the run's, None: that of its folder.
    """

    count: str
    id: str
    meet: str = '--rdzv-endpoint "${MASTER_ADDR%% *}:$MASTER_PORT"'  # of several addresses of the first machine the first
    address: str = "--host 0.0.0.0"
    config: str | None = None


SLURM = Starts("${SLURM_RESTART_COUNT:-0}", '"${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}"')


@dataclass(frozen=True)
class Task:
    """A script that runs once on each of `nodes` machines of the job, from the `first` on; shared: others run there too."""

    name: str
    script: str
    nodes: int = 1
    first: int = 0
    shared: bool = False


def training(cfg: Config, cluster: Cluster, layout: Layout, folder: Path, starts: Starts = SLURM) -> list[Task]:
    """The tasks of a run; folder: the directory in which all of them start."""
    *words, train = train_lines(cfg, cluster, layout, starts)
    tasks = [Task("train", text([*head(folder), *words, f"exec {train}"]), layout.train_nodes, shared=layout.shared)]
    if layout.serve_nodes:
        lines = [
            *head(folder),
            f"{serve_line(cfg, cluster, layout, starts)} &",
            "trap 'kill $! 2>/dev/null || true' TERM",
            "wait || true; wait || true",
            "exit 1",  # it is the run's end that ends them: servers that ended by themselves have failed
        ]
        first = 0 if layout.shared else layout.train_nodes
        tasks.append(Task("serve", text(lines), layout.serve_nodes, first, layout.shared))
    return tasks


def train_lines(cfg: Config, cluster: Cluster, layout: Layout, starts: Starts) -> list[str]:
    """Of a machine of the ranks; the last is the command."""
    lines = [
        f"words=(train {shlex.quote(_config(cfg, starts))})",
        f'if [ "{starts.count}" -gt 0 ]; then words+=(--resume true --overwrite false); fi',
    ]
    if layout.serve_nodes:
        lines.append(f"words+=(--rollout.server.rendezvous {_rendezvous(cfg, starts)})")
    if layout.train_nodes == 1:
        return [*lines, f'{joined([cluster.python, "-m", "tepo_megatron"])} "${{words[@]}}"']
    start = [
        *(cluster.python, "-m", "torch.distributed.run"),
        *("--nnodes", str(layout.train_nodes), "--nproc-per-node", str(layout.ranks)),
        *("--rdzv-backend", "c10d", "--max-restarts", "0"),
    ]
    return [*lines, f'{joined(start)} {starts.meet} --rdzv-id {starts.id} -m tepo_megatron "${{words[@]}}"']


def serve_line(cfg: Config, cluster: Cluster, layout: Layout, starts: Starts) -> str:
    """The command of a machine that serves."""
    serve = joined([cluster.python, *_serve(_config(cfg, starts), layout)])
    return f"{serve} {starts.address} --rollout.server.rendezvous {_rendezvous(cfg, starts)}"


def side_by_side(serve: str, train: str) -> list[str]:
    """Two commands of one machine that end with the first of them; the status is that of training."""
    return [
        f"{serve} & serve=$!",
        f"{train} & train=$!",
        "trap 'kill $train $serve 2>/dev/null' TERM INT",
        "ended=0; wait -n $train $serve || ended=$?",
        "if kill -0 $train 2>/dev/null && [ $ended -eq 0 ]; then ended=1; fi",  # servers that end first end the run
        "kill $train $serve 2>/dev/null || true",
        "wait",
        "exit $ended",
    ]


def local_training(cfg: Config, cluster: Cluster, layout: Layout, folder: Path) -> Task:
    """The same on this machine; servers apart are kept beside the ranks, and end with them."""
    train = joined([cluster.python, "-m", "tepo_megatron", "train", str(cfg.run_dir / "config.yaml")])
    lines = [*head(folder), *_exports(cluster)]
    if not layout.serve_nodes:
        return Task("train", text([*lines, f"exec {train}"]))
    serve = joined([cluster.python, *_serve(str(cfg.run_dir / "config.yaml"), layout)])
    return Task("train", text([*lines, *side_by_side(serve, train)]))


def command(kind: str, words: Sequence[str], cluster: Cluster, folder: Path, local: bool) -> Task:
    """`tools/convert.py WORDS` or `tepo evaluate WORDS`, on one machine."""
    exports = _exports(cluster) if local else []
    return Task(kind, text([*head(folder), *exports, f"exec {joined([cluster.python, *_COMMANDS[kind], *words])}"]))


def batch_setup(cfg: Config, slurm: SlurmConfig, home: Path) -> str:
    """For the batch script of a run: what it does on the signal before its time limit, and when a task fails.

    Before the limit it waits for the next checkpoint, so that few steps are taken twice, and after the last one for the end of
    the run, but not until the limit; then it is queued again. After a failure it is queued again at once, unless the starts
    before failed at the same checkpoint. The script may be killed too: a step of its own sees that, and does as it would have.

    home: for the log of that step, and the checkpoints at which starts of a job failed.
    """
    name = cfg.run_dir.absolute().name
    log, failures = (shlex.quote(str(home / f"{name}-{what}")) for what in ("guard-%j.log", "failures-"))
    patience = slurm.warning_seconds - min(_MARGIN_SECONDS, slurm.warning_seconds // 2)
    return f"""
# queued again before the time limit: after the next checkpoint, or {patience} s from now without one
set +vx
checkpoints={shlex.quote(str((cfg.run_dir / "checkpoints").absolute()))}
failures={failures}"$SLURM_JOB_ID"
last=step-{cfg.training.steps:08d}
newest() {{ ls "$checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | sort -V | tail -n 1; }}
under_way() {{ kill -0 "${{pids[0]}}" 2>/dev/null; }}
used_up() {{
  [ "${{SLURM_RESTART_COUNT:-0}}" -ge {slurm.restarts} ] &&
    echo "launch: $1, and slurm.restarts={slurm.restarts} were made: this is the end"
}}
queue_again() {{
  trap '' USR1
  if used_up "the time limit is near"; then return; fi
  before=$(newest); end=$((SECONDS + {patience}))
  echo "launch: the time limit is near; newest checkpoint: ${{before:-none}}; waiting for the next"
  while under_way && [[ "$(newest)" = "$before" || "$(newest)" = "$last" ]] && [ "$SECONDS" -lt "$end" ]; do sleep 2; done
  if under_way; then
    echo "launch: queued again; newest checkpoint: $(newest)"
    scontrol requeue "$SLURM_JOB_ID"
  fi
}}
trap queue_again USR1

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
  if [ "$status" -ne 0 ] && job_says ' JobState=RUNNING '; then after_failure "a task ended with status $status"; fi
}}
trap ended EXIT

# the batch script's own death, which ends the job by signal 9 for a reason of Slurm's: `scancel` gives none
killed() {{
  if job_says ' ExitCode=0:9 ' && ! job_says ' Reason=None '; then after_failure "the batch script was killed"; fi
  exit 0
}}
guard="$(declare -p checkpoints failures); $(declare -f newest used_up job_says after_failure killed)"
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head_node" --open-mode=append --output={log} \\
  bash -c "$guard; trap killed TERM; sleep infinity & wait" &
"""


def variables(cluster: Cluster) -> dict[str, str]:
    """Environment variables of every task, as a shell writes their values."""
    return {name: shlex.quote(value) for name, value in (cluster.environment | cluster.network.variables).items()}


def head(folder: Path) -> list[str]:
    """Of every script."""
    return ["set -euo pipefail", f"cd {shlex.quote(str(folder))}"]


def _exports(cluster: Cluster) -> list[str]:
    return [f"export {name}={value}" for name, value in variables(cluster).items()]


def _serve(config: str, layout: Layout) -> list[str]:
    """`tepo serve` for one machine's servers."""
    words = ["-m", "tepo_megatron", "serve", config]
    return [*words, "--rollout.servers", str(layout.servers), "--rollout.min_servers", "1"]


def _config(cfg: Config, starts: Starts) -> str:
    return starts.config or str(cfg.run_dir / "config.yaml")


def _rendezvous(cfg: Config, starts: Starts) -> str:
    """A folder of each start: what a killed one left behind is never found."""
    return f"{shlex.quote(str(cfg.rollout.server.rendezvous))}/{starts.id}"


def joined(words: Sequence[str]) -> str:
    """Words of a command."""
    return " ".join(shlex.quote(word) for word in words)


def text(lines: Sequence[str]) -> str:
    """Of a script."""
    return "\n".join(lines) + "\n"
