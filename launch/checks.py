"""Check before submission for problems that would otherwise appear, perhaps silently, only after a job got its machines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from launch.profile import Cluster
from launch.sections import reserved
from tepo_megatron.config import Config
from tepo_megatron.errors import ConfigError


def check_section(cluster: Cluster, executor: str) -> None:
    """Raise ConfigError if the profile lacks the section of an executor.

    Args:
        cluster: The cluster's profile.
        executor: Name of the executor and of its section.
    """
    if getattr(cluster, executor) is None:
        raise ConfigError(
            f"--executor {executor}: the cluster's profile has no {executor} section; give one with --cluster PROFILE"
        )


def check_secrets(cluster: Cluster) -> None:
    """Raise ConfigError if a secret is not set here."""
    for name in cluster.secrets:
        if not os.environ.get(name):
            raise ConfigError(f"secrets: {name} is not set; `export {name}=...` before, or remove it from the profile")


def check_paths(paths: Iterable[Path]) -> None:
    """Raise ConfigError for a path that NeMo-Run would corrupt."""
    for path in paths:
        if reserved(path.absolute()):
            raise ConfigError(f"{path.absolute()}: NeMo-Run replaces /nemo_run in its scripts; use a folder of another name")


def check_run(cfg: Config, cluster: Cluster) -> None:
    """Raise ConfigError for a run that could not continue after its time limit, or whose files the container does not see.

    Args:
        cfg: The run's config.
        cluster: The cluster's profile.
    """
    check_paths([Path.cwd(), cfg.run_dir])
    if cluster.slurm is not None and cluster.slurm.restarts and not cfg.checkpoint.every and not cfg.rollout.only:
        raise ConfigError(
            f"checkpoint.every=0: after its time limit of {cluster.slurm.time} the run would start over; set it to a number of "
            "steps, or slurm.restarts in the cluster's profile to 0"
        )
    if cluster.container is None:
        return
    seen = [Path.cwd(), *(Path(mount.split(":")[1]) for mount in cluster.container.mounts)]
    for key, used in folders(cfg):
        if used is not None and not any(Path(used).absolute().is_relative_to(root) for root in seen):
            parent = Path(used).absolute().parent
            raise ConfigError(f"{key}={used} is not in the container; add {parent}:{parent} to container.mounts")


def folders(cfg: Config) -> list[tuple[str, str | None]]:
    """Return the paths that the tasks read and write, by key."""
    return [
        ("output", cfg.output),
        ("model.path", cfg.model.path),
        ("objective.ref_kl.path", cfg.objective.reference_path),
        *(("data.train", source.path if cfg.rollout.replay is None else None) for source in cfg.data.sets),
        ("data.eval", cfg.data.eval),
        ("rollout.replay", cfg.rollout.replay),
        ("rollout.server.rendezvous", cfg.rollout.server.rendezvous_folder),
        ("sync.transport.folder", cfg.sync.shared_folder if cfg.sync.shared_folder != "/dev/shm" else None),
    ]
