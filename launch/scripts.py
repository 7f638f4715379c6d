"""The shell scripts of a job. Each is complete: what stands here is what runs. From a job's second start on a run resumes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.layout import Layout
from launch.profile import Cluster
from tepo_megatron.config import Config

_COMMANDS = {"convert": ["tools/convert.py"], "evaluate": ["-m", "tepo_megatron", "evaluate"]}


# Of several addresses of the first machine the first.
ENDPOINT = '--rdzv-endpoint "${MASTER_ADDR%% *}:$MASTER_PORT"'


@dataclass(frozen=True)
class Starts:
    """What a scheduler says of a start of a job, in words of the shell.

    count: how often it was started before; id: unlike that of every other start of every other job; meet: where the machines of
    the ranks meet and which of them this is, as options of torchrun; address: options of `tepo serve`; config: the run's, None:
    that of its folder.
    """

    count: str
    id: str
    meet: str = f'{ENDPOINT} --node-rank "$SLURM_PROCID"'
    address: str = "--host 0.0.0.0"
    config: str | None = None


@dataclass(frozen=True)
class Task:
    """A script that runs once on each of `nodes` machines of the job, from the `first` on; shared: others run there too."""

    name: str
    script: str
    nodes: int = 1
    first: int = 0
    shared: bool = False


def training(cfg: Config, cluster: Cluster, layout: Layout, folder: Path, starts: Starts) -> list[Task]:
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
    env = ""
    if cfg.platform == "cuda":  # an equal share of the cores: torchrun gives each rank one
        share = f"$(nproc) > {layout.ranks} ? $(nproc) / {layout.ranks} : 1"
        env = f'env OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(( {share} ))}}" '
    start = [
        *(cluster.python, "-m", "torch.distributed.run"),
        *("--nnodes", str(layout.train_nodes), "--nproc-per-node", str(layout.ranks)),
        # not c10d, whose agents unpickle what anybody put into their store (torch 2.13)
        *("--rdzv-backend", "static", "--max-restarts", "0"),
    ]
    return [*lines, f'{env}{joined(start)} {starts.meet} --rdzv-id {starts.id} -m tepo_megatron "${{words[@]}}"']


def serve_line(cfg: Config, cluster: Cluster, layout: Layout, starts: Starts) -> str:
    """The command of a machine that serves."""
    serve = joined([cluster.python, *serve_words(_config(cfg, starts), layout)])
    return f"{serve} {starts.address} --rollout.server.rendezvous {_rendezvous(cfg, starts)}"


def serve_words(config: str, layout: Layout) -> list[str]:
    """`tepo serve` for one machine's servers."""
    words = ["-m", "tepo_megatron", "serve", config]
    return [*words, "--rollout.servers", str(layout.servers), "--rollout.min_servers", "1"]


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


def command(kind: str, words: Sequence[str], cluster: Cluster, folder: Path, exports: Sequence[str] = ()) -> Task:
    """`tools/convert.py WORDS` or `tepo evaluate WORDS`, on one machine. exports: lines before it."""
    return Task(kind, text([*head(folder), *exports, f"exec {joined([cluster.python, *_COMMANDS[kind], *words])}"]))


def variables(cluster: Cluster) -> dict[str, str]:
    """Environment variables of every task, as a shell writes their values."""
    return {name: shlex.quote(value) for name, value in (cluster.environment | cluster.network.variables).items()}


def head(folder: Path) -> list[str]:
    """Of every script."""
    return ["set -euo pipefail", f"cd {shlex.quote(str(folder))}"]


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
