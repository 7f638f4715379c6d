"""Generate the shell scripts of a job. Each is complete: nothing else runs. From a job's second start on, a run resumes."""

from __future__ import annotations

import importlib
import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.jobs import JobFolder
from launch.layout import Layout
from launch.profile import Cluster
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config

if TYPE_CHECKING:
    from launch.nemo import Submission

_EVALUATE, _CONVERT = ["-m", "tepo_megatron", "evaluate"], "tools/convert.py"
# Options for the rendezvous of the ranks' machines. The first machine may have several addresses; take the first.
_RENDEZVOUS = '--rdzv-endpoint "${MASTER_ADDR%% *}:$MASTER_PORT" --node-rank "$SLURM_PROCID"'


@dataclass(frozen=True)
class StartVariables:
    """Information about a start of a job that the scheduler provides, as shell words."""

    count: str  # number of earlier starts of the job
    id: str  # unique among all starts of all jobs
    config: str = ""
    setup: tuple[str, ...] = ()
    # Words that record the packages of the environment, after those of its Python. None of them: no record.
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A script that runs once on each of several machines of a job."""

    name: str
    script: str
    nodes: int = 1
    first: int = 0  # index of its first machine in the job
    shared: bool = False  # True if another task runs on the same machines


def training(cfg: Config, cluster: Cluster, layout: Layout, folder: Path, starts: StartVariables) -> list[Task]:
    """Return the tasks of a run."""
    *words, train = _train_lines(cfg, cluster, layout, starts)
    tasks = [
        Task("train", text([*head(folder), *starts.setup, *words, f"exec {train}"]), layout.train_nodes, shared=layout.shared)
    ]
    if layout.serve_nodes:
        serve = joined([cluster.python, *serve_words(starts.config, layout)])
        lines = [
            *head(folder),
            *starts.setup,
            f"{serve} --host 0.0.0.0 --rollout.server.rendezvous {_rendezvous(cfg, starts)} &",
            "trap 'kill $! 2>/dev/null || true' TERM",
            "wait || true; wait || true",
            "exit 1",  # the end of the run stops the servers, so servers that ended by themselves have failed
        ]
        first = 0 if layout.shared else layout.train_nodes
        tasks.append(Task("serve", text(lines), layout.serve_nodes, first, layout.shared))
    return tasks


def _train_lines(cfg: Config, cluster: Cluster, layout: Layout, starts: StartVariables) -> list[str]:
    """Return the lines for a machine with ranks. The last line is the command."""
    lines = [
        *package_lines(cluster, starts.packages, '"$SLURM_PROCID"'),
        f"words=(train {shlex.quote(starts.config)})",
        f'if [ "{starts.count}" -gt 0 ]; then words+=(--resume true --overwrite false); fi',
    ]
    if layout.serve_nodes:
        lines.append(f"words+=(--rollout.server.rendezvous {_rendezvous(cfg, starts)})")
    nodes = f" --nnodes {layout.train_nodes} {_RENDEZVOUS} --rdzv-id {starts.id}" if layout.train_nodes > 1 else ""
    return [*lines, f'{joined([cluster.python, "-m", "tepo_megatron"])} "${{words[@]}}"{nodes}']


def serve_words(config: str, layout: Layout) -> list[str]:
    """Return the words of `tepo serve` for one machine's servers."""
    words = ["-m", "tepo_megatron", "serve", config]
    return [*words, "--rollout.servers", str(layout.servers), "--rollout.min_servers", "1"]


def side_by_side(serve: str, train: str) -> list[str]:
    """Return lines that run two commands concurrently on one machine and end both when the first ends.

    The exit status is that of training. Servers that end first make it nonzero.
    """
    return [
        f"{serve} & serve=$!",
        f"{train} & train=$!",
        "trap 'kill $train $serve 2>/dev/null' TERM INT",
        "ended=0; wait -n $train $serve || ended=$?",
        "if kill -0 $train 2>/dev/null && [ $ended -eq 0 ]; then ended=1; fi",  # servers that end first fail the run
        "kill $train $serve 2>/dev/null || true",
        "wait",
        "exit $ended",
    ]


def package_lines(cluster: Cluster, packages: Sequence[str], machine: str = "0") -> list[str]:
    """Return the line that records the packages of the environment on the first machine. Its failure does not end the job."""
    elsewhere = "" if machine == "0" else f"[ {machine} != 0 ] || "
    return [f"{elsewhere}{joined([cluster.python, *packages])} || true"] if packages else []


def command(kind: str, words: Sequence[str], cluster: Cluster, folder: Path, exports: Sequence[str], code: Path | None) -> Task:
    """Return the task that runs `tools/convert.py WORDS` or `tepo evaluate WORDS` on one machine, from a snapshot if any."""
    program = _EVALUATE if kind == "evaluate" else [_CONVERT if code is None else str(code / _CONVERT)]
    return Task(kind, text([*head(folder), *exports, f"exec {joined([cluster.python, *program, *words])}"]))


def shell(cluster: Cluster, folder: Path, home: Path, lines: Sequence[str]) -> list[str]:
    """Return the words of an interactive shell in the environment of a job's tasks."""
    exports = [f"export {name}={value}" for name, value in variables(cluster, home).items()]
    return ["bash", "-c", text([f"cd {shlex.quote(str(folder))}", *exports, *lines, "exec bash -i"])]


def variables(cluster: Cluster, home: Path) -> dict[str, str]:
    """Return the environment variables of every task, with values quoted for a shell."""
    values = cluster.environment | cluster.network.variables | cluster.cache_variables(home)
    return {name: shlex.quote(value) for name, value in values.items()}


def head(folder: Path) -> list[str]:
    """Return the first lines of every script."""
    return ["set -euo pipefail", f"cd {shlex.quote(str(folder))}"]


def _rendezvous(cfg: Config, starts: StartVariables) -> str:
    """Return a rendezvous folder that no other start uses, so that the servers of a killed start are never found."""
    return f"{shlex.quote(str(cfg.rollout.server.rendezvous_folder))}/{starts.id}"


def joined(words: Sequence[str]) -> str:
    """Return the words of a command, quoted and joined."""
    return " ".join(shlex.quote(word) for word in words)


def text(lines: Sequence[str]) -> str:
    """Return the lines as the text of a script."""
    return "\n".join(lines) + "\n"


def submission(
    slot: JobFolder,
    tasks: Sequence[Task],
    cluster: Cluster,
    after: str | None = None,
    setup: str = "",
    requeued: bool = False,
    spare_nodes: int = 0,
    variables: Sequence[str] = (),
) -> Submission:
    """Return a submission, through launch/nemo.py. Raise ConfigError if NeMo-Run or another package is missing."""
    os.environ["NEMORUN_HOME"] = str(slot.home)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NeMo-Run's dependencies warn about each other
            nemo = importlib.import_module("launch.nemo")
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} is not installed here; `make launch` makes .venv-launch, whose python has it") from None
    name, home, number = slot.name, slot.home, slot.number
    return nemo.Submission(name, home, number, tasks, cluster, Path.cwd(), setup, requeued, after, spare_nodes, variables)
