"""The executor for SkyPilot's managed jobs: requirements of a run, and the scripts of its machines.

launch/nemo_sky.py calls SkyPilot. SkyPilot restarts such a job on other machines when it loses some. All machines run one
script. SKYPILOT_NODE_RANK is the index of a machine, SKYPILOT_NODE_IPS lists all machines, rank 0 first. Each start completes
the setup on all machines before it runs anything else; in the setup the first machine counts the starts. The run's folder is on
the machines only; only the record of the job is here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from launch import check_step, checks, nemo_sky, scripts
from launch.jobs import JobFolder, LogSelection, SubmittedJob
from launch.layout import Layout
from launch.nemo_sky import ManagedJob
from launch.profile import Cluster
from launch.sections import SkypilotConfig
from tepo_megatron.config import Config
from tepo_megatron.config.io import to_yaml
from tepo_megatron.errors import ConfigError

NAME, RUN_IS_HERE, QUEUES = "skypilot", False, True
_CHECK_SECONDS = 60  # after the check's own time, in which the other machines see its result
_LOOK_SECONDS = 5  # interval at which a serving machine checks whether training has ended
_NEEDED = "launch/bootstrap.py"  # a file that identifies a checkout of this project


def after(folder: Path) -> NoReturn:
    raise ConfigError("--after: SkyPilot's managed jobs do not wait for each other; start the next one when it has ended")


def check(cluster: Cluster, cfg: Config | None) -> None:
    checks.check_section(cluster, NAME)
    checks.check_secrets(cluster)


def check_run(cfg: Config, cluster: Cluster, layout: Layout) -> None:
    """Check that the machines have the run's files, share them, and do not lose them."""
    sky = cluster.skypilot
    assert sky is not None, "checked before"
    checks.check_paths([Path.cwd(), cfg.run_dir])
    if cluster.container is not None and cluster.container.mounts:
        raise ConfigError("container.mounts: SkyPilot mounts no folders of hosts; use skypilot.volumes or skypilot.storage")
    if Path(cfg.output).is_absolute():
        raise ConfigError(
            f"output={cfg.output}: give a relative path; on the machines it is below skypilot.workdir={sky.workdir}, and here "
            "it holds the record of the job"
        )
    if cluster.node_check.spare_nodes:
        raise ConfigError(
            "node_check.spare_nodes is Slurm's; set it to 0: SkyPilot replaces machines, up to skypilot.error_restarts times"
        )
    if not cfg.checkpoint.every and not cfg.rollout.only:
        raise ConfigError("checkpoint.every=0: when machines are lost the run would start over; set it to a number of steps")
    if layout.nodes > 1 and sky.kind_of(sky.workdir) != "volume":
        raise ConfigError(
            f"this run takes {layout.nodes} machines with one folder of checkpoints, and skypilot.workdir={sky.workdir} "
            "is on a bucket, of which each machine has a copy of its own; put it below a path of skypilot.volumes, or make the "
            "run fit one machine"
        )
    server, weights = cfg.rollout.server.rendezvous_folder, cfg.sync.shared_folder
    for key, folder in (("rollout.server.rendezvous", server), ("sync.transport.folder", weights)):
        if folder is not None:
            _check_shared(key, folder, sky, layout)
    for key, path in _read(cfg):
        if path is not None and sky.kind_of(path) is None and not any(str(path) in line for line in sky.setup):
            raise ConfigError(
                f"{key}={path} is not on the machines; put it below skypilot.workdir, or a path of skypilot.volumes or "
                "skypilot.storage, or have skypilot.setup fetch it to that path"
            )


def training(cfg: Config, cluster: Cluster, layout: Layout, after: str | None, slot: JobFolder) -> ManagedJob:
    scripts_of = setup_script(cluster), run_script(cfg, cluster, layout)
    return ManagedJob(slot.name, slot.home, slot.number, layout.nodes, cluster, *scripts_of, to_yaml(cfg))


def command(kind: str, words: Sequence[str], slot: JobFolder, cluster: Cluster, after: str | None) -> NoReturn:
    raise ConfigError(f"--executor skypilot runs a CONFIG, and no `{kind}`; use slurm, kuberay or local")


def render(job: ManagedJob) -> str:
    for stays in check_code(Path.cwd()):
        print(f"launch: warning: {stays}", file=sys.stderr)
    return nemo_sky.render(job)


def start(job: ManagedJob, slot: JobFolder) -> int:
    if stays := check_code(Path.cwd()):
        raise ConfigError(stays[0])
    return slot.submitted(NAME, nemo_sky.submit(job), "managed job")


def find(slot: JobFolder) -> None:
    return None  # names of managed jobs are not unique; `sky jobs queue` lists them


def state(job: SubmittedJob) -> str:
    return nemo_sky.status(job.id)


def ended(job: SubmittedJob) -> bool:
    return nemo_sky.ended(job.id)


def logs(job: SubmittedJob, folder: Path, selection: LogSelection) -> str:
    if selection.node is not None or selection.rank is not None:
        raise ConfigError("--node, --rank: SkyPilot prints the output of all machines together; leave them out")
    return nemo_sky.logs(job.id, selection.lines)


def attach(job: SubmittedJob, node: str | None) -> NoReturn:
    raise ConfigError(f"attach: SkyPilot opens no shell in managed job {job.id}; use --executor slurm or kuberay for that")


def cancel(job: SubmittedJob) -> str:
    nemo_sky.cancel(job.id)
    return f"managed job {job.id} is cancelled"


def _check_shared(key: str, folder: str, sky: SkypilotConfig, layout: Layout) -> None:
    """Check a shared folder. The servers' folder needs hard links, and both need atomic renames: buckets have neither."""
    kind = sky.kind_of(folder)
    if layout.nodes > 1 and kind != "volume":
        raise ConfigError(
            f"{key}={folder} is not on a volume, and {layout.nodes} machines share it; put it below skypilot.volumes"
        )
    if kind not in (None, "volume"):
        raise ConfigError(
            f"{key}={folder} is on a bucket, which has neither hard links nor whole files at once; give a path below "
            "skypilot.volumes, or an absolute one of the machine's own, such as /tmp/NAME"
        )


def _read(cfg: Config) -> list[tuple[str, str | None]]:
    """Return the paths that the run reads, by key."""
    return [
        ("model.path", cfg.model.path),
        ("objective.ref_kl.path", cfg.objective.reference_path),
        *(("data.train", source.path if cfg.rollout.replay is None else None) for source in cfg.data.sets),
        ("data.eval", cfg.data.eval),
        ("rollout.replay", cfg.rollout.replay),
    ]


def check_code(folder: Path) -> list[str]:
    """Return messages about files of the checkout that would not be sent, because only HEAD is; empty if none matters."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return [f"{folder} is in no git repository, and NeMo-Run sends the commit HEAD of one; call launch in a checkout"]
    if _git(folder, "cat-file", "-e", f"HEAD:{_NEEDED}") is None:
        return [f"HEAD of {top} has no {_NEEDED}; call launch in a checkout of this project"]
    changed = (_git(folder, "diff", "--name-only", "HEAD") or "").split("\n")
    new = (_git(Path(top), "ls-files", "--others", "--exclude-standard", "--", "*.py") or "").split("\n")
    found = [name for name in changed + new if name]
    if not found:
        return []
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"{found[0]}{more} would not be sent, since NeMo-Run sends the commit HEAD; commit, stash or remove them"]


def _git(folder: Path, *words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def setup_script(cluster: Cluster) -> str:
    """Return the script that each machine runs at each start, before any machine's `run`."""
    sky = cluster.skypilot
    assert sky is not None, "checked before"
    first = f'if [ "$SKYPILOT_SETUP_NODE_RANK" -eq 0 ]; then {cluster.python} -m launch.bootstrap {nemo_sky.CONFIG}; fi'
    return scripts.text(["set -euo pipefail", *sky.setup, *_there(sky), first])


def run_script(cfg: Config, cluster: Cluster, layout: Layout) -> str:
    """Return the script that each machine runs after the setup.

    On separate machines the servers end when training has ended, with its status.
    """
    sky = cluster.skypilot
    assert sky is not None, "checked before"
    lines = [
        "set -euo pipefail",
        *_there(sky),
        f'job={scripts.joined([str(cfg.run_dir / "launch")])}/"$SKYPILOT_TASK_ID"',
        'start=$(cat "$job.starts")',  # written by the setup
        'mapfile -t machines <<< "$SKYPILOT_NODE_IPS"',
        "rank=$SKYPILOT_NODE_RANK; here=${machines[$rank]}",
        *_check_lines(cluster, layout.nodes, cluster.gpus if cfg.platform == "cuda" else 0),
    ]
    meet = '--rdzv-endpoint "$address:$port" --node-rank "$rank"'
    serves = '--host 0.0.0.0 --address "$here"'  # pods cannot resolve each other's names
    starts = scripts.StartVariables("$((start - 1))", '"$SKYPILOT_TASK_ID-$start"', meet, serves, nemo_sky.CONFIG)
    *words, train = scripts.train_lines(cfg, cluster, layout, starts)
    if not layout.serve_nodes:
        return scripts.text([*lines, *words, f"exec {train}"])
    serve = scripts.serve_line(cfg, cluster, layout, starts)
    if layout.shared:
        return scripts.text([*lines, *words, *scripts.side_by_side(serve, train)])
    return scripts.text([*lines, *_disaggregated(words, train, serve, layout)])


def _check_lines(cluster: Cluster, nodes: int, gpus: int) -> list[str]:
    """Return lines that check all machines, end the start if one is bad, and set the head's `address` and `port`."""
    names = [f"machine-{i}" for i in range(nodes)]
    folder = '"$job.$start.check"; mkdir -m 700 "$check" 2>/dev/null || [ -d "$check" ]' if nodes > 1 else "$(mktemp -d)"
    program = scripts.joined([cluster.python, f"{nemo_sky.CODE}/launch/{check_step.CHECK}"])
    words = scripts.joined(check_step.check_words(cluster, nodes, gpus))
    own = nodes > 1 and not cluster.network.interfaces
    return [
        f"check={folder}",
        f'{program} --folder "$check" --names {" ".join(names)} --name "machine-$rank" {words} || true',
        f"end=$((SECONDS + {cluster.node_check.timeout_seconds + _CHECK_SECONDS}))",  # the first machine judges
        'until [ -s "$check/good" ] || [ -s "$check/fault" ] || [ $SECONDS -gt $end ]; do sleep 1; done',
        'if [ ! -s "$check/good" ]; then',
        '  echo "launch: the node check failed and nothing was started:"',
        '  cat "$check/fault" 2>/dev/null || echo "it gave no result; its lines above say why"',
        "  exit 1",
        "fi",
        'read -r address port < "$check/endpoint"',
        *(['. "$check/machine-$rank.sh"'] if own else []),
    ]


def _there(sky: SkypilotConfig) -> list[str]:
    """Return lines that enter the base of relative paths, with the sent code on PYTHONPATH."""
    return [f"mkdir -p {sky.workdir}", f"cd {sky.workdir}", f"export PYTHONSAFEPATH=1 PYTHONPATH={nemo_sky.CODE}"]


def _disaggregated(words: list[str], train: str, serve: str, layout: Layout) -> list[str]:
    """Return lines with which the first machines train, and the others serve until a file holds training's status."""
    end = "trap 'kill $! 2>/dev/null || true' TERM INT"
    return [
        'ended="$job.$start.ended"',
        f'if [ "$rank" -lt {layout.train_nodes} ]; then',
        *(f"  {line}" for line in words),
        f"  {train} &",
        f"  {end}",
        "  status=0; wait $! || status=$?; wait",
        '  if [ "$rank" -eq 0 ]; then echo $status > "$ended.part"; mv "$ended.part" "$ended"; fi',
        "  exit $status",
        "fi",
        f"{serve} & serve=$!",
        "trap 'kill $serve 2>/dev/null || true' TERM INT",
        f'while [ ! -e "$ended" ] && kill -0 $serve 2>/dev/null; do sleep {_LOOK_SECONDS}; done',
        "kill $serve 2>/dev/null || true",
        "wait || true",
        'if [ -e "$ended" ]; then exit "$(cat "$ended")"; fi',
        "exit 1",  # servers that ended by themselves have failed
    ]
