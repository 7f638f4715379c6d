"""Check what the cluster offers: the environment of the tasks, the Slurm partition (`sinfo`), and the run's folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from launch.layout import Layout
from launch.profile import Cluster, ContainerConfig
from tepo_megatron.config import Config

_REFERENCE = re.compile(r"[a-z0-9]+([._/:-]+[A-Za-z0-9_]+)*(@sha256:[0-9a-f]{64})?")  # of Docker
_EXAMPLE = "my-account"
_ANSWER_SECONDS = 5  # limit since a call of `sinfo`: the check is optional; then the partition is not checked
_GPUS = re.compile(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)")
_STATE_BYTES = 12  # bytes of a parameter in a checkpoint in addition to the weight: fp32 master and both moments
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}


def environment_faults(cluster: Cluster) -> Iterator[str]:
    """Yield the faults of the tasks' environment."""
    yield from _examples(cluster)
    container = cluster.container
    if shutil.which("sbatch") is None:
        yield "sbatch is not on PATH; call launch on a login node of the cluster"
    yield from _interpreter(cluster.python) if container is None else _pyxis(container)


def _interpreter(python: str) -> Iterator[str]:
    if shutil.which(python) is None:
        yield (
            f"python={python} is not a program here; run `make` for .venv/bin/python, or name the interpreter of the training "
            "environment in the profile"
        )


def _pyxis(container: ContainerConfig) -> Iterator[str]:
    """Yield the faults of image and mounts for Pyxis, which takes a path that begins with / or . for a file."""
    image = container.image
    if image.startswith(("/", ".")):
        if not Path(image).is_file():
            yield f"container.image={image} is no file here; import it (`enroot import -o {image} docker://...`) or correct it"
    elif image.endswith(".sqsh"):
        yield f"container.image={image}: Pyxis takes it for an image of a registry; write {Path(image).absolute()}"
    else:
        bare = image.removeprefix("docker://").rpartition("@")[2]
        _, sign, name = bare.rpartition("#")
        first = name.partition("/")[0]
        if not sign and "/" in name and ("." in first or ":" in first):
            right = bare.replace(f"{first}/", f"{first}#", 1)
            yield f"container.image={image}: Pyxis takes {first} for a folder of Docker Hub; write {right}"
        elif not _REFERENCE.fullmatch(name):
            yield f"container.image={image} is no image; write [REGISTRY#]NAME[:TAG] or the path of a .sqsh file"
    for mount in container.mounts:
        source = mount.split(":")[0]
        if not Path(source).exists():
            yield (
                f"container.mounts: {source} does not exist here; correct it, or move the mount to container.node_mounts "
                "if the folder is on the machines only"
            )


def _examples(cluster: Cluster) -> Iterator[str]:
    """Yield the values that the example profiles mark as to be changed."""
    found = {} if cluster.container is None else {"container.image": cluster.container.image}
    if cluster.slurm is not None:
        found["slurm.account"] = cluster.slurm.account
    for key, value in found.items():
        if value.startswith("registry.example.com") or value == _EXAMPLE:
            yield f"{key}={value} is the value of the example profile; change it to your cluster's"


def partition_faults(cluster: Cluster, layout: Layout) -> Iterator[str]:
    """Yield what the partition of a job does not have. Without a partition, `sinfo` or its answer nothing is checked."""
    slurm = cluster.slurm
    if slurm is None or slurm.partition is None:
        return
    words = ["sinfo", "--noheader", "--partition", slurm.partition, "--format", "%D|%l|%G"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        return
    groups = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") >= 2]
    if not groups:
        yield f"slurm.partition={slurm.partition} is none of this cluster's; choose one that `sinfo --summarize` lists"
        return
    seconds = [limit for _, text, _ in groups if (limit := _seconds(text)) is not None]
    if seconds and slurm.seconds > max(seconds):
        yield f"slurm.time={slurm.time} exceeds the limit {groups[0][1]} of the partition {slurm.partition}; lower it"
    wanted, asked = layout.nodes + cluster.node_check.spare_nodes, cluster.gpus_per_node or 0
    gpus = [sum(map(int, _GPUS.findall(gres))) for *_, gres in groups]
    if asked and not any(gpus):
        yield (
            f"gpus_per_node={asked}: the machines of the partition {slurm.partition} have no GRES of GPUs; set gpus_per_node "
            f"to null and ranks_per_node to {asked}, or choose another partition"
        )
    elif asked > max(gpus):
        yield (
            f"gpus_per_node={asked}: the machines of the partition {slurm.partition} have {max(gpus)} GPUs at most; lower it, "
            "or choose another partition"
        )
    elif (there := sum(int(nodes) for (nodes, *_), n in zip(groups, gpus, strict=True) if n >= asked)) < wanted:
        yield (
            f"slurm.partition={slurm.partition} has {there} machines with {asked} GPUs, and the run takes {wanted}; lower "
            "parallel.* or rollout.servers, or choose another partition"
        )


def _seconds(text: str) -> int | None:
    """Return the seconds of a time limit as Slurm prints it; None for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def host_path(path: str | Path, cluster: Cluster) -> Path:
    """Return where a path of the tasks is on this machine: with a container, on the host's side of its mount."""
    place = Path(path).absolute()
    mounts = [] if cluster.container is None else [mount.split(":")[:2] for mount in cluster.container.all_mounts]
    inside = [(Path(target), Path(source)) for source, target in mounts if place.is_relative_to(target)]
    if not inside or place.is_relative_to(Path.cwd()):
        return place
    target, source = max(inside, key=lambda pair: len(pair[0].parts))
    return source / place.relative_to(target)


def storage_faults(cfg: Config, cluster: Cluster) -> Iterator[str]:
    """Yield the faults of the run's folder."""
    folder = host_path(cfg.output, cluster)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield f"output={cfg.output}: {folder} cannot be written by you; give another output"
        return
    free, wanted = shutil.disk_usage(folder).free, written_bytes(cfg, host_path(cfg.model.path, cluster))
    if free < wanted:
        yield (
            f"output={cfg.output}: {folder} has {free / 1e9:.3g} GB free, and checkpoints and exported model take about "
            f"{wanted / 1e9:.3g} GB; free some, lower checkpoint.keep_last={cfg.checkpoint.keep_last}, or give another output"
        )


def written_bytes(cfg: Config, model: Path) -> float:
    """Return the bytes that a run keeps on its disk: checkpoints, one more while it is written, and the exported model."""
    sizes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    parameters = sizes / 2  # checkpoints on the hub are in bf16
    weight = _WEIGHT_BYTES[cfg.model.dtype]
    kept = cfg.checkpoint.keep_last + 1 if cfg.checkpoint.every and not cfg.rollout.only else 0
    return parameters * (kept * (_STATE_BYTES + weight) + (weight if cfg.export_hf else 0))
