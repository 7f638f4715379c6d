"""Check the folder of the run: whether it can be written, and whether its checkpoints fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from launch.profile import Cluster
from tepo_megatron.config import Config

_STATE_BYTES = 12  # bytes of a parameter in a checkpoint in addition to the weight: fp32 master and both moments
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}


def host_path(path: str | Path, cluster: Cluster) -> Path:
    """Return where a path of the tasks is on this machine: with a container, on the host's side of its mount."""
    place = Path(path).absolute()
    mounts = [] if cluster.container is None else [mount.split(":")[:2] for mount in cluster.container.all_mounts]
    inside = [(Path(target), Path(source)) for source, target in mounts if place.is_relative_to(target)]
    if not inside or place.is_relative_to(Path.cwd()):
        return place
    target, source = max(inside, key=lambda pair: len(pair[0].parts))
    return source / place.relative_to(target)


def faults(cfg: Config, cluster: Cluster) -> Iterator[str]:
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
