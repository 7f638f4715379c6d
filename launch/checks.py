"""Check before submission for problems that would otherwise appear, perhaps silently, only after a job got its machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from launch.preflight.inputs import functions
from launch.profile import Cluster, assigns_secret, has_secret
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config

# Keys of folders that a run writes.
WRITTEN = ("output", "rollout.server.rendezvous", "sync.transport.folder")


def check_secrets(cluster: Cluster) -> None:
    """Raise ConfigError with a line for each secret that is not set here."""
    raise_all(
        f"secrets: {name} is not set; `export {name}=...` before, or remove it from the profile"
        for name in cluster.secrets
        if not os.environ.get(name)
    )


def raise_all(faults: Iterable[str]) -> None:
    """Raise one ConfigError with a line for each fault; none if there is none."""
    if found := list(faults):
        raise ConfigError("\n".join(found))


def check_paths(paths: Iterable[Path], *, slurm: bool = False) -> None:
    """Raise ConfigError for a path that NeMo-Run would corrupt. For Slurm it writes paths without quotes into lines of srun,
    which takes % as its own sign, and Pyxis splits them at : and ,.
    """
    for path in paths:
        if slurm and (odd := re.search(r"[^\w/.@+=-]", str(path.absolute()))):
            raise ConfigError(
                f"{str(path.absolute())!r}: {odd[0]!r} in a path would be taken apart on srun's command line; use a folder "
                "whose path has only letters, digits and _ . @ + = -"
            )
        if "/nemo_run" in str(path.absolute()):
            raise ConfigError(f"{path.absolute()}: NeMo-Run replaces /nemo_run in its scripts; use a folder of another name")


def check_words(words: Iterable[str]) -> None:
    """Raise ConfigError for words of a command that hold a secret, which would stand in its script."""
    for word in words:
        if has_secret(word) or assigns_secret(word.lstrip("-").replace("-", "_")):
            raise ConfigError(
                f"{word.partition('=')[0]:.20}...: this word looks like a secret, and the script would show it; export it in a "
                "variable, and put its name under secrets in the cluster's profile"
            )


def check_mounted(cluster: Cluster, folder: Path) -> None:
    """Raise ConfigError if the container of a command does not see the folder with its code."""
    seen = [str(Path.cwd()), *(mount.split(":")[1] for mount in cluster.container.all_mounts)] if cluster.container else ["/"]
    if not any(folder.is_relative_to(path) for path in seen):
        raise ConfigError(f"{folder} is not in the container; give a folder below {Path.cwd()}, or add it to container.mounts")


def check_run(cfg: Config, cluster: Cluster) -> None:
    """Raise ConfigError for a run that could not continue after its time limit, or whose files the container does not see."""
    check_paths([Path.cwd(), cfg.run_dir])
    raise_all(_run_faults(cfg, cluster))


def _run_faults(cfg: Config, cluster: Cluster) -> Iterator[str]:
    slurm = cluster.slurm
    if slurm is not None and slurm.restarts and not cfg.checkpoint.every and not cfg.rollout.only:
        yield (
            "checkpoint.every=0: after a failure the run would start over; set it to a number of "
            "steps, or slurm.restarts in the cluster's profile to 0"
        )
    if slurm is not None and cfg.platform == "cuda" and not cluster.gpus_per_node and not slurm.exclusive:
        yield (
            "slurm.exclusive=false and gpus_per_node=0: Slurm would give the same GPUs to several jobs; set slurm.exclusive to "
            "true, or gpus_per_node where the site has a GRES of GPUs"
        )
    if cluster.container is None:
        return
    mounts = [mount.split(":") for mount in cluster.container.all_mounts]
    for key, used in folders(cfg):
        if used is None:
            continue
        place = Path(used).absolute()
        above = [mount for mount in mounts if place.is_relative_to(mount[1])]
        if place.is_relative_to(Path.cwd()):
            continue
        if not above:
            yield f"{key}={used} is not in the container; add {place.parent}:{place.parent} to container.mounts"
        elif key in WRITTEN and "ro" in max(above, key=lambda mount: len(mount[1]))[2:]:
            root = max(above, key=lambda mount: len(mount[1]))[1]
            yield f"{key}={used} is on the read-only mount of {root}; remove :ro from container.mounts, or give another {key}"


def folders(cfg: Config) -> list[tuple[str, str | None]]:
    """Return the paths that the tasks read and write, by key."""
    return [
        ("output", cfg.output),
        ("model.path", cfg.model.path),
        ("objective.ref_kl.path", cfg.objective.reference_path),
        *(("data.train", source.path if cfg.rollout.replay is None else None) for source in cfg.data.sets),
        ("data.eval", cfg.data.eval),
        ("evaluation.benchmark_folder", cfg.evaluation.benchmark_folder if cfg.evaluation.benchmarks else None),
        *((key, function.rpartition(":")[0]) for key, function in functions(cfg)),
        ("rollout.replay", cfg.rollout.replay),
        ("rollout.server.rendezvous", cfg.rollout.server.rendezvous_folder),
        ("sync.transport.folder", cfg.sync.shared_folder if cfg.sync.shared_folder != "/dev/shm" else None),
    ]
